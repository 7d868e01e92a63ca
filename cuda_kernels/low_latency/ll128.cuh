// Data that carry their own flag: LL128 lines of 128 bytes, 120 bytes of data followed by the operation's epoch.
//
// A warp stores or loads four lines at once (a round), 16 bytes a lane; the last lane of each line has eight bytes of
// data and the epoch. A reader that sees the current epoch in a line has its data: no fence, no separate flag, and a
// single trip over the link. Memory order: this requires that a line of 128 bytes, written by eight lanes of one store
// instruction, becomes visible as a whole, and that a load by eight lanes of one load instruction reads it as a whole.
// The PTX memory model does not promise that; NVLink of Volta and later provides it, and NCCL's LL128 protocol relies
// on it in the same way. Where the words of a line may arrive one by one, the low-latency kernels must not be used. One
// instruction requires that the lanes are together. Lanes that diverged before, for example because the first lane
// entered the slow half of a wait, may execute the load one group after another; then a lane has old data beside a new
// epoch. Therefore every line is moved by the two functions below, which first bring the warp together; all its lanes
// must call them.
//
// A row of bytes lies in rounds of 480 bytes. The 28 lanes that hold no epoch take 16 bytes each, in order; the other
// four lanes take the 32 bytes after them. So both ends move aligned vectors, and no data are shuffled between lanes.
#pragma once

#include "cuda_kernels/core/failure.cuh"
#include "cuda_kernels/low_latency/ll128_plan.h"

namespace xen_moe::XEN_MOE_VARIANT {

// Loads this lane's 16 bytes of a line, bypassing the L1 cache; zeros without `wanted`, which is the same for all lanes
// of a line.
__device__ __forceinline__ uint4 LoadLinePart(const char* line, int part, bool wanted = true) {
  uint4 v = make_uint4(0, 0, 0, 0);
  const uint4* const p = reinterpret_cast<const uint4*>(line) + part;
  __syncwarp();
  if (wanted) {
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
  }
  return v;
}
__device__ __forceinline__ void StoreLinePart(char* line, int part, uint4 v, bool wanted) {
  uint4* const p = reinterpret_cast<uint4*>(line) + part;
  __syncwarp();
  if (wanted) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
  }
}

// This lane's place in a round.
struct Piece {
  int line;    // the line within the round
  bool flags;  // this lane holds the epoch, and only eight bytes of data
  int offset;  // of this lane's data within the round's data
  __device__ __forceinline__ Piece() {
    const int lane = threadIdx.x & 31;
    line = lane >> 3;
    flags = (lane & 7) == 7;
    offset = flags ? kRoundData - 8 * kRoundLines + 8 * line : 16 * (lane - line);
  }
};

// Loads 16 bytes, or eight in a lane with flags.
__device__ __forceinline__ uint4 LoadPiece(const char* from, const Piece& piece) {
  uint4 v = make_uint4(0, 0, 0, 0);
  if (piece.flags) {
    const uint2 half = __ldcs(reinterpret_cast<const uint2*>(from));
    v.x = half.x, v.y = half.y;
  } else {
    v = __ldcs(reinterpret_cast<const uint4*>(from));
  }
  return v;
}
__device__ __forceinline__ void StorePiece(char* to, const Piece& piece, uint4 v) {
  if (piece.flags) {
    *reinterpret_cast<uint2*>(to) = make_uint2(v.x, v.y);
  } else {
    *reinterpret_cast<uint4*>(to) = v;
  }
}

// All lanes of the warp: stores the first `lines` lines of a round. A lane with flags gives its data in x and y.
__device__ __forceinline__ void StoreRound(char* round, const Piece& piece, uint4 v, int lines, uint32_t epoch) {
  if (piece.flags) v.z = v.w = epoch;
  StoreLinePart(round, static_cast<int>(threadIdx.x & 31), v, piece.line < lines);
}
// All lanes call it. The loaded data are valid only where the whole line has arrived: Missing returns the lanes whose
// lines have not.
__device__ __forceinline__ uint4 LoadRound(const char* round) {
  return LoadLinePart(round, static_cast<int>(threadIdx.x & 31));
}
__device__ __forceinline__ bool Missing(const Piece& piece, uint4 v, int lines, uint32_t epoch) {
  return piece.flags && piece.line < lines && v.w != epoch;
}

// Many polls before the slow half, which takes a microsecond: a line that arrives meanwhile would wait that long.
constexpr int kLinePolls = 256;
// For lines that a warp keeps as they arrive: polls until `look()`, a mask of what is missing, is 0. It does not wait
// long, because the kept lines would have to lie in memory during the slow half of a wait. Returns false when the
// caller must wait for one line by AwaitLines and then load all lines again.
template <class Look>
__device__ __forceinline__ bool KeepLooking(Look look) {
#pragma unroll 1
  for (int poll = 0; poll < kLinePolls; ++poll) {
    if (look() == 0) return true;
  }
  return false;
}

// Waits until `missing()`, a mask of lanes that is the same in all lanes, is 0. All lanes call it. `rank_of(mask)`: the
// awaited rank. `stalled()` runs once if the wait is long; it returns true to end the wait. Returns false if the group
// has failed or the wait was ended.
template <class MissingLanes, class RankOf, class Stalled>
__device__ __forceinline__ bool AwaitLines(MissingLanes missing, RankOf rank_of, Stalled stalled, const Running& run,
                                           Step step) {
  uint32_t mask = missing();
  if (mask == 0) return true;
  Waiting waiting;
  for (bool first = true;; first = false) {
#pragma unroll 1
    for (int poll = 0; poll < kLinePolls; ++poll) {
      mask = missing();
      if (mask == 0) {
        if ((threadIdx.x & 31) == 0 && waiting.shown) {
          StoreRelaxedSystem(&run.mailbox->progress, PackProgress(run.epoch));
        }
        return true;
      }
    }
    if (first && stalled()) return false;
    bool go_on = true;
    if ((threadIdx.x & 31) == 0) go_on = KeepWaiting(run, step, rank_of(mask), &waiting);
    if (!__shfl_sync(0xFFFFFFFFu, go_on, 0)) return false;
  }
}

}  // namespace xen_moe::XEN_MOE_VARIANT
