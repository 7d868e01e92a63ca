// Times the dispatch and combine kernels alone, without JAX: one process, all GPUs, back-to-back launches, CUDA events.
// To see the cost of a part of a kernel, build it again with that part left out and give the build another NAME.
//   target=-gencode=arch=compute_90a,code=sm_90a
//   tools/build_kernels.sh build/k $target && nvcc -std=c++17 -O3 $target -I. benchmarks/ops/kernel_variants.cu
//   build/k/*.o -o variants
//   ./variants [NAME]
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "cuda_kernels/kernels.h"
#include "native_benchmark.cuh"

using namespace xen_moe;

struct Rank {
  Control* control;
  Mailbox* mailbox;
  char *staging, *scratch, *x, *rows;
  float *scales, *row_scales, *weights, *row_weights;
  int *idx, *positions, *counts;
  cudaStream_t stream;
  cudaEvent_t begin, end;
  ErrorRecord* error;
};

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "base";
  const int hidden = 7168, experts = 256, top_k = 8;
  int ranks = 0;
  CHECK(cudaGetDeviceCount(&ranks));
  for (int i = 0; i < ranks; ++i) {
    CHECK(cudaSetDevice(i));
    ReachPeers(i, ranks);
    CHECK(PreloadKernels(kSmallGroup));
  }
  const uint64_t half = 320ull << 20;
  for (int tokens : {4096, 128, 1}) {
    const int capacity = ranks * tokens * top_k;
    std::vector<Rank> all(ranks);
    std::mt19937 rng(1);
    for (int r = 0; r < ranks; ++r) {
      CHECK(cudaSetDevice(r));
      Rank& k = all[r];
      k.control = Device<Control>(1);
      k.mailbox = Device<Mailbox>(1);
      k.staging = Device<char>(2 * half);
      k.scratch = Device<char>(64 << 20);
      k.x = Device<char>(size_t{2} * tokens * hidden);
      k.rows = Device<char>(size_t{2} * capacity * hidden);
      k.scales = Device<float>(tokens * 56);
      k.row_scales = Device<float>(size_t{56} * capacity);
      k.weights = Device<float>(tokens * top_k);
      k.row_weights = Device<float>(capacity);
      k.idx = Device<int>(tokens * top_k);
      k.positions = Device<int>(capacity);
      k.counts = Device<int>(experts);
      CHECK(cudaHostAlloc(&k.error, sizeof(ErrorRecord), cudaHostAllocMapped));
      *k.error = ErrorRecord{};
      std::vector<int> idx;
      for (int t = 0; t < tokens; ++t) {
        std::vector<int> e(experts);
        for (int i = 0; i < experts; ++i) e[i] = i;
        for (int i = 0; i < top_k; ++i) std::swap(e[i], e[i + rng() % (experts - i)]), idx.push_back(e[i]);
      }
      CHECK(cudaMemcpy(k.idx, idx.data(), idx.size() * 4, cudaMemcpyDefault));
      FillRandom<<<1024, 256>>>(reinterpret_cast<uint16_t*>(k.x), size_t{1} * tokens * hidden);
      FillRandom<<<1024, 256>>>(reinterpret_cast<uint16_t*>(k.rows), size_t{1} * capacity * hidden);
      CHECK(cudaDeviceSynchronize());
      CHECK(cudaStreamCreate(&k.stream));
      CHECK(cudaEventCreate(&k.begin));
      CHECK(cudaEventCreate(&k.end));
    }
    for (int r = 0; r < ranks; ++r) {
      Control c{};
      for (int j = 0; j < ranks; ++j) c.mailbox[j] = all[j].mailbox, c.current.staging[j] = all[j].staging;
      c.current.flag_bytes = 16ull << 20;
      c.current.data_bytes = half - c.current.flag_bytes;
      c.current.scratch = all[r].scratch;
      c.current.scratch_bytes = 64 << 20;
      c.memory[0] = c.current;
      c.error = all[r].error;
      CHECK(cudaMemcpy(all[r].control, &c, sizeof(c), cudaMemcpyDefault));
    }
    auto run = [&](const char* what, auto launch, int blocks, int push, int parts) {
      const int inner = tokens > 1000 ? 10 : 40;
      std::vector<float> times;
      for (int repeat = 0; repeat < 8; ++repeat) {
        for (int r = 0; r < ranks; ++r) {
          CHECK(cudaSetDevice(r));
          CHECK(cudaDeviceSynchronize());
        }
        for (int i = 0; i <= inner; ++i) {
          for (int r = 0; r < ranks; ++r) {
            CHECK(cudaSetDevice(r));
            if (i == 1) CHECK(cudaEventRecord(all[r].begin, all[r].stream));
            CHECK(launch(r));
          }
        }
        float slowest = 0;
        for (int r = 0; r < ranks; ++r) {
          CHECK(cudaSetDevice(r));
          CHECK(cudaEventRecord(all[r].end, all[r].stream));
          CHECK(cudaStreamSynchronize(all[r].stream));
          float ms;
          CHECK(cudaEventElapsedTime(&ms, all[r].begin, all[r].end));
          slowest = std::max(slowest, ms * 1e3f / inner);
          if (all[r].error->failure)
            std::printf("rank %d gave up: %llx\n", r, (unsigned long long)all[r].error->failure), std::exit(1);
        }
        times.push_back(slowest);
      }
      std::sort(times.begin(), times.end());
      std::printf("%-14s %-14s T %4d blocks %3d push %3d parts %2d: best %7.1f median %7.1f us\n", name.c_str(), what,
                  tokens, blocks, push, parts, times[0], times[times.size() / 2]);
      std::fflush(stdout);
    };
    auto routing = [&](int r) {
      Routing q{};
      q.ranks = ranks, q.rank = r, q.tokens = tokens, q.top_k = q.slots = top_k, q.experts = experts;
      q.local_experts = experts / ranks, q.hidden = hidden, q.capacity = capacity, q.alignment = 1,
      q.ranks_per_node = ranks;
      q.layout = Layout::kGrouped;
      return q;
    };
    auto call = [&](int r) {
      Call c{};
      c.control = all[r].control, c.mailbox = all[r].mailbox, c.timeout_ns = 2000000000ull, c.call_id = 1;
      return c;
    };
    // `fp8`: rows that come in fp8, with scales. `wire`: bf16 rows are quantized on the way.
    auto dispatch = [&](const char* what, bool fp8, bool known, int blocks, int push, int parts,
                        WireType wire = WireType::kNative) {
      Schedule s{};
      s.blocks = blocks, s.push_blocks = push, s.parts = parts, s.part_elements = (hidden / parts + 255) / 256 * 256;
      // Follows xen_moe_jax/backends/cuda/schedule.py: up to 2048 triples every block computes all positions for
      // itself.
      s.solo_layout = ranks * tokens * top_k <= 2048;
      if (s.solo_layout) {
        s.layout_blocks = std::max(1, (tokens * top_k + 511) / 512);
        s.segment_tokens = (tokens * ranks + 15) / 16;
      } else {
        const int counting = (blocks - push) * 16;
        s.segment_tokens = std::max(32 / top_k, (ranks * tokens + counting - 1) / counting);
        const int segments = ranks * ((tokens + s.segment_tokens - 1) / s.segment_tokens);
        s.layout_blocks = std::max(1, std::min(blocks - push, (segments + 15) / 16));
      }
      run(
          what,
          [&](int r) {
            Rank& k = all[r];
            DispatchParams p{};
            p.call = call(r), p.routing = routing(r), p.schedule = s;
            p.element = fp8 ? Element::kByte : Element::kBf16;
            p.wire = wire;
            p.known_positions = known;
            p.x = k.x, p.scales = fp8 ? k.scales : nullptr, p.topk_idx = k.idx, p.topk_weights = k.weights;
            p.rows = k.rows, p.row_scales = fp8 ? k.row_scales : nullptr, p.positions = k.positions,
            p.recv_counts = k.counts;
            p.weights = k.row_weights;
            p.staging = PlanStaging(p.routing, s, p.element, p.wire, fp8);
            Describe(&p, fp8, 0, 0);
            return LaunchDispatch(p, k.stream);
          },
          blocks, push, parts);
    };
    auto combine = [&](const char* what, int blocks, int push, int parts, WireType wire = WireType::kNative) {
      Schedule s{};
      s.blocks = blocks, s.push_blocks = push, s.layout_blocks = 1, s.parts = parts, s.segment_tokens = 1;
      s.part_elements = (hidden / parts + 255) / 256 * 256;
      run(
          what,
          [&](int r) {
            Rank& k = all[r];
            CombineParams p{};
            p.call = call(r), p.routing = routing(r), p.schedule = s;
            p.element = Element::kBf16, p.wire = wire;
            p.y = k.rows, p.topk_idx = k.idx, p.positions = k.positions, p.weights = k.row_weights, p.out = k.x;
            p.staging = PlanStaging(p.routing, s, p.element, p.wire, false);
            Describe(&p, true, 0, 0);
            return LaunchCombine(p, k.stream);
          },
          blocks, push, parts);
    };
    if (tokens == 4096) {
      dispatch("fp8 dispatch", true, false, 64, 16, 1);
      dispatch("fp8 dispatch", true, false, 64, 24, 1);
      dispatch("bf16 dispatch", false, false, 64, 16, 1);
      dispatch("bf16, fp8 wire", false, false, 64, 24, 1, WireType::kFp8);
      combine("combine", 64, 32, 1);
      combine("combine", 32, 20, 1);
      combine("combine fp8", 64, 24, 1, WireType::kFp8);
    } else {
      const int parts = tokens == 1 ? 8 : 4;
      dispatch("fp8 dispatch", true, false, 64, 32, parts);
      dispatch("bf16 redisp", false, true, 64, 32, parts);
      combine("combine", 64, 32, parts);
    }
    for (Rank& k : all) {
      cudaFree(k.staging), cudaFree(k.rows), cudaFree(k.x), cudaFree(k.row_scales);
    }
  }
}
