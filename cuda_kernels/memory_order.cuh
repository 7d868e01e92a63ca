// The memory-order primitives, once. All flags between ranks are written with release and read with acquire semantics
// at system scope; counters inside one GPU use GPU scope. PTX ISA, "Memory Consistency Model".
#pragma once

#include <cstdint>

#include "workspace.h"

namespace xen_moe {

__device__ __forceinline__ uint32_t LoadAcquireSystem(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t LoadAcquireGpu(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t LoadRelaxedGpu(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void StoreRelaxedSystem(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ uint64_t NowNs() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// How long to wait and whom to tell.
struct Patience {
  Control* control;
  uint64_t timeout_ns;  // 0: for ever
  uint32_t epoch;
  Operation operation;
};

static __device__ __noinline__ void GiveUp(const Patience& patience, Step step, int rank) {
  const uint64_t word = (1ull << 63) | (static_cast<uint64_t>(patience.operation) << 48) |
                        (static_cast<uint64_t>(step) << 40) | (static_cast<uint64_t>(rank) << 32) | patience.epoch;
  if (atomicExch(&patience.control->abort, 1u) == 0) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(&patience.control->error->packed), "l"(word) : "memory");
    __threadfence_system();
  }
}

// Waits until `arrived()` is true. False: some thread of this rank gave up; what was awaited must not be used.
template <class Arrived>
__device__ __forceinline__ bool WaitUntil(Arrived arrived, const Patience& patience, Step step, int rank) {
  if (arrived()) return true;
  uint64_t start = 0;
  for (;;) {
    for (int poll = 0; poll < 64; ++poll) {
      if (arrived()) return true;
    }
    if (LoadRelaxedGpu(&patience.control->abort)) return false;
    if (patience.timeout_ns) {
      const uint64_t now = NowNs();
      if (start == 0) {
        start = now;
      } else if (now - start > patience.timeout_ns) {
        GiveUp(patience, step, rank);
        return false;
      }
    }
  }
}

// Waits for rank `rank` to have written this operation's epoch.
__device__ __forceinline__ bool WaitFlag(const uint32_t* flag, const Patience& patience, Step step, int rank) {
  return WaitUntil([&] { return LoadAcquireSystem(flag) == patience.epoch; }, patience, step, rank);
}

// False, with the error word set, when the workspace has been released since the operation was prepared (a captured
// graph can outlive it). All ranks see the same.
__device__ __forceinline__ bool HasMemory(const Patience& patience, uint64_t flag_bytes, uint64_t data_bytes,
                                          int rank) {
  if (patience.control->half_bytes >= flag_bytes + data_bytes) return true;
  if (threadIdx.x == 0 && blockIdx.x == 0) GiveUp(patience, Step::kMemory, rank);
  return false;
}

// All threads of the block call it: everything they wrote is visible to whoever awaits the counter.
__device__ __forceinline__ void BlockArrive(uint32_t* counter) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(counter, 1u);
  }
}
// Waits until `blocks` blocks of this GPU have arrived.
__device__ __forceinline__ void BlockAwait(const uint32_t* counter, uint32_t blocks, const Patience& patience,
                                           int rank) {
  if (threadIdx.x == 0) {
    // Without a limit of its own: a block that waits for a peer has one, and tells the others by `abort`.
    const Patience endless{patience.control, 0, patience.epoch, patience.operation};
    WaitUntil([&] { return LoadAcquireGpu(counter) >= blocks; }, endless, Step::kLocalBlocks, rank);
  }
  __syncthreads();
}

// Items of work for warps: taken from a counter, or, when there are no more items than warps, one each without asking.
class Claims {
 public:
  // `blocks`: the first blocks of the grid, which share the work.
  __device__ __forceinline__ Claims(uint32_t* counter, int items, int blocks, int warps = kWarps)
      : counter_(counter), items_(items), blocks_(blocks), fixed_(items <= blocks * warps) {}
  __device__ __forceinline__ int First() {
    if (fixed_) return static_cast<int>(blockIdx.x) + static_cast<int>(threadIdx.x / 32) * blocks_;
    next_ = Take();
    return Next();
  }
  __device__ __forceinline__ int Next() {
    if (fixed_) return items_;
    const int item = __shfl_sync(0xFFFFFFFFu, next_, 0);
    if (item < items_) next_ = Take();  // the answer is needed only in the next round
    return item;
  }

 private:
  __device__ __forceinline__ int Take() {
    return (threadIdx.x & 31) == 0 ? static_cast<int>(atomicAdd(counter_, 1u)) : 0;
  }
  uint32_t* counter_;
  int items_, blocks_, next_ = 0;
  bool fixed_;
};

// The last block to finish resets the counters and completes the operation.
__device__ __forceinline__ void FinishOperation(Control* control, uint32_t epoch) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(&control->ticket, 1u) == gridDim.x - 1) {
      control->ticket = 0;
      control->barrier[0] = control->barrier[1] = 0;
      control->work[0] = control->work[1] = 0;
      control->abort = 0;
      __threadfence();
      control->epoch = epoch;
    }
  }
}

}  // namespace xen_moe
