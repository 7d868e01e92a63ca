// Times the kernels of dispatch and combine without JAX. One process uses all GPUs; a chain of launches is a CUDA graph
// on each GPU. Routing and rows are random, and a time is that of the slowest GPU. Small batches run by the low-latency
// kernels and by the throughput kernels. To build and run it:
//   target=-gencode=arch=compute_90a,code=sm_90a
//   tools/build_kernels.sh build/k $target && nvcc -std=c++17 -O3 $target -I. benchmarks/ops/kernel_times.cu
//   build/k/*.o -o kernel_times
//   ./kernel_times OUT.json [HIDDEN EXPERTS TOP_K]
// With a shape: large batches of it alone, by two schedules each.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda_kernels/kernels.h"
#include "native_benchmark.cuh"

using namespace xen_moe;

constexpr int kMostTokens = 4096;
static int hidden = 7168, experts = 256, top_k = 8;
constexpr uint64_t kFlags = 192ull << 20, kHalf = 768ull << 20, kScratch = 64ull << 20;

struct Rank {
  Control* control;
  Mailbox* mailbox;
  char *staging, *scratch, *x, *rows, *out;
  float *scales, *row_scales, *weights, *row_weights;
  int *idx, *positions, *counts, *local;
  cudaStream_t stream;
  cudaEvent_t begin, end;
  ErrorRecord* error;
};

__global__ void Empty(int* p) {
  if (p) *p = 1;
}

struct Setting {
  bool low;
  int blocks, routing, push, parts;
};

int main(int argc, char** argv) {
  if (argc != 2 && argc != 5) return std::printf("usage: %s OUT.json [HIDDEN EXPERTS TOP_K]\n", argv[0]), 2;
  const bool shape = argc == 5;
  if (shape) hidden = std::atoi(argv[2]), experts = std::atoi(argv[3]), top_k = std::atoi(argv[4]);
  int ranks = 0;
  CHECK(cudaGetDeviceCount(&ranks));
  std::vector<Rank> all(ranks);
  std::mt19937 rng(1);
  const int most_rows = ranks * kMostTokens * top_k;
  for (int i = 0; i < ranks; ++i) {
    CHECK(cudaSetDevice(i));
    ReachPeers(i, ranks);
    CHECK(PreloadKernels(kSmallGroup));
    Rank& k = all[i];
    k.control = Device<Control>(1), k.mailbox = Device<Mailbox>(1);
    k.staging = Device<char>(2 * kHalf), k.scratch = Device<char>(kScratch);
    k.x = Device<char>(size_t{2} * kMostTokens * hidden), k.out = Device<char>(size_t{2} * kMostTokens * hidden);
    k.rows = Device<char>(size_t{2} * most_rows * hidden);
    k.scales = Device<float>(kMostTokens * 56), k.row_scales = Device<float>(size_t{56} * most_rows);
    k.weights = Device<float>(kMostTokens * top_k), k.row_weights = Device<float>(most_rows);
    k.idx = Device<int>(kMostTokens * top_k), k.positions = Device<int>(most_rows), k.counts = Device<int>(experts);
    CHECK(cudaHostAlloc(&k.error, sizeof(ErrorRecord), cudaHostAllocMapped | cudaHostAllocPortable));
    *k.error = ErrorRecord{};
    std::vector<int> idx;
    std::vector<float> weights;
    for (int t = 0; t < kMostTokens; ++t) {
      std::vector<int> e(experts);
      for (int n = 0; n < experts; ++n) e[n] = n;
      for (int n = 0; n < top_k; ++n) {
        std::swap(e[n], e[n + rng() % (experts - n)]);
        idx.push_back(e[n]);
        weights.push_back(static_cast<float>(rng() % 1000) / 1000.0f);
      }
    }
    CHECK(cudaMemcpy(k.idx, idx.data(), idx.size() * 4, cudaMemcpyDefault));
    CHECK(cudaMemcpy(k.weights, weights.data(), weights.size() * 4, cudaMemcpyDefault));
    FillRandom<<<1024, 256>>>(reinterpret_cast<uint16_t*>(k.x), size_t{1} * kMostTokens * hidden);
    FillRandom<<<1024, 256>>>(reinterpret_cast<uint16_t*>(k.rows), size_t{1} * most_rows * hidden);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaStreamCreateWithFlags(&k.stream, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&k.begin));
    CHECK(cudaEventCreate(&k.end));
  }
  for (int r = 0; r < ranks; ++r) {
    Control c{};
    MemoryTable t{};
    for (int j = 0; j < ranks; ++j) c.mailbox[j] = all[j].mailbox, t.staging[j] = all[j].staging;
    t.flag_bytes = kFlags, t.data_bytes = kHalf - kFlags;
    t.scratch = all[r].scratch, t.scratch_bytes = kScratch;
    c.current = c.memory[0] = t;
    c.error = all[r].error;
    CHECK(cudaMemcpy(all[r].control, &c, sizeof(c), cudaMemcpyDefault));
  }
  std::FILE* out = std::fopen(argv[1], "w");
  if (!out) return std::perror(argv[1]), 1;
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  std::fprintf(out, "{\"device\": \"%s\", \"gpus\": %d, \"hidden\": %d, \"experts\": %d, \"top_k\": %d, \"entries\": [",
               properties.name, ranks, hidden, experts, top_k);
  bool comma = false;

  // Microseconds of one launch on the slowest GPU: graphs of `inner` launches, median and best of the repeats.
  auto run = [&](const char* what, int tokens, const Setting& setting, auto launch) {
    const int inner = tokens > 1000 ? 20 : 200;
    std::vector<cudaGraphExec_t> graphs(ranks);
    for (int r = 0; r < ranks; ++r) {
      CHECK(cudaSetDevice(r));
      cudaGraph_t graph;
      CHECK(cudaStreamBeginCapture(all[r].stream, cudaStreamCaptureModeThreadLocal));
      for (int i = 0; i < inner; ++i) CHECK(launch(r));
      CHECK(cudaStreamEndCapture(all[r].stream, &graph));
      CHECK(cudaGraphInstantiate(&graphs[r], graph, 0));
      CHECK(cudaGraphUpload(graphs[r], all[r].stream));
      CHECK(cudaGraphDestroy(graph));
      CHECK(cudaStreamSynchronize(all[r].stream));
    }
    std::vector<float> times;
    for (int repeat = 0; repeat < 6; ++repeat) {
      for (int r = 0; r < ranks; ++r) {
        CHECK(cudaSetDevice(r));
        CHECK(cudaEventRecord(all[r].begin, all[r].stream));
        CHECK(cudaGraphLaunch(graphs[r], all[r].stream));
        CHECK(cudaEventRecord(all[r].end, all[r].stream));
      }
      float slowest = 0;
      for (int r = 0; r < ranks; ++r) {
        CHECK(cudaSetDevice(r));
        CHECK(cudaStreamSynchronize(all[r].stream));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, all[r].begin, all[r].end));
        slowest = std::max(slowest, ms * 1e3f / inner);
        if (all[r].error->failure) {
          std::printf("%s: rank %d gave up: %llx\n", what, r, (unsigned long long)all[r].error->failure);
          std::exit(1);
        }
      }
      if (repeat > 0) times.push_back(slowest);
    }
    std::sort(times.begin(), times.end());
    for (int r = 0; r < ranks; ++r) CHECK(cudaGraphExecDestroy(graphs[r]));
    std::printf("%-14s %s T %4d blocks %3d routing %2d push %3d parts %2d: median %7.2f best %7.2f us\n", what,
                setting.low ? "low" : "thr", tokens, setting.blocks, setting.routing, setting.push, setting.parts,
                times[times.size() / 2], times[0]);
    std::fflush(stdout);
    std::fprintf(out,
                 "%s\n {\"what\": \"%s\", \"low_latency\": %s, \"tokens\": %d, \"blocks\": %d, \"routing_blocks\": %d, "
                 "\"push_blocks\": %d, \"parts\": %d, \"us\": %.3f, \"best_us\": %.3f}",
                 comma ? "," : "", what, setting.low ? "true" : "false", tokens, setting.blocks, setting.routing,
                 setting.push, setting.parts, times[times.size() / 2], times[0]);
    comma = true;
    std::fflush(out);
  };
  auto routing = [&](int r, int tokens) {
    Routing q{};
    q.ranks = ranks, q.rank = r, q.tokens = tokens, q.top_k = q.slots = top_k, q.experts = experts;
    q.local_experts = experts / ranks, q.hidden = hidden, q.capacity = ranks * tokens * top_k, q.alignment = 1;
    q.ranks_per_node = ranks, q.layout = Layout::kGrouped;
    return q;
  };
  auto schedule = [&](const Routing& q, const Setting& setting) {
    const int tokens = q.tokens;
    Schedule s{};
    s.blocks = setting.blocks, s.push_blocks = setting.push, s.parts = setting.parts, s.low_latency = setting.low;
    s.part_elements = (hidden / setting.parts + 255) / 256 * 256;
    // Follows xen_moe_jax/backends/cuda/schedule.py: up to 2048 triples every block computes all positions for itself,
    // in shared memory.
    s.layout_blocks = setting.routing, s.segment_tokens = tokens;
    if (setting.low) return s;
    s.layout_blocks = std::max(1, (tokens * top_k + 511) / 512);
    s.segment_tokens = (tokens * ranks + 15) / 16;
    s.solo_layout = ranks * tokens * top_k <= 2048 && SoloLayoutBytes(q, s) <= SoloLayoutLimit();
    if (!s.solo_layout) {
      const int counting = (setting.blocks - setting.push) * 16;
      s.segment_tokens = std::max(32 / top_k, (ranks * tokens + counting - 1) / counting);
      const int segments = ranks * ((tokens + s.segment_tokens - 1) / s.segment_tokens);
      s.layout_blocks = std::max(1, std::min(setting.blocks - setting.push, (segments + 15) / 16));
    }
    return s;
  };
  auto call = [&](int r) {
    Call c{};
    c.control = all[r].control, c.mailbox = all[r].mailbox, c.timeout_ns = 2000000000ull, c.call_id = 1;
    return c;
  };
  auto dispatch = [&](int r, int tokens, bool fp8, const Setting& setting, WireType wire = WireType::kNative) {
    Rank& k = all[r];
    DispatchParams p{};
    p.call = call(r), p.routing = routing(r, tokens), p.schedule = schedule(p.routing, setting);
    p.element = fp8 ? Element::kByte : Element::kBf16, p.wire = wire;
    p.x = k.x, p.scales = fp8 ? k.scales : nullptr, p.topk_idx = k.idx, p.topk_weights = k.weights;
    p.rows = k.rows, p.row_scales = fp8 ? k.row_scales : nullptr, p.positions = k.positions, p.recv_counts = k.counts;
    p.weights = k.row_weights;
    p.staging = setting.low ? PlanLowLatency(p.routing, Operation::kDispatch, p.element, fp8)
                            : PlanStaging(p.routing, p.schedule, p.element, p.wire, fp8);
    Describe(&p, fp8, 0, 0);
    return LaunchDispatch(p, k.stream);
  };
  auto combine = [&](int r, int tokens, const Setting& setting, WireType wire = WireType::kNative) {
    Rank& k = all[r];
    CombineParams p{};
    p.call = call(r), p.routing = routing(r, tokens), p.schedule = schedule(p.routing, setting);
    p.element = Element::kBf16, p.wire = wire;
    p.y = k.rows, p.topk_idx = k.idx, p.positions = k.positions, p.weights = k.row_weights, p.out = k.out;
    p.staging = setting.low ? PlanLowLatency(p.routing, Operation::kCombine, p.element, false)
                            : PlanStaging(p.routing, p.schedule, p.element, p.wire, false);
    Describe(&p, true, 0, 0);
    return LaunchCombine(p, k.stream);
  };
  auto parts_of = [&](int items, int most) {  // as schedule.py
    int parts = 1;
    while (parts * 2 <= 14 && items * parts * 2 <= most) parts *= 2;
    return parts;
  };

  run("empty kernel", 0, Setting{false, 1, 0, 0, 1}, [&](int r) {
    Empty<<<1, 32, 0, all[r].stream>>>(nullptr);
    return cudaGetLastError();
  });
  std::vector<int> small{128, 1, 32, 8, 64, 256, 512};
  if (shape) small.clear();
  for (int tokens : small) {  // schedules of both kinds of kernels are those of schedule.py
    for (const Setting& setting : {Setting{false, 64, 0, 32, parts_of(tokens, 256)}, Setting{true, 96, 4, 16, 1}}) {
      run("fp8 dispatch", tokens, setting, [&](int r) { return dispatch(r, tokens, true, setting); });
      run("bf16 dispatch", tokens, setting, [&](int r) { return dispatch(r, tokens, false, setting); });
    }
    const int parts = parts_of((ranks - 1) * tokens, 4 * 32 * 16);
    for (const Setting& setting : {Setting{false, 64, 1, 32, parts}, Setting{true, 96, 1, 48, 1}})
      run("combine", tokens, setting, [&](int r) { return combine(r, tokens, setting); });
  }
  const int tokens = kMostTokens;
  const Setting few{false, 64, 0, 12, 1}, quantizing{false, 96, 0, 24, 1}, adding{false, 64, 1, 24, 1},
      halves{false, 96, 1, 48, 1};
  if (shape) {
    for (const Setting& setting : {few, Setting{false, 96, 0, 19, 1}})
      run("bf16 dispatch", tokens, setting, [&](int r) { return dispatch(r, tokens, false, setting); });
    for (const Setting& setting : {adding, Setting{false, 96, 1, 32, 1}})
      run("combine", tokens, setting, [&](int r) { return combine(r, tokens, setting); });
    std::fprintf(out, "\n]}\n");
    return std::fclose(out);
  }
  run("fp8 dispatch", tokens, few, [&](int r) { return dispatch(r, tokens, true, few); });
  run("bf16 dispatch", tokens, few, [&](int r) { return dispatch(r, tokens, false, few); });
  run("bf16, fp8 wire", tokens, quantizing,
      [&](int r) { return dispatch(r, tokens, false, quantizing, WireType::kFp8); });
  run("combine", tokens, adding, [&](int r) { return combine(r, tokens, adding); });
  run("combine fp8", tokens, halves, [&](int r) { return combine(r, tokens, halves, WireType::kFp8); });
  std::fprintf(out, "\n]}\n");
  std::fclose(out);
}
