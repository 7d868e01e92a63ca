// Combine of small batches: no fence, and no flag beside the data.
//
// What moves: as in combine/combine.cuh, a partial row for each (source, token) that has rows here, in LL128 lines
// (ll128.cuh), to staging row [this rank][token] of its source. Who does it: the first `push_blocks` blocks sum and
// push shares of the rows, and end; the other blocks sum what has arrived, each warp a part of a token's row. Rows are
// located and summed before the epoch is known. Who waits for whom: pushing waits for no rank. A summing warp waits for
// lines; if that takes long, it first pushes the shares that no block of this GPU has started (claims.cuh), so every
// wait ends with any number of resident blocks. Every rank in a token's topk_idx sends its partial row, even if all its
// rows were dropped; inactive ranks send none and get none. Positions are checked before they become addresses.
// Multiply and add are rounded separately.
#pragma once

#include "cuda_kernels/core/launch.cuh"
#include "cuda_kernels/core/octet.cuh"
#include "cuda_kernels/core/routing.cuh"
#include "cuda_kernels/low_latency/low_latency.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

// A lane's 16 bytes of a row as floats; in a lane with flags only the first half is data.
template <class Y>
struct Values {
  static constexpr int kCount = 16 / sizeof(Y);
  float v[kCount];

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = 0.0f;
  }
  __device__ __forceinline__ void Add(uint4 raw) {
    const Y* y = reinterpret_cast<const Y*>(&raw);
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = __fadd_rn(v[i], ToFloat(y[i]));
  }
  // With weight 1 the same as Add, bit for bit.
  __device__ __forceinline__ void AddWeighted(uint4 raw, float weight) {
    const Y* y = reinterpret_cast<const Y*>(&raw);
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = __fadd_rn(v[i], __fmul_rn(weight, ToFloat(y[i])));
  }
  __device__ __forceinline__ uint4 Round() const {
    uint4 raw;
    Y* y = reinterpret_cast<Y*>(&raw);
#pragma unroll
    for (int i = 0; i < kCount; ++i) y[i] = FromFloat<Y>(v[i]);
    return raw;
  }
};

__device__ __forceinline__ uint4 LoadRowPiece(const char* row, const Piece& piece, int at, int bytes) {
  return at < bytes ? LoadPiece(row + at, piece) : make_uint4(0, 0, 0, 0);
}

// The rows of y that this rank holds of one (source, token): lane k has slot k's.
struct TokenRows {
  int position;
  float weight;
  uint32_t placed;  // lanes that have a row
  bool belongs;     // an entry of the token's topk_idx is on this rank

  // Loads a lane's share early, so that no lane waits for it later.
  __device__ __forceinline__ static int Load(const CombineParams& p, int source, int token) {
    const Routing& r = p.routing;
    const int lane = threadIdx.x & 31;
    const int64_t at = (static_cast<int64_t>(source) * r.tokens + token) * r.slots;
    return lane < r.slots ? p.positions[at + lane] : -1;
  }
  __device__ __forceinline__ TokenRows(const CombineParams& p, int loaded) : position(loaded) {
    const Routing& r = p.routing;
    belongs = __any_sync(0xFFFFFFFFu, position != -1);
    const bool real = position >= 0 && position < r.capacity;
    placed = __ballot_sync(0xFFFFFFFFu, real);
    weight = real && p.weights ? p.weights[position] : 1.0f;
  }
};

// sums[i] = the weighted sum of the rows in slot order, round base + i, in float32. `kRows`: rows whose loads are in
// flight together.
template <int kRows, class Y, int kRounds>
__device__ __forceinline__ void SumRows(const CombineParams& p, const TokenRows& rows, const Piece& piece, int base,
                                        int end, Values<Y> (&sums)[kRounds]) {
  const int row_bytes = static_cast<int>(p.staging.row_bytes);
#pragma unroll
  for (int i = 0; i < kRounds; ++i) sums[i].Clear();
  for (uint32_t m = rows.placed; m;) {
    uint4 raw[kRows][kRounds];
    int slot[kRows];  // -1: none
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      slot[j] = __ffs(m) - 1;
      m &= m - 1;
      if (slot[j] < 0) continue;
      const int64_t position = __shfl_sync(0xFFFFFFFFu, rows.position, slot[j]);
      const char* row = static_cast<const char*>(p.y) + position * row_bytes;
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        if (base + i < end) raw[j][i] = LoadRowPiece(row, piece, (base + i) * kRoundData + piece.offset, row_bytes);
      }
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if (slot[j] < 0) continue;
      // not earlier: the weight arrives with the rows
      const float weight = __shfl_sync(0xFFFFFFFFu, rows.weight, slot[j]);
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        if (base + i >= end) continue;
        sums[i].AddWeighted(raw[j][i], weight);
      }
    }
  }
}

template <class Y, int kSumRounds, int kRows>
struct LowLatencyCombine {
  const CombineParams& p;
  const LowLatencySchedule& schedule;
  const Running& run;
  const Piece piece;

  __device__ __forceinline__ LowLatencyCombine(const CombineParams& params, const LowLatencySchedule& low_latency,
                                               const Running& running)
      : p(params), schedule(low_latency), run(running) {}

  __device__ __forceinline__ int Lines(int round) const {
    return round == p.staging.row_rounds - 1 ? schedule.last_lines : kRoundLines;
  }
  // A round of a partial row, in the lines of rank `on`.
  __device__ __forceinline__ char* Round(int on, int source, int token, int round) const {
    const uint32_t row = source * p.routing.tokens + token;
    return run.half[on] + run.line_border + static_cast<uint64_t>(row * p.staging.row_rounds + round) * kRoundBytes;
  }

  // Pushes the rows of share `share`, by warp `warp` of `warps`. `begin()` runs when a sum is complete and the epoch is
  // needed; it returns false if nothing is to be sent.
  template <class Begin>
  __device__ __forceinline__ void PushShare(int share, int warp, int warps, Begin begin) const {
    const Routing& r = p.routing;
    const uint32_t parts = schedule.push_parts, others = r.ranks - 1, items = others * r.tokens * parts;
    auto find = [&](uint32_t item, uint32_t* pair, int* source, uint32_t* token) {
      *pair = schedule.by_push_parts(item), *token = schedule.by_others(*pair);
      *source = r.rank + 1 + static_cast<int>(*pair - *token * others);
      if (*source >= r.ranks) *source -= r.ranks;
    };
    auto load = [&](uint32_t item) {
      uint32_t pair, token;
      int source;
      find(item, &pair, &source, &token);
      return TokenRows::Load(p, source, token);
    };
    uint32_t item = share + warp * schedule.push;
    int loaded = item < items ? load(item) : -1;
#pragma unroll 1
    for (uint32_t next; item < items; item = next) {
      uint32_t pair, token;
      int source;
      find(item, &pair, &source, &token);
      const TokenRows rows(p, loaded);
      next = item + warps * schedule.push;
      if (next < items) loaded = load(next);
      const int base = static_cast<int>(item - pair * parts) * schedule.push_rounds;
      const int end = min(p.staging.row_rounds, base + schedule.push_rounds);
      Values<Y> sums[kPushRounds];
      SumRows<kRows>(p, rows, piece, base, end, sums);
      if (!begin()) return;
      if (!rows.belongs || !Holds(run.active, source)) continue;
#pragma unroll
      for (int i = 0; i < kPushRounds; ++i) {
        if (base + i >= end) break;
        StoreRound(Round(source, r.rank, token, base + i), piece, sums[i].Round(), Lines(base + i), run.epoch);
      }
    }
  }
  // One warp: does the shares that no block of this GPU has started. It is not a method of the caller's object, which
  // would then have to lie in memory.
  static __device__ __noinline__ void AdoptShares(const CombineParams& p, const LowLatencySchedule& schedule,
                                                  const Running& run) {
    const LowLatencyCombine work(p, schedule, run);
    const int lane = threadIdx.x & 31;
    for (int base = 0; base < schedule.push; base += 32) {
      const bool idle = base + lane < schedule.push && LoadRelaxedGpu(&run.control->started[base + lane]) != run.epoch;
      for (uint32_t m = __ballot_sync(0xFFFFFFFFu, idle); m; m &= m - 1) {
        const int share = base + __ffs(m) - 1;
        bool adopted = false;
        if (lane == 0) adopted = atomicExch(&run.control->started[share], run.epoch) != run.epoch;
        if (__shfl_sync(0xFFFFFFFFu, adopted, 0)) work.PushShare(share, 0, 1, [] { return true; });
      }
    }
  }

  // total = the partial rows of `ranks` in ascending order, this rank's from `mine`. Returns false if a line has not
  // arrived for long; then `awaited` and `round` say which line to wait for.
  __device__ __forceinline__ bool AddRanks(const RankMask& ranks, int token, int base, int end,
                                           const uint4 (&mine)[kSumRounds], Values<Y> (&total)[kSumRounds],
                                           int* awaited, int* round) const {
    const int here = p.routing.rank;
    constexpr int kRanks = 3;  // ranks whose lines are loaded together
#pragma unroll
    for (int i = 0; i < kSumRounds; ++i) total[i].Clear();
    RankMask left = ranks & ~OneRank(here);
    bool own = Holds(ranks, here);
    auto add_own = [&] {
#pragma unroll
      for (int i = 0; i < kSumRounds; ++i) total[i].Add(mine[i]);
      own = false;
    };
#pragma unroll 1
    while (Any(left)) {
      uint4 v[kRanks][kSumRounds];
      int rank[kRanks];
      uint32_t missing = 0;  // bit j * kSumRounds + i: round base + i of rank[j]; each is loaded until it has arrived
#pragma unroll
      for (int j = 0; j < kRanks; ++j) {
        rank[j] = FirstRank(left);  // -1: none
        DropFirst(left);
#pragma unroll
        for (int i = 0; i < kSumRounds; ++i) {
          if (rank[j] >= 0 && base + i < end) missing |= 1u << (j * kSumRounds + i);
        }
      }
      auto look = [&] {
#pragma unroll
        for (int n = 0; n < kRanks * kSumRounds; ++n) {
          const int j = n / kSumRounds, i = n % kSumRounds;
          if (missing >> n & 1) v[j][i] = LoadRound(Round(here, rank[j], token, base + i));
        }
#pragma unroll
        for (int n = 0; n < kRanks * kSumRounds; ++n) {
          const int j = n / kSumRounds, i = n % kSumRounds;
          if (!(missing >> n & 1)) continue;
          if (!__any_sync(0xFFFFFFFFu, Missing(piece, v[j][i], Lines(base + i), run.epoch))) {
            missing &= ~(1u << n);
          } else {
            *awaited = rank[j], *round = base + i;  // the last one, which usually arrives last
          }
        }
        return missing;
      };
      if (!KeepLooking(look)) return false;
#pragma unroll
      for (int j = 0; j < kRanks; ++j) {
        if (rank[j] < 0) continue;
        if (own && rank[j] > here) add_own();
#pragma unroll
        for (int i = 0; i < kSumRounds; ++i) {
          if (base + i < end) total[i].Add(v[j][i]);
        }
      }
    }
    if (own) add_own();
    return true;
  }

  // Sums a part of a token: rounds base to end - 1, kSumRounds at most. `begin()` runs when the epoch is needed; it
  // returns false if nothing is to be done. Returns false if the group has failed, or, if `*stalled` was false, when it
  // is time to look for shares that no block has started (then it is set to true).
  template <class Begin>
  __device__ __forceinline__ bool SumPart(int token, int base, int end, bool* stalled, Begin begin) const {
    const Routing& r = p.routing;
    const int row_bytes = static_cast<int>(p.staging.row_bytes);
    const int lane = threadIdx.x & 31;
    const int expert = lane < r.top_k ? p.topk_idx[token * r.top_k + lane] : -1;
    const TokenRows own(p, TokenRows::Load(p, r.rank, token));
    const bool real = expert >= 0 && expert < r.experts;
    const RankMask named = Union(real ? OneRank(schedule.by_local_experts(expert)) : NoRanks(), r.ranks);
    uint4 mine[kSumRounds];  // rounded already, so that the warp holds little while it waits
    {
      Values<Y> sums[kSumRounds];
      SumRows<kRows>(p, own, piece, base, end, sums);
#pragma unroll
      for (int i = 0; i < kSumRounds; ++i) mine[i] = sums[i].Round();
    }
    if (!begin()) return false;
    Values<Y> total[kSumRounds];
    for (int awaited, round; !AddRanks(named & run.active, token, base, end, mine, total, &awaited, &round);) {
      const char* const at = Round(r.rank, awaited, token, round);
      const int lines = Lines(round);
      auto missing = [&] { return __ballot_sync(0xFFFFFFFFu, Missing(piece, LoadRound(at), lines, run.epoch)); };
      auto leave = [&] { return *stalled ? false : *stalled = true; };
      if (!AwaitLines(missing, [&](uint32_t) { return awaited; }, leave, run, Step::kRows)) return false;
    }
    char* out = static_cast<char*>(p.out) + static_cast<int64_t>(token) * row_bytes;
#pragma unroll
    for (int i = 0; i < kSumRounds; ++i) {
      const int at = (base + i) * kRoundData + piece.offset;
      if (base + i >= end || at >= row_bytes) continue;
      StorePiece(out + at, piece, total[i].Round());
    }
    return true;
  }

  // All threads of the block. Returns false if the group has failed, or `begin()` was false.
  template <class Begin>
  __device__ __forceinline__ bool Sum(Begin begin) const {
    const uint32_t parts = schedule.parts, items = p.routing.tokens * parts;
    const int summer = static_cast<int>(blockIdx.x) - (static_cast<int>(gridDim.x) - schedule.receivers);
    bool stalled = false;
#pragma unroll 1
    for (uint32_t item = summer + LateFirstWarp() * schedule.receivers; summer >= 0 && item < items;) {
      const uint32_t token = schedule.by_parts(item), first = (item - token * parts) * schedule.rounds;
      const bool before = stalled;
      const int end = min(p.staging.row_rounds, static_cast<int>(first) + schedule.rounds);
      if (SumPart(token, first, end, &stalled, begin)) {
        item += schedule.receivers * kWarps;
      } else if (before == stalled) {
        return false;
      } else {
        AdoptShares(p, schedule, run);  // then try again, with nothing held in registers meanwhile
      }
    }
    return begin();
  }
};

template <class Y, int kSumRounds, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    LowLatencyCombineKernel(const __grid_constant__ CombineParams p,
                            const __grid_constant__ LowLatencySchedule schedule) {
  __shared__ Running run;
  const LowLatencyCombine<Y, kSumRounds, kRows> work(p, schedule, run);
  AwaitKernelBefore();
  const int block = static_cast<int>(blockIdx.x), warp = static_cast<int>(threadIdx.x / 32);
  if (warp == 0) {
    BeginLowLatency(run, p.call, Operation::kCombine, p.routing.ranks, p.routing.rank);
    if (p.call.active && block < schedule.push) StartOnce(run, block);
  }
  bool begun = false;
  auto begin = [&] {  // all threads run it once: the first warp knows the epoch
    if (!begun) {
      __syncthreads();
      begun = true;
      if (!run.refused && block < schedule.push) StartShare(run.control, block, run.epoch);
    }
    return !run.refused;
  };
  if (warp == 0) begin();  // the first warp knows the epoch already: the other warps need not wait for its first rows
  if (block < schedule.push) work.PushShare(block, LateFirstWarp(), kWarps, [&] { return begin() && !run.repeats; });
  const bool good = work.Sum(begin);
  FinishLowLatency(run, good, [&](uint32_t index, uint32_t count) {
    FillBytes(p.out, static_cast<uint64_t>(p.routing.tokens) * p.routing.hidden * sizeof(Y), kPoison, index, count);
  });
}

// Two rows in flight for few tokens, three for many: measured (docs/lab/small_batches.md).
template <class Y>
int LaunchLowLatencyCombineOf(const CombineParams& p, cudaStream_t stream) {
  if (Unfit(p) || p.routing.ranks > kRanks) return cudaErrorInvalidValue;
  const LowLatencySchedule schedule = ScheduleLowLatency(p.routing, p.schedule, p.staging, true);
  const auto kernel = p.routing.tokens <= kFewTokens ? LowLatencyCombineKernel<Y, kSumRoundsOfFew, 2>
                                                     : LowLatencyCombineKernel<Y, kSumRounds, 3>;
  return LaunchEarly(kernel, p.schedule.blocks, 0, stream, p, schedule);
}
template <class Y>
int PreloadLowLatencyCombineOf() {
  if (int e = LoadKernel(LowLatencyCombineKernel<Y, kSumRoundsOfFew, 2>)) return e;
  return LoadKernel(LowLatencyCombineKernel<Y, kSumRounds, 3>);
}

}  // namespace xen_moe::XEN_MOE_VARIANT
