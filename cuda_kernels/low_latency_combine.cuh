// Combine of small batches: no fence, no flag beside the data.
//
// What moves: as in combine.cuh, a partial row for each (source, token) that has rows here, in lines (lines.cuh), to
// staging row [this rank][token] of its source. Who does it: the first `push_blocks` blocks add up and push shares of
// the rows, and end; the others sum what has come in, each warp a part of a token's row. Rows are found and added up
// before the operation's number is known. Who waits for whom: pushing waits for nobody. A warp that sums waits for
// lines; when that takes long it first pushes what no block of this GPU has started (claims.cuh), so every wait ends
// with any number of resident blocks. Every rank in a token's topk_idx sends its partial row, also when all its rows
// were dropped; ranks that are out send none and get none. Positions are checked before they become addresses. Multiply
// and add are rounded separately.
#pragma once

#include "low_latency.cuh"
#include "octet.cuh"
#include "phases.cuh"
#include "routing.cuh"

namespace xen_moe {

// A lane's 16 bytes of a row as floats; of a lane with flags only the first half counts.
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
  uint4 raw = make_uint4(0, 0, 0, 0);
  if (at >= bytes) return raw;
  if (piece.flags) {
    const uint2 half = __ldcs(reinterpret_cast<const uint2*>(row + at));
    raw.x = half.x, raw.y = half.y;
    return raw;
  }
  return __ldcs(reinterpret_cast<const uint4*>(row + at));
}

// The rows of y that this rank holds of one (source, token): lane k has slot k's.
struct TokenRows {
  int position;
  float weight;
  uint32_t placed;  // lanes that have a row
  bool belongs;     // the token names this rank

  __device__ __forceinline__ TokenRows(const CombineParams& p, int source, int token) {
    const Routing& r = p.routing;
    const int lane = threadIdx.x & 31;
    const int64_t at = (static_cast<int64_t>(source) * r.tokens + token) * r.slots;
    position = lane < r.slots ? p.positions[at + lane] : -1;
    belongs = __any_sync(0xFFFFFFFFu, position != -1);
    const bool real = position >= 0 && position < r.capacity;
    placed = __ballot_sync(0xFFFFFFFFu, real);
    weight = real && p.weights ? p.weights[position] : 1.0f;
  }
};

constexpr int kSumRounds = 2;  // rounds of a warp whose sums are in registers together
constexpr int kPushRounds = 4;

// sums[i] = the weighted sum of the rows in slot order, round base + i, in float32.
template <class Y, int kRounds>
__device__ __forceinline__ void SumRows(const CombineParams& p, const TokenRows& rows, const Piece& piece, int base,
                                        int end, Values<Y> (&sums)[kRounds]) {
  const int row_bytes = static_cast<int>(p.staging.row_bytes);
#pragma unroll
  for (int i = 0; i < kRounds; ++i) sums[i].Clear();
  constexpr int kRows = 2;  // whose loads are in flight together
  for (uint32_t m = rows.placed; m;) {
    uint4 raw[kRows][kRounds];
    float weight[kRows];
    bool real[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      real[j] = m != 0;
      const int slot = m ? __ffs(m) - 1 : 0;
      m &= m - 1;
      const int64_t position = __shfl_sync(0xFFFFFFFFu, rows.position, slot);
      weight[j] = __shfl_sync(0xFFFFFFFFu, rows.weight, slot);
      if (!real[j]) continue;
      const char* row = static_cast<const char*>(p.y) + position * row_bytes;
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        if (base + i < end) raw[j][i] = LoadRowPiece(row, piece, (base + i) * kRoundData + piece.offset, row_bytes);
      }
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if (!real[j]) continue;
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        if (base + i >= end) continue;
        if (p.weights) {
          sums[i].AddWeighted(raw[j][i], weight[j]);
        } else {
          sums[i].Add(raw[j][i]);
        }
      }
    }
  }
}

// How rows are cut into parts of whole rounds, so that there is about one for each of `warps`.
struct Parts {
  int rounds, count;
  __device__ __forceinline__ Parts(int all_rounds, int64_t rows, int64_t warps, int least) {
    const int most =
        static_cast<int>(max(int64_t{1}, min(static_cast<int64_t>(all_rounds), warps / max(int64_t{1}, rows))));
    rounds = min(all_rounds, max(least, (all_rounds + most - 1) / most));
    count = (all_rounds + rounds - 1) / rounds;
  }
};

template <class Y>
struct LowLatencyCombine {
  const CombineParams& p;
  Running& run;
  const Piece piece;
  int shares, summers, summer;  // summer: this block's number among them, or negative

  __device__ __forceinline__ LowLatencyCombine(const CombineParams& params, Running& running)
      : p(params), run(running) {
    const int blocks = static_cast<int>(gridDim.x);
    shares = p.schedule.push_blocks;
    summers = blocks > shares ? blocks - shares : blocks;
    summer = static_cast<int>(blockIdx.x) - (blocks - summers);
  }
  // A round of a partial row, in the lines of rank `on`.
  __device__ __forceinline__ char* Round(int on, int source, int token, int round) const {
    const uint64_t row = static_cast<uint64_t>(source) * p.routing.tokens + token;
    return run.half[on] + run.line_border + (row * p.staging.row_rounds + round) * (kRoundLines * kLineBytes);
  }

  // Item `item` of all (token, source, part)s. `begin()` runs when the sum is there and the operation's number is
  // needed; false: it is not to be sent.
  template <class Begin>
  __device__ __forceinline__ void Push(const Parts& parts, int64_t item, Begin begin) {
    const Routing& r = p.routing;
    const int row_bytes = static_cast<int>(p.staging.row_bytes), all_rounds = p.staging.row_rounds;
    const int64_t pair = item / parts.count;
    const int part = static_cast<int>(item % parts.count);
    const int token = static_cast<int>(pair / (r.ranks - 1));
    int source = r.rank + 1 + static_cast<int>(pair % (r.ranks - 1));
    if (source >= r.ranks) source -= r.ranks;
    const TokenRows rows(p, source, token);
    const int end = min(all_rounds, (part + 1) * parts.rounds);
    for (int base = part * parts.rounds; base < end; base += kPushRounds) {
      Values<Y> sums[kPushRounds];
      SumRows<Y, kPushRounds>(p, rows, piece, base, end, sums);
      if (!begin() || !rows.belongs || !(run.active >> source & 1)) return;
#pragma unroll
      for (int i = 0; i < kPushRounds; ++i) {
        if (base + i >= end) break;
        StoreRound(Round(source, r.rank, token, base + i), piece, sums[i].Round(),
                   Piece::Lines((base + i) * kRoundData, row_bytes), run.epoch);
      }
    }
  }
  // Rows of share `share`, by warp `warp` of `warps`.
  template <class Begin>
  __device__ __forceinline__ void PushShare(int share, int warp, int warps, Begin begin) {
    const int64_t rows = static_cast<int64_t>(p.routing.ranks - 1) * p.routing.tokens;
    const Parts parts(p.staging.row_rounds, rows, static_cast<int64_t>(shares) * kWarps, 1);
    for (int64_t item = share + static_cast<int64_t>(warp) * shares; item < rows * parts.count;
         item += static_cast<int64_t>(warps) * shares) {
      Push(parts, item, begin);
    }
  }
  // A warp alone: what no block of this GPU has started. Not a method of the object at hand, which would have to lie in
  // memory for it.
  static __device__ __noinline__ void AdoptShares(const CombineParams& p, Running& run) {
    LowLatencyCombine work(p, run);
    for (int share = 0; share < work.shares; ++share) {
      bool adopted = false;
      if ((threadIdx.x & 31) == 0) adopted = atomicExch(&run.control->started[share], run.epoch) != run.epoch;
      if (__shfl_sync(0xFFFFFFFFu, adopted, 0)) work.PushShare(share, 0, 1, [] { return true; });
    }
  }

  // total = the partial rows of `ranks` in ascending order, this rank's from `mine`. False: a line has not come yet;
  // `awaited` and `round` say which one to wait for.
  __device__ __forceinline__ bool AddRanks(uint32_t ranks, int token, int base, int end,
                                           const uint4 (&mine)[kSumRounds], Values<Y> (&total)[kSumRounds],
                                           int* awaited, int* round) {
    const int here = p.routing.rank, row_bytes = static_cast<int>(p.staging.row_bytes);
    constexpr int kRanks = 3;  // whose lines are loaded together
#pragma unroll
    for (int i = 0; i < kSumRounds; ++i) total[i].Clear();
    uint32_t left = ranks & ~(1u << here);
    bool own = ranks >> here & 1;
    auto add_own = [&] {
#pragma unroll
      for (int i = 0; i < kSumRounds; ++i) total[i].Add(mine[i]);
      own = false;
    };
    while (left) {
      uint4 v[kRanks][kSumRounds];
      int rank[kRanks];
#pragma unroll
      for (int j = 0; j < kRanks; ++j) {
        rank[j] = __ffs(left) - 1;  // -1: none
        left &= left - 1;
        if (rank[j] < 0) continue;
#pragma unroll
        for (int i = 0; i < kSumRounds; ++i) {
          if (base + i < end) v[j][i] = LoadRound(Round(here, rank[j], token, base + i));
        }
      }
      bool complete = true;
#pragma unroll
      for (int j = 0; j < kRanks; ++j) {
        if (rank[j] < 0) continue;
#pragma unroll
        for (int i = 0; i < kSumRounds; ++i) {
          if (base + i >= end) continue;
          const int lines = Piece::Lines((base + i) * kRoundData, row_bytes);
          if (__any_sync(0xFFFFFFFFu, Missing(piece, v[j][i], lines, run.epoch))) {
            complete = false, *awaited = rank[j], *round = base + i;  // the last one, which comes last as a rule
          }
        }
      }
      if (!complete) return false;
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

  // Part `part` of a token. False: the group has failed, or, if `*stalled` is false, it is time to look for work that
  // nobody has started (then it is true).
  __device__ __forceinline__ bool SumPart(int token, int begin, int end, bool* stalled) {
    const Routing& r = p.routing;
    const int row_bytes = static_cast<int>(p.staging.row_bytes);
    const uint32_t ranks = RanksOf(p.topk_idx, token, r, run.active);
    const TokenRows own(p, r.rank, token);
    for (int base = begin; base < end; base += kSumRounds) {
      uint4 mine[kSumRounds];  // rounded, so that little is held while the warp waits
      {
        Values<Y> sums[kSumRounds];
        SumRows<Y, kSumRounds>(p, own, piece, base, end, sums);
#pragma unroll
        for (int i = 0; i < kSumRounds; ++i) mine[i] = sums[i].Round();
      }
      Values<Y> total[kSumRounds];
      for (int awaited, round; !AddRanks(ranks, token, base, end, mine, total, &awaited, &round);) {
        const char* const at = Round(r.rank, awaited, token, round);
        const int lines = Piece::Lines(round * kRoundData, row_bytes);
        auto missing = [&] { return __ballot_sync(0xFFFFFFFFu, Missing(piece, LoadRound(at), lines, run.epoch)); };
        auto leave = [&] { return *stalled ? false : *stalled = true; };
        if (!AwaitLines(missing, [&](uint32_t) { return awaited; }, leave, run, Step::kRows)) return false;
      }
      char* out = static_cast<char*>(p.out) + static_cast<int64_t>(token) * row_bytes;
#pragma unroll
      for (int i = 0; i < kSumRounds; ++i) {
        const int at = (base + i) * kRoundData + piece.offset;
        if (base + i >= end || at >= row_bytes) continue;
        const uint4 raw = total[i].Round();
        if (piece.flags) {
          *reinterpret_cast<uint2*>(out + at) = make_uint2(raw.x, raw.y);
        } else {
          *reinterpret_cast<uint4*>(out + at) = raw;
        }
      }
    }
    return true;
  }

  // False: the group has failed.
  __device__ __forceinline__ bool Sum() {
    const int64_t warps = static_cast<int64_t>(summers) * kWarps;
    const int all_rounds = p.staging.row_rounds;
    const Parts parts(all_rounds, p.routing.tokens, warps, 1);
    bool stalled = false;
    for (int64_t item = summer + static_cast<int64_t>(threadIdx.x / 32) * summers;
         item < static_cast<int64_t>(p.routing.tokens) * parts.count;) {
      const int token = static_cast<int>(item / parts.count),
                begin = static_cast<int>(item % parts.count) * parts.rounds;
      const bool before = stalled;
      if (SumPart(token, begin, min(all_rounds, begin + parts.rounds), &stalled)) {
        item += warps;
      } else if (before == stalled) {
        return false;
      } else {
        AdoptShares(p, run);  // then once more, with nothing held in registers meanwhile
      }
    }
    return true;
  }
};

template <class Y>
__global__ void __launch_bounds__(kThreads, 1) LowLatencyCombineKernel(const __grid_constant__ CombineParams p) {
  __shared__ Running run;
  LowLatencyCombine<Y> work(p, run);
  Phase(0);
  const int block = static_cast<int>(blockIdx.x), warp = static_cast<int>(threadIdx.x / 32);
  if (warp == 0) BeginLowLatency(run, p.call, Operation::kCombine, p.routing.ranks, p.routing.rank);
  bool begun = false;
  auto begin = [&] {  // of all threads once: the first warp has the operation's number
    if (!begun) {
      __syncthreads();
      begun = true;
      if (!run.refused && block < work.shares) StartShare(run.control, block, run.epoch);
    }
    return !run.refused;
  };
  if (block < work.shares && p.routing.ranks > 1) work.PushShare(block, warp, kWarps, begin);
  begin();
  Phase(2);
  bool good = true;
  if (!run.refused && work.summer >= 0) good = work.Sum();
  good = __syncthreads_and(good);
  Phase(5);
  FinishLowLatency(run, !good, [&](uint32_t index, uint32_t count) {
    FillBytes(p.out, static_cast<uint64_t>(p.routing.tokens) * p.routing.hidden * sizeof(Y), kPoison, index, count);
  });
  Phase(6);
}

template <class Y>
int LaunchLowLatencyCombineOf(const CombineParams& p, cudaStream_t stream) {
  if (Unfit(p)) return cudaErrorInvalidValue;
  LowLatencyCombineKernel<Y><<<p.schedule.blocks, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}
template <class Y>
int PreloadLowLatencyCombineOf() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, LowLatencyCombineKernel<Y>);
}

}  // namespace xen_moe
