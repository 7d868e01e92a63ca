// The rows of a low-latency dispatch: from x into lines on the peers, and from lines (own rows: from x) to their
// places.
#pragma once

#include "low_latency_routing.cuh"

namespace xen_moe {

// The piece at byte `at` of a token's wire row: values, then scales. Zeros past its end.
__device__ __forceinline__ uint4 LoadPiece(const DispatchParams& p, int token, const Piece& piece, int at) {
  const int values = static_cast<int>(p.staging.scale_offset);
  uint4 v = make_uint4(0, 0, 0, 0);
  if (at < values) {
    const char* from = static_cast<const char*>(p.x) + static_cast<int64_t>(token) * values + at;
    if (piece.flags) {
      const uint2 half = __ldcs(reinterpret_cast<const uint2*>(from));
      v.x = half.x, v.y = half.y;
    } else {
      v = __ldcs(reinterpret_cast<const uint4*>(from));
    }
  } else if (at < static_cast<int>(p.staging.row_bytes)) {
    const int blocks = (p.routing.hidden + kScaleBlock - 1) / kScaleBlock, first = (at - values) / 4;
    const uint32_t* scales = reinterpret_cast<const uint32_t*>(p.scales) + static_cast<int64_t>(token) * blocks;
    if (first < blocks) v.x = __ldcs(scales + first);
    if (first + 1 < blocks) v.y = __ldcs(scales + first + 1);
    if (!piece.flags && first + 2 < blocks) v.z = __ldcs(scales + first + 2);
    if (!piece.flags && first + 3 < blocks) v.w = __ldcs(scales + first + 3);
  }
  return v;
}
__device__ __forceinline__ void StorePiece(const DispatchParams& p, int64_t row, const Piece& piece, int at, uint4 v) {
  const int values = static_cast<int>(p.staging.scale_offset);
  if (at < values) {
    char* to = static_cast<char*>(p.rows) + row * values + at;
    if (piece.flags) {
      *reinterpret_cast<uint2*>(to) = make_uint2(v.x, v.y);
    } else {
      *reinterpret_cast<uint4*>(to) = v;
    }
  } else if (at < static_cast<int>(p.staging.row_bytes) && p.row_scales) {
    const int blocks = (p.routing.hidden + kScaleBlock - 1) / kScaleBlock, first = (at - values) / 4;
    uint32_t* scales = reinterpret_cast<uint32_t*>(p.row_scales) + row * blocks;
    if (first < blocks) scales[first] = v.x;
    if (first + 1 < blocks) scales[first + 1] = v.y;
    if (!piece.flags && first + 2 < blocks) scales[first + 2] = v.z;
    if (!piece.flags && first + 3 < blocks) scales[first + 3] = v.w;
  }
}

// Pushing: warps take (token, round) items of a share, kAhead at a time.
constexpr int kAhead = 4;
struct Batch {
  uint4 v[kAhead];
  int expert[kAhead];  // lane k: of slot k

  __device__ __forceinline__ void Load(const DispatchParams& p, const Piece& piece, int item, int end) {
    const int lane = threadIdx.x & 31, rounds = p.staging.row_rounds;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int now = item + i * kWarps;
      if (now >= end) break;
      const int token = now / rounds;
      v[i] = LoadPiece(p, token, piece, (now - token * rounds) * kRoundData + piece.offset);
      expert[i] = lane < p.routing.top_k ? p.topk_idx[static_cast<int64_t>(token) * p.routing.top_k + lane] : -1;
    }
  }
  __device__ __forceinline__ void Store(const Plan& plan, const Piece& piece, int item, int end) const {
    const DispatchParams& p = plan.p;
    const Routing& r = p.routing;
    const int rounds = p.staging.row_rounds, first = r.rank + 1 < r.ranks ? r.rank + 1 : 0;
    const uint32_t others = plan.run.active & ~(1u << r.rank);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int now = item + i * kWarps;
      if (now >= end) break;
      const int token = now / rounds, round = now - token * rounds;
      const bool real = expert[i] >= 0 && expert[i] < r.experts;
      const uint32_t ranks = __reduce_or_sync(0xFFFFFFFFu, real ? 1u << (expert[i] / r.local_experts) : 0u) & others;
      const int lines = Piece::Lines(round * kRoundData, static_cast<int>(p.staging.row_bytes));
      uint32_t rotated = (ranks >> first) | (ranks << (r.ranks - first) & ((1u << r.ranks) - 1));
      for (; rotated; rotated &= rotated - 1) {
        int rank = __ffs(rotated) - 1 + first;
        if (rank >= r.ranks) rank -= r.ranks;
        char* to = plan.Row(rank, r.rank, token) + round * (kRoundLines * kLineBytes);
        StoreRound(to, piece, v[i], lines, plan.run.epoch);
      }
    }
  }
};
__device__ __forceinline__ void ShareOf(const DispatchParams& p, int share, int shares, int* begin, int* end) {
  const int64_t items = p.routing.ranks > 1 ? static_cast<int64_t>(p.routing.tokens) * p.staging.row_rounds : 0;
  *begin = static_cast<int>(items * share / shares);
  *end = static_cast<int>(items * (share + 1) / shares);
}
__device__ __forceinline__ void PushShare(const Plan& plan, const Piece& piece, int share) {
  int begin, end;
  ShareOf(plan.p, share, plan.push_shares, &begin, &end);
  for (int item = begin + static_cast<int>(threadIdx.x / 32); item < end; item += kAhead * kWarps) {
    Batch batch;
    batch.Load(plan.p, piece, item, end);
    batch.Store(plan, piece, item, end);
  }
}

constexpr int kPlaceRounds = 8;  // whose loads are in flight together

__device__ __forceinline__ bool PlaceRows(const Plan& plan, const Piece& piece) {
  const DispatchParams& p = plan.p;
  const Routing& r = p.routing;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const int pairs = r.ranks * r.tokens, warps = plan.receivers * kWarps, all_rounds = p.staging.row_rounds;
  const int most = max(1, min(all_rounds, warps / pairs)), rounds = (all_rounds + most - 1) / most;
  const int parts = (all_rounds + rounds - 1) / rounds;
  const int row_bytes = static_cast<int>(p.staging.row_bytes);
  for (int64_t item = plan.receiver + static_cast<int64_t>(warp) * plan.receivers;
       item < static_cast<int64_t>(pairs) * parts; item += warps) {
    // Own tokens first, then token by token, the sources interleaved: the order in which rows arrive.
    int pair = static_cast<int>(item / parts), source = r.rank, token = pair;
    const int part = static_cast<int>(item % parts);
    if (pair >= r.tokens) {
      pair -= r.tokens;
      token = pair / (r.ranks - 1);
      source = r.rank + 1 + pair % (r.ranks - 1);
      if (source >= r.ranks) source -= r.ranks;
    }
    const bool active = plan.run.active >> source & 1, own = source == r.rank;
    const int first = part * rounds, end = min(all_rounds, first + rounds);
    const char* const row = plan.Row(r.rank, source, token);
    uint4 v[kPlaceRounds];
    auto load_one = [&](int round) {
      return own ? LoadPiece(p, token, piece, round * kRoundData + piece.offset)
                 : LoadRound(row + round * (kRoundLines * kLineBytes));
    };
    auto load = [&](int base) {
#pragma unroll
      for (int i = 0; i < kPlaceRounds; ++i) {
        if (base + i < end) v[i] = load_one(base + i);
      }
    };
    if (active) load(first);  // a first look, beside the token's own line
    uint4 slots = make_uint4(0, 0, 0, 0);
    if (active) {
      const char* line = plan.Message(r.rank, source) + (p.staging.count_lines + token) * kLineBytes;
      const bool good = AwaitLines(
          [&] {
            slots = LoadVectorSystem(reinterpret_cast<const uint4*>(line) + (lane & 7));
            return __ballot_sync(0xFFFFFFFFu, piece.flags && slots.w != plan.run.epoch);
          },
          [&](uint32_t) { return source; }, [] { return false; }, plan.run, Step::kMetadata);
      if (!good) return false;
    }
    const uint32_t low = __shfl_sync(0xFFFFFFFFu, slots.x, lane / 2),
                   low_weight = __shfl_sync(0xFFFFFFFFu, slots.y, lane / 2);
    const uint32_t high = __shfl_sync(0xFFFFFFFFu, slots.z, lane / 2),
                   high_weight = __shfl_sync(0xFFFFFFFFu, slots.w, lane / 2);
    const uint32_t word = lane >= r.top_k ? 0 : lane & 1 ? high : low;
    const float weight = __uint_as_float(lane & 1 ? high_weight : low_weight);
    int position = Position(plan, source, word);
    if (r.layout == Layout::kRanked) {  // one row, whichever slots want it
      const uint32_t here = __ballot_sync(0xFFFFFFFFu, position != -1);
      const int of_row = __shfl_sync(0xFFFFFFFFu, position, here ? __ffs(here) - 1 : 0);
      position = lane == 0 ? of_row : -1;
    }
    const uint32_t placed = __ballot_sync(0xFFFFFFFFu, position >= 0);
    const int first_row = __shfl_sync(0xFFFFFFFFu, position, placed ? __ffs(placed) - 1 : 0);
    if (part == 0) {
      WriteRouting(plan, static_cast<int64_t>(source) * r.tokens + token, word, weight, position,
                   placed ? first_row : -1);
    }
    if (placed == 0) continue;
    for (int base = first; base < end; base += kPlaceRounds) {
      if (base != first) load(base);
      const int last = min(end, base + kPlaceRounds) - 1;
      while (!own) {
        uint32_t mask = 0;
#pragma unroll
        for (int i = 0; i < kPlaceRounds; ++i) {
          if (base + i < end) {
            const int lines = Piece::Lines((base + i) * kRoundData, row_bytes);
            mask |= __ballot_sync(0xFFFFFFFFu, Missing(piece, v[i], lines, plan.run.epoch));
          }
        }
        if (mask == 0) break;
        const int lines = Piece::Lines(last * kRoundData, row_bytes);  // it comes last, as a rule
        const bool good = AwaitLines(
            [&] { return __ballot_sync(0xFFFFFFFFu, Missing(piece, load_one(last), lines, plan.run.epoch)); },
            [&](uint32_t) { return source; }, [] { return false; }, plan.run, Step::kRows);
        if (!good) return false;
        load(base);
      }
#pragma unroll
      for (int i = 0; i < kPlaceRounds; ++i) {
        if (base + i >= end) break;
        const int at = (base + i) * kRoundData + piece.offset;
        for (uint32_t m = placed; m; m &= m - 1) {
          StorePiece(p, __shfl_sync(0xFFFFFFFFu, position, __ffs(m) - 1), piece, at, v[i]);
        }
      }
    }
  }
  return true;
}

}  // namespace xen_moe
