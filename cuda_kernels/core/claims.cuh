// Which block does which work.
//
// Work that a rank waits for while the kernel runs (pushed rows, metadata, counts) must be done by whichever blocks are
// resident. Large work is claimed item by item from counters. Small work is divided into one share per block, because a
// request to a counter would take as long as the work itself: each block marks its share as started and does it; then
// the pushing blocks, block 0 among them, adopt the shares that no block has started. A late block may repeat an
// adopted share: it stores the same bytes and flags again, within the same operation. Where ranks may be inactive a
// share must not be repeated: other ranks may be two operations ahead of a rank that they treat as inactive
// (workspace.h). Work that no rank waits for (placing rows, summing) may have fixed owners: finished blocks end and
// make room for them. Where rows lie in rings, placing and summing are awaited too: rounds.cuh.
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
  kLaterRounds = 4,  // within one node: rounds.cuh
  kRailReceive = 5,
  kRailLead = 6
};

// Items of work for warps. Warps take them from a counter. If there are no more items than warps and no rank waits for
// the items, each warp gets one item without using the counter.
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
    if (item < items_) next_ = Take();  // the result is needed only in the next round
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

// Claims the next `items` items for the whole block; returns the first of them. All threads call it.
__device__ __forceinline__ int BlockClaim(uint32_t* counter, int items) {
  __shared__ int claimed;
  __syncthreads();
  if (threadIdx.x == 0) claimed = static_cast<int>(atomicAdd(counter, static_cast<uint32_t>(items)));
  __syncthreads();
  return claimed;
}
// All threads of the block call it: everything they wrote for `items` items becomes visible to a block that waits for
// the counter.
__device__ __forceinline__ void BlockComplete(uint32_t* counter, int items) {
  __syncthreads();
  if (threadIdx.x == 0 && items > 0) {
    __threadfence();
    atomicAdd(counter, static_cast<uint32_t>(items));
  }
}

// Fixed shares of this operation. StartShare marks that this block does share `share`; with `once` it returns false if
// another block has started it. AdoptShare returns a share from `*next` on that no block has started, or -1 when none
// is left. All threads of the block call both.
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
