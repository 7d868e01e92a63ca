// The rows of a low-latency dispatch: from x into lines on the peers, and from lines (own rows: from x) to their
// places.
//
// Each piece of code exists once: a block runs it once, and waits longer for its instructions than for its data.
#pragma once

#include "cuda_kernels/low_latency/routing.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

// A row by itself: values, and behind them its scales as if they were contiguous.
struct WireRow {
  const char *values, *scales;
  __device__ __forceinline__ WireRow(const DispatchParams& p, const void* rows, const float* row_scales, int64_t row) {
    const int value_bytes = static_cast<int>(p.staging.scale_offset);
    values = static_cast<const char*>(rows) + row * value_bytes;
    const int scale_bytes = static_cast<int>(p.staging.row_bytes) - value_bytes;
    scales = reinterpret_cast<const char*>(row_scales) + row * scale_bytes - value_bytes;
  }
  __device__ __forceinline__ const char* At(int at, int value_bytes) const {
    return (at < value_bytes ? values : scales) + at;
  }
};

// Warps take (token, round) items of a share, kAhead at a time. `begin()` runs when the epoch is needed.
constexpr int kAhead = 4;
template <class Begin>
__device__ __forceinline__ void PushShare(const Plan& plan, const Piece& piece, int share, Begin begin) {
  const DispatchParams& p = plan.p;
  const Routing& r = p.routing;
  const int lane = threadIdx.x & 31, rounds = p.staging.row_rounds;
  const int value_bytes = static_cast<int>(p.staging.scale_offset), row_bytes = static_cast<int>(p.staging.row_bytes);
  const int items = r.ranks > 1 ? r.tokens * rounds : 0;
  const int end = items * (share + 1) / plan.schedule.push;
  for (int item = items * share / plan.schedule.push + static_cast<int>(threadIdx.x / 32); item < end;
       item += kAhead * kWarps) {
    uint4 v[kAhead];
    int expert[kAhead], token[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int now = item + i * kWarps;
      if (now >= end) break;
      token[i] = static_cast<int>(plan.schedule.by_row_rounds(now));
      const int at = (now - token[i] * rounds) * kRoundData + piece.offset;
      v[i] = make_uint4(0, 0, 0, 0);
      if (at < row_bytes) v[i] = LoadPiece(WireRow(p, p.x, p.scales, token[i]).At(at, value_bytes), piece);
      expert[i] = lane < r.top_k ? p.topk_idx[token[i] * r.top_k + lane] : -1;
    }
    if (!begin()) return;
    const int first = r.rank + 1 < r.ranks ? r.rank + 1 : 0;
    const RankMask others = plan.run.active & ~OneRank(r.rank);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int now = item + i * kWarps;
      if (now >= end) break;
      const bool real = expert[i] >= 0 && expert[i] < r.experts;
      const RankMask ranks =
          Union(real ? OneRank(plan.schedule.by_local_experts(expert[i])) : NoRanks(), r.ranks) & others;
      const int round = now - token[i] * rounds, lines = plan.Lines(round);
      const uint64_t to = plan.RowAt(r.rank, token[i], round);
      TurnedRanks::Of(ranks, first, r.ranks).ForEachOnce([&](int rank) {
        StoreRound(plan.run.half[rank] + to, piece, v[i], lines, plan.run.epoch);
      });
    }
  }
}

// Every warp places parts of (source, token) pairs, `kRounds` rounds at once. `kKeeps`: the warp keeps lines that have
// arrived while it waits for the others, which pays if they are few. `resolve(source, token, write, &position)`: as
// ResolveRows. `far`: has the rows of other nodes (node/low_latency_dispatch.cuh). Returns false if the group has
// failed.
template <int kRounds = kPlaceRounds, bool kKeeps = false, class Resolve, class Far = SingleNode>
__device__ __forceinline__ bool PlaceRows(const Plan& plan, const Piece& piece, Resolve resolve,
                                          const Far& far = Far()) {
  const DispatchParams& p = plan.p;
  const Routing& r = p.routing;
  const int value_bytes = static_cast<int>(p.staging.scale_offset), row_bytes = static_cast<int>(p.staging.row_bytes);
  const uint32_t parts = plan.schedule.parts, items = static_cast<uint32_t>(r.ranks * r.tokens) * parts;
  const char* const half = plan.run.half[r.rank];
#pragma unroll 1
  for (uint32_t item = plan.receiver + threadIdx.x / 32 * plan.schedule.receivers; item < items;
       item += plan.schedule.receivers * kWarps) {
    // Own tokens first, then token by token, the sources interleaved: the order in which rows arrive.
    const uint32_t pair = plan.schedule.by_parts(item);
    int source = r.rank, token = static_cast<int>(pair);
    if (token >= r.tokens) {
      const uint32_t other = pair - r.tokens, others = r.ranks - 1;
      token = static_cast<int>(plan.schedule.by_others(other));
      source = r.rank + 1 + static_cast<int>(other - token * others);
      if (source >= r.ranks) source -= r.ranks;
    }
    const bool own = source == r.rank;
    const int first = static_cast<int>(item - pair * parts) * plan.schedule.rounds;
    const int end = min(p.staging.row_rounds, first + plan.schedule.rounds);
    if constexpr (Far::kAny) {
      if (far.HasFrom(source)) {
        if (!far.Place(source, token, first, end)) return false;
        continue;
      }
    }
    const char* const row = half + plan.RowAt(source, token, 0);
    const WireRow mine(p, p.x, p.scales, token);
    bool resolved = false;
    int position = -1;
    uint32_t placed = 0;
#pragma unroll 1
    for (int base = first; base < end;) {
      uint4 v[kRounds];
      uint32_t missing = 0;  // rounds
      if (own) {
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
          const int at = (base + i) * kRoundData + piece.offset;
          if (base + i < end && at < row_bytes) v[i] = LoadPiece(mine.At(at, value_bytes), piece);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
          if (base + i < end) v[i] = LoadRound(row + (base + i) * kRoundBytes);
        }
      }
      if (!resolved) {  // the token's own line arrives during a first look at its row
        if (!resolve(source, token, first == 0, &position)) return false;
        placed = __ballot_sync(0xFFFFFFFFu, position >= 0);
        resolved = true;
        // dropped rows are sent, and must be awaited: workspace.h
        if (!__any_sync(0xFFFFFFFFu, position != -1)) break;
      }
      auto check = [&](int i) {
        const int lines = base + i < end ? plan.Lines(base + i) : 0;
        return __any_sync(0xFFFFFFFFu, Missing(piece, v[i], lines, plan.run.epoch)) ? 1u << i : 0;
      };
      if (!own) {
#pragma unroll
        for (int i = 0; i < kRounds; ++i) missing |= check(i);
      }
      auto look = [&] {
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
          if (missing >> i & 1) v[i] = LoadRound(row + (base + i) * kRoundBytes);
        }
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
          if (missing >> i & 1) missing ^= 1u << i ^ check(i);
        }
        return missing;
      };
      if (missing && !(kKeeps && KeepLooking(look))) {
        const int last = base + 31 - __clz(missing);  // it usually arrives last
        const int lines = plan.Lines(last);
        const bool good = AwaitLines(
            [&] {
              const uint4 seen = LoadRound(row + last * kRoundBytes);
              return __ballot_sync(0xFFFFFFFFu, Missing(piece, seen, lines, plan.run.epoch));
            },
            [&](uint32_t) { return source; }, [] { return false; }, plan.run, Step::kRows);
        if (!good) return false;
        continue;
      }
#pragma unroll 1
      for (uint32_t m = placed; m; m &= m - 1) {
        const WireRow to(p, p.rows, p.row_scales, __shfl_sync(0xFFFFFFFFu, position, __ffs(m) - 1));
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
          const int at = (base + i) * kRoundData + piece.offset;
          if (base + i < end && at < row_bytes) StorePiece(const_cast<char*>(to.At(at, value_bytes)), piece, v[i]);
        }
      }
      base += kRounds;
    }
  }
  return true;
}

}  // namespace xen_moe::XEN_MOE_VARIANT
