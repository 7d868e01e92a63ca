// How the low-latency kernels divide rows into LL128 lines, and their shared memory. Plain data: the host plans with it
// too.
#pragma once

#include <cstdint>

#include "cuda_kernels/core/params.h"

namespace xen_moe {

constexpr int kLineBytes = 128;  // the last eight of them are the epoch
constexpr int kLineData = kLineBytes - 8;
constexpr int kRoundLines = 4;  // lines that a warp stores or loads at once
constexpr int kRoundData = kRoundLines * kLineData;
constexpr int kRoundBytes = kRoundLines * kLineBytes;
// Rounds that hold `bytes` bytes, and the lines of the last of them that hold data.
XEN_MOE_ANYWHERE inline uint64_t LineRounds(uint64_t bytes) { return (bytes + kRoundData - 1) / kRoundData; }
XEN_MOE_ANYWHERE inline int LastLines(uint64_t bytes) {
  const int last = static_cast<int>(bytes - (LineRounds(bytes) - 1) * kRoundData);
  return last >= 112 * (kRoundLines - 1) + 1 ? kRoundLines : (last + 111) / 112;
}
// The most rounds of a rank's operand in a low-latency gather: 32 bits hold its bytes, and its rounds times the blocks.
constexpr uint64_t kMostGatherRounds = 1 << 22;
constexpr int kLineCounts = kLineData / 4;  // row counts of a line
// slots in a token's line: the experts that want the token, and their weights
constexpr int kLineSlots = kLineData / 8;

// A block's dynamic shared memory in a low-latency dispatch: byte offsets. Sending needs the arrays before `counts`,
// receiving the others.
struct SharedPlan {
  int columns;       // rows are numbered by these: all experts, or, ranked, the ranks
  int local;         // columns that lie on one rank
  int entries;       // T * K, or, ranked, T * R
  uint32_t experts;  // [T, K] int16: -1: none
  uint32_t numbers;  // [entries] uint16: number among this rank's rows of its column
  uint32_t weights;  // [T, K] float
  uint32_t before;   // [kWarps, columns] uint16: rows that earlier warps have counted
  uint32_t totals;   // [columns] int
  uint32_t counts;   // [R, local] int: rows of earlier sources
  uint32_t groups;   // [local] int: rows of all sources
  uint32_t starts;   // [local] int
  uint32_t bytes;
};
constexpr uint32_t kLowLatencySharedBytes = 46 * 1024;

XEN_MOE_ANYWHERE inline SharedPlan PlanShared(const Routing& r) {
  SharedPlan s{};
  const bool ranked = r.layout == Layout::kRanked;
  const int64_t slots = static_cast<int64_t>(r.tokens) * r.top_k;
  const int64_t entries = ranked ? static_cast<int64_t>(r.tokens) * r.ranks : slots;
  s.columns = ranked ? r.ranks : r.local_experts * r.ranks;
  s.local = ranked ? 1 : r.local_experts;
  s.entries = static_cast<int>(entries);
  uint64_t at = 0;
  auto take = [&](int64_t count, int64_t bytes) {
    const uint64_t from = at;
    at += (static_cast<uint64_t>(count * bytes) + 15) / 16 * 16;
    return static_cast<uint32_t>(from);
  };
  s.experts = take(slots, 2);
  s.numbers = take(entries, 2);
  s.weights = take(slots, 4);
  s.before = take(static_cast<int64_t>(kWarps) * s.columns, 2);
  s.totals = take(s.columns, 4);
  s.counts = take(static_cast<int64_t>(r.ranks) * s.local, 4);
  s.groups = take(s.local, 4);
  s.starts = take(s.local, 4);
  s.bytes = at > 0xFFFFFFu || entries > 0xFFFF ? 0xFFFFFFu : static_cast<uint32_t>(at);
  return s;
}

// The receivers number a dispatch of few tokens (few.cuh). `experts`: [R, T, kFewSlots] uint32: what wants a row, in
// order; `weights`: the same of float; `counts`: [R, L].
constexpr int kFewSlots = 16;
constexpr int kFewPairs = 32;  // of (source, token)
XEN_MOE_ANYWHERE inline SharedPlan PlanFewShared(const Routing& r) {
  SharedPlan s{};
  const uint64_t slots = static_cast<uint64_t>(r.ranks) * r.tokens * kFewSlots;
  const uint64_t bytes = slots * 8 + static_cast<uint64_t>(r.ranks) * r.local_experts * 4;
  s.columns = s.local = r.local_experts;
  s.weights = static_cast<uint32_t>(slots * 4);
  s.counts = static_cast<uint32_t>(slots * 8);
  s.bytes = bytes > 0xFFFFFFu ? 0xFFFFFFu : static_cast<uint32_t>(bytes);
  return s;
}
// Groups that are rounded up, and ranked rows, need the counts of all sources.
XEN_MOE_ANYWHERE inline bool IsFew(const Routing& r) {
  return static_cast<int64_t>(r.ranks) * r.tokens <= kFewPairs && PlanFewShared(r).bytes <= kLowLatencySharedBytes &&
         (r.layout == Layout::kPadded || (r.layout == Layout::kGrouped && r.alignment == 1));
}

// The limits of the low-latency kernels: with this many rows of this many rounds `Divisor` is exact.
constexpr int kMostLineRows = 8192, kMostLineRowsOfLargeGroups = 16383, kMostRounds = 512;

// Division by a number that the host knows: exact for n if n * by < 2^32.
struct Divisor {
  uint32_t by, inverse;  // 2^32 / by, rounded up
  XEN_MOE_ANYWHERE static Divisor Of(int by) {
    const uint32_t d = static_cast<uint32_t>(by < 1 ? 1 : by);
    return {d, static_cast<uint32_t>(((uint64_t{1} << 32) + d - 1) / d)};
  }
  XEN_MOE_ANYWHERE uint32_t operator()(uint32_t n) const {
    return by == 1 ? n : static_cast<uint32_t>(static_cast<uint64_t>(n) * inverse >> 32);
  }
};

// How blocks and warps share the work. The first `routing` blocks send the messages, the next `push` blocks the rows,
// the other blocks receive; if no block is left, all blocks receive. Received (summed) rows are divided into `parts` of
// `rounds` rounds, about one for each warp; so are the rows that a combine pushes.
struct LowLatencySchedule {
  int routing, push, receivers;
  int rounds, parts;
  int push_rounds, push_parts;
  int last_lines;  // lines of a row's last round that hold data
  Divisor by_parts, by_push_parts, by_others, by_row_rounds, by_local_experts, by_count_lines, by_tokens;
};
constexpr int kPlaceRounds = 8, kPushRounds = 2;  // rounds that a warp moves at once
constexpr int kFewPlaceRounds = 1;                // of few tokens
// A combine of few tokens has its own kernel, in which a warp sums fewer rounds: it has less code to load.
constexpr int kFewTokens = 32;
constexpr int kSumRounds = 2, kSumRoundsOfFew = 1;

XEN_MOE_ANYWHERE inline void DivideRow(int all_rounds, int rows, int warps, int most_rounds, int* rounds, int* parts) {
  const int most = rows > 0 ? warps / rows : 1;
  const int finest = most < 1 ? 1 : most > all_rounds ? all_rounds : most;
  *rounds = (all_rounds + finest - 1) / finest;
  if (*rounds > most_rounds) *rounds = most_rounds;
  *parts = (all_rounds + *rounds - 1) / *rounds;
}
XEN_MOE_ANYWHERE inline LowLatencySchedule ScheduleLowLatency(const Routing& r, const Schedule& s, const Staging& m,
                                                              bool combine) {
  LowLatencySchedule c{};
  const int all_rounds = m.row_rounds;
  // No more shares than blocks: a second one could not be claimed together with the number (low_latency/dispatch.cu).
  c.routing = combine ? 0 : s.layout_blocks < s.blocks ? s.layout_blocks : s.blocks > 1 ? s.blocks - 1 : 1;
  c.push = s.push_blocks < s.blocks - c.routing ? s.push_blocks : s.blocks > c.routing ? s.blocks - c.routing : 1;
  c.receivers = s.blocks > c.routing + c.push ? s.blocks - c.routing - c.push : s.blocks;
  const int sum_rounds = r.tokens <= kFewTokens ? kSumRoundsOfFew : kSumRounds;
  DivideRow(all_rounds, combine ? r.tokens : r.ranks * r.tokens, c.receivers * kWarps,
            combine ? sum_rounds : kPlaceRounds, &c.rounds, &c.parts);
  DivideRow(all_rounds, (r.ranks - 1) * r.tokens, c.push * kWarps, kPushRounds, &c.push_rounds, &c.push_parts);
  c.last_lines = LastLines(m.row_bytes);
  c.by_parts = Divisor::Of(c.parts), c.by_push_parts = Divisor::Of(c.push_parts);
  c.by_others = Divisor::Of(r.ranks - 1), c.by_row_rounds = Divisor::Of(all_rounds);
  c.by_local_experts = Divisor::Of(r.local_experts), c.by_count_lines = Divisor::Of(m.count_lines);
  c.by_tokens = Divisor::Of(r.tokens);
  return c;
}

}  // namespace xen_moe
