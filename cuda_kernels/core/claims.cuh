// Who does which work.
//
// Work that somebody waits for while the kernel runs (pushed rows, metadata, counts) must get done by whatever blocks
// are resident. Large work is claimed item by item from counters. Small work is cut into one share per block, because
// asking a counter would take as long as the work: each block marks its share as started and does it, and then the
// pushing blocks, block 0 among them, adopt what nobody has started. A late block may repeat an adopted share: it
// stores the same bytes and flags once more, inside the same operation. Not so where ranks may be left out: the others
// may be two operations ahead of a rank that they leave out (workspace.h). Work that nobody waits for (placing rows,
// summing) may have fixed owners: the others end and make room for them. Where rows go through rings, placing and
// summing is awaited too: rounds.cuh.
#pragma once

#include "cuda_kernels/core/failure.cuh"

namespace xen_moe {

// Counters of Control::claimed.
enum class Work : int {
  kPush = 0,
  kPlace = 1,
  kSegments = 2,
  kColumns = 3,
  kRailSend = 4,
  kLaterRounds = 4,  // in one node: rounds.cuh
  kRailReceive = 5,
  kRailLead = 6
};

// Items of work for warps: taken from a counter, or, when there are no more items than warps and nobody waits for them,
// one each without asking.
class Claims {
 public:
  __device__ __forceinline__ Claims(uint32_t* counter, int items, bool fixed)
      : counter_(counter), items_(items), fixed_(fixed) {}
  __device__ __forceinline__ int First() {
    if (fixed_) return static_cast<int>(blockIdx.x) + static_cast<int>(threadIdx.x / 32) * static_cast<int>(gridDim.x);
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
  int items_, next_ = 0;
  bool fixed_;
};

// The next `items` items for the whole block: the first of them. All threads call it.
__device__ __forceinline__ int BlockClaim(uint32_t* counter, int items) {
  __shared__ int claimed;
  __syncthreads();
  if (threadIdx.x == 0) claimed = static_cast<int>(atomicAdd(counter, static_cast<uint32_t>(items)));
  __syncthreads();
  return claimed;
}
// All threads of the block call it: everything they wrote for `items` items is visible to whoever awaits the counter.
__device__ __forceinline__ void BlockComplete(uint32_t* counter, int items) {
  __syncthreads();
  if (threadIdx.x == 0 && items > 0) {
    __threadfence();
    atomicAdd(counter, static_cast<uint32_t>(items));
  }
}

// Fixed shares of this operation. StartShare: this block does share `share`; with `once`, false if another has started
// it. AdoptShare: a share from `*next` on that nobody has started, or -1; until it says -1. All threads of the block
// call both.
__device__ __forceinline__ bool StartShare(Control* control, int share, uint32_t epoch, bool once = false) {
  if (once) return __syncthreads_or(threadIdx.x == 0 && atomicExch(&control->started[share], epoch) != epoch);
  if (threadIdx.x == 0) StoreRelaxedGpu(&control->started[share], epoch);
  return true;
}
__device__ __forceinline__ int AdoptShare(Control* control, int shares, uint32_t epoch, int* next) {
  if (*next == 0) {
    bool idle = false;
    for (int i = threadIdx.x; i < shares; i += blockDim.x) idle |= LoadRelaxedGpu(&control->started[i]) != epoch;
    if (!__syncthreads_or(idle)) return -1;
  }
  while (*next < shares) {
    const int share = (*next)++;
    const bool adopted = threadIdx.x == 0 && atomicExch(&control->started[share], epoch) != epoch;
    if (__syncthreads_or(adopted)) return share;
  }
  return -1;
}

}  // namespace xen_moe
