// transport.cuh for virtual nodes of one process: the memory of another node is reached by pointer, and a put is a copy
// by the calling warp. For tests of the kernels across nodes on the GPUs of one host.
//
// Memory order: a put's stores, a system-scope fence by every lane, then the counter; so a signal covers everything
// that the warp has stored anywhere.
#pragma once

#include "cuda_kernels/core/failure.cuh"
#include "cuda_kernels/node/rail_memory.h"

namespace xen_moe {

struct PeerLink {
  const PeerTable* table;  // in device memory
  int rank;                // this rank

  static constexpr bool kReserves = false;
  __device__ __forceinline__ void Put(uint32_t generation, int target, uint64_t to, uint64_t from,
                                      uint64_t bytes) const {
    char* const* const staging = table->staging[generation % kGenerations];
    const int4* const source = reinterpret_cast<const int4*>(staging[rank] + from);
    int4* const there = reinterpret_cast<int4*>(staging[target] + to);
    constexpr int kInFlight = 8;
    const uint64_t count = bytes / 16;
    for (uint64_t base = threadIdx.x & 31; base < count; base += 32 * kInFlight) {
      int4 v[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (base + i * 32 < count) v[i] = __ldcs(source + base + i * 32);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (base + i * 32 < count) there[base + i * 32] = v[i];
      }
    }
  }
  __device__ __forceinline__ void PutSignal(uint32_t generation, int target, uint64_t to, uint64_t from, uint64_t bytes,
                                            uint32_t signal) const {
    Put(generation, target, to, from, bytes);
    __threadfence_system();
    __syncwarp();
    if ((threadIdx.x & 31) == 0) {
      uint64_t* const counter = table->counters[target] + signal;
      asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(counter), "l"(1ull) : "memory");
    }
  }
  __device__ __forceinline__ uint64_t Count(uint32_t signal) const {
    return LoadAcquireSystem(table->counters[rank] + signal);
  }
  __device__ __forceinline__ int Pending() const { return -1; }  // a put has read its source when it returns
  __device__ __forceinline__ void Fail(int target, uint64_t word) const {
    ClaimWordSystem(&table->mailbox[target]->failure, word);
  }
  __device__ __forceinline__ void Notify(int target, int about, uint64_t word) const {
    StoreRelaxedSystem(&table->mailbox[target]->told[about], word);
  }
};

}  // namespace xen_moe
