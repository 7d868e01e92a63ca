// Measures the copy rate of a multiprocessor: rows from memory to one or several places, by bulk copies and through
// registers, in this GPU's memory and to another one. This rate limits an asynchronous dispatch on few thread blocks.
//   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -I. benchmarks/ops/copy_rates.cu -o copy_rates
//   ./copy_rates
// Prints a line of JSON for each setting. GB/s are of one multiprocessor.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <vector>

#include "cuda_kernels/dispatch/bulk_copy.cuh"
#include "native_benchmark.cuh"

using namespace xen_moe;
using namespace xen_moe::XEN_MOE_VARIANT;

constexpr int kRows = 8192, kRowBytes = 7168, kClaim = 4;
constexpr int kMostShared = 227 * 1024;

struct Copying {
  const char* from;
  char* to;
  unsigned* claimed;
  int copies, chunk;
  bool loads, stores;
};

__device__ int64_t Place(unsigned n) { return static_cast<int64_t>(n * 2654435761u % kRows) * kRowBytes; }

// A lane of a warp copies: `kStages` chunks in shared memory, loads two chunks (half of the stages) ahead of the
// stores.
template <int kStages>
__global__ void __launch_bounds__(512, 1) Bulk(Copying w) {
  extern __shared__ __align__(128) char shared[];
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32, chunks = kRowBytes / w.chunk;
  uint64_t* const arrived = reinterpret_cast<uint64_t*>(shared) + warp * kStages;
  char* const ring = shared + (warps * kStages * 8 + 127) / 128 * 128 + static_cast<size_t>(warp) * kStages * w.chunk;
  if (threadIdx.x % 32 != 0) return;
  for (int i = 0; i < kStages; ++i) InitArrival(arrived + i);
  FenceAsyncProxy();
  uint32_t loads = 0, stores = 0;
  unsigned row = atomicAdd(w.claimed, kClaim);
  int left = kClaim, load_chunk = 0, store_chunk = 0;
  auto load = [&] {
    if (row >= kRows) return;
    const uint32_t slot = loads++ % kStages;
    AwaitStoresRead<(kStages > 3 ? kStages / 2 - 1 : 1)>();
    if (w.loads) BulkLoad(ring + slot * w.chunk, w.from + Place(row) + load_chunk * w.chunk, w.chunk, arrived + slot);
    if (++load_chunk < chunks) return;
    load_chunk = 0, ++row;
    if (--left == 0) row = atomicAdd(w.claimed, kClaim), left = kClaim;
  };
  for (int i = 0; i < (kStages > 3 ? kStages / 2 : 2); ++i) load();
  while (stores < loads) {
    const uint32_t slot = stores % kStages;
    if (w.loads) AwaitArrival(arrived + slot, stores / kStages & 1);
    for (int i = 0; w.stores && i < w.copies; ++i) {
      const unsigned n = (stores + warp * 977 + blockIdx.x * 7919) * w.copies + i;
      BulkStore(w.to + Place(n) + store_chunk * w.chunk, ring + slot * w.chunk, w.chunk);
    }
    CommitStores();
    ++stores;
    if (++store_chunk == chunks) store_chunk = 0;
    load();
  }
  AwaitStores();
}

__global__ void __launch_bounds__(512, 1) Registers(Copying w) {
  constexpr int kVectors = kRowBytes / 16, kHeld = 7;
  static_assert(kVectors % (32 * kHeld) == 0, "");
  const int lane = threadIdx.x % 32;
  for (;;) {
    unsigned row = lane == 0 ? atomicAdd(w.claimed, 1) : 0;
    row = __shfl_sync(0xFFFFFFFFu, row, 0);
    if (row >= kRows) return;
    const int4* const from = reinterpret_cast<const int4*>(w.from + Place(row));
    for (int b = lane; b < kVectors; b += 32 * kHeld) {
      int4 held[kHeld];
#pragma unroll
      for (int i = 0; i < kHeld; ++i) held[i] = __ldcs(from + b + i * 32);
      for (int c = 0; c < w.copies; ++c) {
        int4* const to = reinterpret_cast<int4*>(w.to + Place(row * w.copies + c));
#pragma unroll
        for (int i = 0; i < kHeld; ++i) to[b + i * 32] = held[i];
      }
    }
  }
}

struct Setting {
  int blocks, warps, chunk, stages, copies;
  bool loads, stores, peer, bulk;
};

int main() {
  int gpus = 0;
  CHECK(cudaGetDeviceCount(&gpus));
  constexpr size_t kBytes = size_t{kRows} * kRowBytes;
  char* peer = nullptr;
  if (gpus > 1) {
    CHECK(cudaSetDevice(1));
    peer = Device<char>(kBytes);
  }
  CHECK(cudaSetDevice(0));
  ReachPeers(0, std::min(gpus, 2));
  char* const from = Device<char>(kBytes);
  char* const to = Device<char>(kBytes);
  unsigned* const claimed = Device<unsigned>(1);
  FillRandom<<<1024, 256>>>(reinterpret_cast<uint16_t*>(from), kBytes / 2);
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));

  std::vector<Setting> settings;
  for (int blocks : {1, 2, 4, 8, 16, 32}) settings.push_back({blocks, 16, 3584, 3, 2, true, true, false, true});
  for (int copies : {1, 2, 3}) {
    for (auto [warps, chunk, stages] : {std::array{16, 3584, 3},
                                        {8, 7168, 3},
                                        {4, 7168, 6},
                                        {8, 3584, 6},
                                        {16, 1792, 6},
                                        {4, 3584, 8},
                                        {1, 7168, 8}}) {
      settings.push_back({8, warps, chunk, stages, copies, true, true, false, true});
    }
    settings.push_back({8, 16, 0, 0, copies, true, true, false, false});
  }
  settings.push_back({8, 16, 3584, 3, 2, true, false, false, true});
  settings.push_back({8, 16, 3584, 3, 2, false, true, false, true});
  for (int blocks : {2, 4, 8, 16}) {
    if (gpus < 2) break;
    settings.push_back({blocks, 16, 3584, 3, 1, true, true, true, true});
    settings.push_back({blocks, 16, 0, 0, 1, true, true, true, false});
  }
  for (const Setting& s : settings) {
    const Copying work{from, s.peer ? peer : to, claimed, s.copies, s.chunk, s.loads, s.stores};
    const auto kernel = !s.bulk ? Registers : s.stages == 3 ? Bulk<3> : s.stages == 6 ? Bulk<6> : Bulk<8>;
    const int shared = s.bulk ? (s.warps * s.stages * 8 + 127) / 128 * 128 + s.warps * s.stages * s.chunk : 0;
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, s.bulk ? kMostShared : 0));
    float best = 1e9f;
    for (int repeat = 0; repeat < 5; ++repeat) {
      CHECK(cudaMemsetAsync(claimed, 0, sizeof(unsigned)));
      CHECK(cudaEventRecord(begin));
      kernel<<<s.blocks, s.warps * 32, shared>>>(work);
      CHECK(cudaGetLastError());
      CHECK(cudaEventRecord(end));
      CHECK(cudaEventSynchronize(end));
      float ms;
      CHECK(cudaEventElapsedTime(&ms, begin, end));
      best = std::min(best, ms);
    }
    const double rate = kBytes / (best * 1e6) / s.blocks;
    std::printf(
        "{\"blocks\": %d, \"warps\": %d, \"chunk_bytes\": %d, \"stages\": %d, \"copies\": %d, \"to\": \"%s\", \"by\": "
        "\"%s\", \"us\": %.1f, \"loaded_GBs_per_SM\": %.1f, \"stored_GBs_per_SM\": %.1f}\n",
        s.blocks, s.warps, s.chunk, s.stages, s.copies, s.peer ? "peer" : "own memory",
        s.bulk ? "bulk copies" : "registers", best * 1e3, s.loads ? rate : 0.0, s.stores ? rate * s.copies : 0.0);
  }
}
