// Combine by home: experts may have rows on other ranks than their homes, and the result has the bits of a combine in
// which every row lies at its expert's home.
//
// An ordinary combine (combine.cuh) rounds one sum for each rank that holds rows of a token. Where an expert has
// replicas on several ranks, or lies on another rank than its home, such a sum would consist of other rows, and its
// rounding would differ. What moves: here every row travels by itself and without its weight, to staging row
// [token][slot] of the token's rank. There the rows of each home are added in slot order in float32 (times their
// weights) and rounded, and these sums are added in ascending order of the homes. Rows that the token's rank holds
// itself are read where they are. Who does it, who waits for whom, and memory order: as in combine.cuh. A rank raises
// one flag for each part of a token, after that part of all rows that it holds of the token.
#pragma once

#include "cuda_kernels/combine/combine.cuh"
#include "cuda_kernels/core/row_codec.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

struct HomeShared {
  CombineShared combine;         // `rows`: an entry of 0 or more is a row of y; a negative one is ~slot, a staging row
  bool ends[kWarps][kMaxSlots];  // the row is the last one of its home
};

// Returns where the staging row of a slot of a token begins in the data of the token's rank.
__device__ __forceinline__ uint64_t HomeRow(const CombineParams& p, int token, int slot) {
  return p.staging.rows + (static_cast<uint64_t>(token) * p.routing.top_k + slot) * p.staging.row_bytes;
}

// One warp: sends one part of all rows that this rank holds of a token of another rank. `item` numbers the pairs of a
// source and a token, times the parts. A row that was dropped is sent as zeros.
template <class Y>
__device__ __forceinline__ void PushRows(const CombineParams& p, CombineShared& shared, Signaller& signaller,
                                         int item) {
  const Routing& r = p.routing;
  const int lane = threadIdx.x & 31, part = item % p.schedule.parts;
  int source, token;
  PairOfOthers(r, item / p.schedule.parts, &source, &token);
  if (!Holds(shared.run.active, source)) return;
  constexpr int kPerVector = sizeof(int4) / sizeof(Y);
  const int first = min(r.hidden, part * p.schedule.part_elements) / kPerVector;
  const int vectors = min(r.hidden, (part + 1) * p.schedule.part_elements) / kPerVector - first;
  const int* positions = p.positions + (static_cast<int64_t>(source) * r.tokens + token) * r.slots;
  bool belongs = false;
  for (int base = 0; base < r.slots; base += 32) {
    const int mine = base + lane < r.slots ? positions[base + lane] : -1;
    for (uint32_t here = __ballot_sync(0xFFFFFFFFu, mine != -1); here != 0; here &= here - 1) {
      belongs = true;
      const int bit = __ffs(static_cast<int>(here)) - 1;
      const int position = __shfl_sync(0xFFFFFFFFu, mine, bit);
      int4* to = reinterpret_cast<int4*>(shared.run.data[source] + HomeRow(p, token, base + bit)) + first;
      if (position >= 0 && position < r.capacity) {
        const Y* row = static_cast<const Y*>(p.y) + static_cast<int64_t>(position) * r.hidden;
        CopyCodec<int4>::Copy(reinterpret_cast<const int4*>(row) + first, vectors, [&](auto store) { store(to); });
      } else {
        for (int v = lane; v < vectors; v += 32) to[v] = make_int4(0, 0, 0, 0);
      }
    }
  }
  if (belongs) signaller.Raise(OneRank(source), PartialFlagIndex(p, r.rank, token, part));
}

// One warp: lists the rows of a token of this rank in the order in which they are added, by ascending home and then by
// slot. Returns their number. Rows that this rank has dropped are left out.
__device__ __forceinline__ int ListRows(const CombineParams& p, HomeShared& shared, int token) {
  const Routing& r = p.routing;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const int64_t first = static_cast<int64_t>(token) * r.top_k;
  const int* positions = p.positions + (static_cast<int64_t>(r.rank) * r.tokens + token) * r.slots;
  constexpr int kWords = kMaxSlots / 32;
  int home[kWords], row[kWords];
  int count = 0;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const int slot = w * 32 + lane;
    home[w] = -1, row[w] = ~slot;
    if (slot < r.top_k) {
      const int expert = p.topk_idx[first + slot];
      const bool named =
          expert >= 0 && expert < r.experts && Holds(shared.combine.run.active, expert / r.local_experts);
      if (named) home[w] = p.home[first + slot];
      if (named && expert / r.local_experts == r.rank) {
        row[w] = positions[slot];
        if (row[w] < 0 || row[w] >= r.capacity) home[w] = -1;  // dropped
      }
    }
    count += __popc(__ballot_sync(0xFFFFFFFFu, home[w] >= 0));
  }
  __syncwarp();
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    if (w * 32 >= r.top_k) break;
    const int slot = w * 32 + lane;
    int at = 0;
    bool last = true;
    for (int other = 0; other < r.top_k; ++other) {
      const int theirs = __shfl_sync(0xFFFFFFFFu, other < 32 ? home[0] : home[kWords - 1], other & 31);
      at += theirs >= 0 && (theirs < home[w] || (theirs == home[w] && other < slot));
      last &= !(theirs == home[w] && other > slot);
    }
    if (home[w] >= 0) {
      shared.combine.rows[warp][at] = row[w];
      shared.combine.weights[warp][at] = p.topk_weights ? p.topk_weights[first + slot] : 1.0f;
      shared.ends[warp][at] = last;
    }
  }
  __syncwarp();
  return count;
}

// Adds the rows of this rank's tokens: each warp takes parts of tokens until none is left or the group has failed.
template <class Y, int kSteps>
__device__ __forceinline__ void SumByHome(const CombineParams& p, HomeShared& shared, char* ring, uint32_t epoch) {
  static_assert(kMaxSlots == 64, "ListRows keeps two words");
  const Routing& r = p.routing;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, items = r.tokens * p.schedule.parts;
  const Running& run = shared.combine.run;
  Claims claims(&run.control->claimed[static_cast<int>(Work::kPlace)], items,
                items <= static_cast<int>(gridDim.x) * kWarps);
  for (int item = claims.First(); item < items; item = claims.Next()) {
    const int token = item / p.schedule.parts, part = item % p.schedule.parts;
    const int count = ListRows(p, shared, token);
    if (!AwaitPartials(p, shared.combine, RanksOf(p.topk_idx, token, r, run.active), token, part, epoch)) return;
    const int begin = min(r.hidden, part * p.schedule.part_elements);
    const int end = min(r.hidden, begin + p.schedule.part_elements);
    Y* out = static_cast<Y*>(p.out) + static_cast<int64_t>(token) * r.hidden;
    const char* const staged = run.data[r.rank];
    Octet total[kSteps], partial[kSteps];
    auto row_of = [&](int i) {
      const int row = shared.combine.rows[warp][i];
      if (row >= 0) return static_cast<const Y*>(p.y) + static_cast<int64_t>(row) * r.hidden;
      return reinterpret_cast<const Y*>(staged + HomeRow(p, token, ~row));
    };
    auto clear = [&](int) {
      Clear(total);
      Clear(partial);
    };
    auto add = [&](int i, const RawOctet<Y>(&raw)[kSteps]) { AddRows(partial, raw, shared.combine.weights[warp][i]); };
    auto after_row = [&](int i) {
      if (!shared.ends[warp][i]) return;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) Add(total[s], Widen(Narrow<Y>(partial[s])));
      Clear(partial);
    };
    auto store = [&](int base) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        StoreOctet(out, base + s * kWarpElements + lane * kOctet, end, true, Narrow<Y>(total[s]));
      }
    };
    RowStream<Y, kSteps>::Run(ring, count, begin, end, row_of, clear, add, after_row, store);
  }
}

template <class Y>
__global__ void __launch_bounds__(kThreads, 1) HomeCombineKernel(const __grid_constant__ CombineParams p) {
  constexpr int kSteps = StepsOf<Y>(false);
  __shared__ HomeShared shared;
  extern __shared__ __align__(128) char rings[];
  char* ring = rings + threadIdx.x / 32 * RowStream<Y, kSteps>::kRingBytes;
  InitSignalBox(shared.combine.signals);
  BeginOperation(shared.combine.run, p.call, Operation::kCombine, p.routing.ranks, p.routing.rank);
  if (!shared.combine.run.refused) {
    const uint32_t epoch = shared.combine.run.epoch;
    PushItems(p, shared.combine, DirectPush::Pairs(p.routing), epoch,
              [&](Signaller& signaller, int item) { PushRows<Y>(p, shared.combine, signaller, item); });
    SumByHome<Y, kSteps>(p, shared, ring, epoch);
  }
  FinishOperation(shared.combine.run, [&](uint32_t index, uint32_t count) {
    FillBytes(p.out, static_cast<uint64_t>(p.routing.tokens) * p.routing.hidden * sizeof(Y), kPoison, index, count);
  });
}

}  // namespace xen_moe::XEN_MOE_VARIANT
