// How the flags of pushed rows are raised without stopping the warps that push.
//
// A flag may be stored only when the row's stores have reached the peer. That takes a system-scope fence, which lasts
// until the outstanding stores are acknowledged. In a pushing block one warp, the signalling warp, does nothing else.
// The other warps post each pushed row to a ring in shared memory (release at block scope) and continue; the signalling
// warp reads the rings (acquire), fences once for everything posted so far, and stores the flags. Release and acquire
// are cumulative, so its fence covers the rows.
#pragma once

#include "cuda_kernels/core/failure.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

constexpr int kSignalRing = 8;
constexpr int kSignalWarp = kWarps - 1;

struct SignalBox {
  RankMask ranks[kWarps][kSignalRing];  // the ranks to signal
  uint32_t index[kWarps][kSignalRing];  // index of the flag word
  uint32_t posted[kWarps];              // rows that each warp has posted
  uint32_t sent[kWarps];                // posted rows whose flags have been stored
  uint32_t finished;                    // warps that will post no more
};

__device__ __forceinline__ uint32_t LoadAcquireBlock(const uint32_t* p) {
  uint32_t v;
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(p));
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ void StoreReleaseBlock(uint32_t* p, uint32_t v) {
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(p));
  asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}

__device__ __forceinline__ void InitSignalBox(SignalBox& box) {  // a __syncthreads must follow
  if (threadIdx.x < kWarps) box.posted[threadIdx.x] = box.sent[threadIdx.x] = 0;
  if (threadIdx.x == 0) box.finished = 0;
}

// Waits for a free place in the warp's ring. The wait is short, because the signalling warp waits for no other warp.
// Returns false if the group has failed.
static __device__ __noinline__ bool AwaitRoom(const SignalBox& box, const Running& run, uint32_t posted) {
  const uint32_t* sent = &box.sent[threadIdx.x / 32];
  return WaitUntil<4096>([&] { return posted - LoadAcquireBlock(sent) < kSignalRing; }, run, Step::kLocalBlocks,
                         run.rank);
}

// How a warp raises flags. `direct`: the warp fences and stores the flags itself, which is quicker for a single row.
struct Signaller {
  SignalBox& box;
  const Running& run;
  uint64_t row_flags;
  uint32_t epoch;
  bool direct;
  uint32_t posted = 0;  // only lane 0's value is used

  // All lanes call it after they have stored their share of a row.
  __device__ __forceinline__ void Raise(const RankMask& ranks, uint32_t index) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    __syncwarp();
    if (direct) {
      ForEachOwnRank(lane, run.ranks, [&](int rank) {
        if (!Holds(ranks, rank)) return;
        FenceSystem();
        StoreRelaxedSystem(reinterpret_cast<uint32_t*>(run.half[rank] + row_flags) + index, epoch);
      });
      return;
    }
    if (lane == 0 && (posted - LoadAcquireBlock(&box.sent[warp]) < kSignalRing || AwaitRoom(box, run, posted))) {
      box.ranks[warp][posted % kSignalRing] = ranks;
      box.index[warp][posted % kSignalRing] = index;
      StoreReleaseBlock(&box.posted[warp], ++posted);
    }
  }
  __device__ __forceinline__ void Finish() {
    __syncwarp();
    if (!direct && (threadIdx.x & 31) == 0) {
      __threadfence_block();
      atomicAdd(&box.finished, 1u);
    }
  }
  // The signalling warp runs this until all other warps of the block have finished.
  __device__ __forceinline__ void RunSignalWarp() {
    const int lane = threadIdx.x & 31;
    const bool watches = lane < kSignalWarp;
    uint32_t sent = 0;
    for (;;) {
      // Read before `posted`, and broadcast from one lane to all.
      const bool last = __shfl_sync(0xFFFFFFFFu, LoadAcquireBlock(&box.finished), 0) == kSignalWarp;
      const uint32_t now = watches ? LoadAcquireBlock(&box.posted[lane]) : 0;
      if (__any_sync(0xFFFFFFFFu, now != sent)) {
        FenceSystem();
        for (; sent != now; ++sent) {
          const uint32_t index = box.index[lane][sent % kSignalRing];
          for (RankMask ranks = box.ranks[lane][sent % kSignalRing]; Any(ranks); DropFirst(ranks)) {
            StoreRelaxedSystem(reinterpret_cast<uint32_t*>(run.half[FirstRank(ranks)] + row_flags) + index, epoch);
          }
        }
        if (watches) StoreReleaseBlock(&box.sent[lane], sent);
        __syncwarp();
      } else if (last) {
        return;
      } else {
        __nanosleep(64);
      }
    }
  }
};

}  // namespace xen_moe::XEN_MOE_VARIANT
