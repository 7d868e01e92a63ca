// The routing of a low-latency dispatch: who takes part in it, how rows are numbered, and the messages that say so.
//
// A rank's message to another: `count_lines` lines with its rows per local expert of the other, then a line per token
// with a word for every slot: number << 16 | local expert + 1, and the slot's weight. The number is the row's among the
// rows that this rank sends to that expert (ranked: to that rank); with the counts of the sources before and the
// groups' starts it gives the position. low_latency_dispatch.cu says who waits for whom.
#pragma once

#include "layout.cuh"
#include "low_latency.cuh"
#include "phases.cuh"

namespace xen_moe {

// What a block knows of the operation. `shared`: its dynamic shared memory.
struct Plan {
  const DispatchParams& p;
  const Running& run;
  char* shared;
  SharedPlan at;
  int routing_shares, push_shares, receivers, receiver;  // receiver: this block's number among them, or negative

  __device__ __forceinline__ Plan(const DispatchParams& params, const Running& running, char* dynamic)
      : p(params), run(running), shared(dynamic), at(PlanShared(params.routing)) {
    const int blocks = static_cast<int>(gridDim.x);
    routing_shares = p.schedule.layout_blocks;
    push_shares = p.schedule.push_blocks;
    const int senders = routing_shares + push_shares;
    receivers = blocks > senders ? blocks - senders : blocks;
    receiver = static_cast<int>(blockIdx.x) - (blocks - receivers);
  }
  __device__ __forceinline__ int Shares() const { return routing_shares + push_shares; }
  template <class T>
  __device__ __forceinline__ T* In(uint32_t offset) const {
    return reinterpret_cast<T*>(shared + offset);
  }
  // In the lines of rank `on`: the message of `source`, and its token's row.
  __device__ __forceinline__ char* Message(int on, int source) const {
    const uint64_t lines = static_cast<uint64_t>(source) * (p.staging.count_lines + p.routing.tokens);
    return run.half[on] + run.line_border + lines * kLineBytes;
  }
  __device__ __forceinline__ char* Row(int on, int source, int token) const {
    const uint64_t row = static_cast<uint64_t>(source) * p.routing.tokens + token;
    return run.half[on] + run.line_border +
           (p.staging.row_lines + row * p.staging.row_rounds * kRoundLines) * kLineBytes;
  }
};

// Routing. Loads what the numbering needs into shared memory; a __syncthreads must follow.
__device__ __forceinline__ void LoadRouting(const Plan& plan) {
  const Routing& r = plan.p.routing;
  const int slots = r.tokens * r.top_k;
  int16_t* experts = plan.In<int16_t>(plan.at.experts);
  float* weights = plan.In<float>(plan.at.weights);
  for (int i = threadIdx.x; i < slots; i += kThreads) {
    const int expert = plan.p.topk_idx[i];
    const float weight = plan.p.topk_weights[i];
    experts[i] = expert >= 0 && expert < r.experts ? static_cast<int16_t>(expert) : int16_t{-1};
    weights[i] = weight;
  }
  uint32_t* before = plan.In<uint32_t>(plan.at.before);
  for (int i = threadIdx.x; i < (kWarps * plan.at.columns + 1) / 2; i += kThreads) before[i] = 0;
}

// Column of entry `i`, or -1. Ranked: entries are (token, rank), of the ranks that own any of the token's experts.
__device__ __forceinline__ int ColumnOfEntry(const Plan& plan, int i) {
  const Routing& r = plan.p.routing;
  const int16_t* experts = plan.In<int16_t>(plan.at.experts);
  if (r.layout != Layout::kRanked) {
    const int expert = experts[i];
    return expert >= 0 && (plan.run.active >> (expert / r.local_experts) & 1) ? expert : -1;
  }
  const int token = i / r.ranks, rank = i - token * r.ranks;
  bool here = false;
  for (int k = 0; k < r.top_k; ++k) {
    const int local = experts[token * r.top_k + k] - rank * r.local_experts;
    here |= local >= 0 && local < r.local_experts;
  }
  return here && (plan.run.active >> rank & 1) ? rank : -1;
}

__device__ __forceinline__ int EntriesOfWarp(const Plan& plan) {
  return ((plan.at.entries + kWarps - 1) / kWarps + 31) / 32 * 32;
}
// All threads of the block, between two __syncthreads: rows of each column, and each row's number among them.
__device__ __forceinline__ void Number(const Plan& plan) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, columns = plan.at.columns;
  uint16_t* numbers = plan.In<uint16_t>(plan.at.numbers);
  uint16_t* before = plan.In<uint16_t>(plan.at.before);
  uint16_t* mine = before + warp * columns;
  const int each = EntriesOfWarp(plan), end = min(plan.at.entries, (warp + 1) * each);
  for (int first = warp * each; first < end; first += 32) {
    const int entry = first + lane;
    const int column = entry < end ? ColumnOfEntry(plan, entry) : -1;
    const uint32_t same = __match_any_sync(0xFFFFFFFFu, column);
    const int ahead = __popc(same & ((1u << lane) - 1));
    const int seen = column >= 0 ? mine[column] : 0;
    __syncwarp();
    if (column >= 0 && ahead == 0) mine[column] = static_cast<uint16_t>(seen + __popc(same));
    __syncwarp();
    if (column >= 0) numbers[entry] = static_cast<uint16_t>(seen + ahead);
  }
  __syncthreads();
  for (int column = threadIdx.x; column < columns; column += kThreads) {
    int sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const int rows = before[w * columns + column];
      before[w * columns + column] = static_cast<uint16_t>(sum);
      sum += rows;
    }
    plan.In<int>(plan.at.totals)[column] = sum;
  }
}
__device__ __forceinline__ uint32_t NumberOf(const Plan& plan, int entry, int column) {
  const uint16_t* before = plan.In<uint16_t>(plan.at.before);
  return plan.In<uint16_t>(plan.at.numbers)[entry] +
         static_cast<uint32_t>(before[entry / EntriesOfWarp(plan) * plan.at.columns + column]);
}

// A slot's word for rank `to`: number << 16 | local expert + 1; 0: not there.
__device__ __forceinline__ uint32_t SlotWord(const Plan& plan, int to, int token, int slot) {
  const Routing& r = plan.p.routing;
  if (slot >= r.top_k) return 0;
  const int entry = token * r.top_k + slot;
  const int expert = plan.In<int16_t>(plan.at.experts)[entry], local = expert - to * r.local_experts;
  if (expert < 0 || local < 0 || local >= r.local_experts) return 0;
  const bool ranked = r.layout == Layout::kRanked;
  const uint32_t number = ranked ? NumberOf(plan, token * r.ranks + to, to) : NumberOf(plan, entry, expert);
  return number << 16 | static_cast<uint32_t>(local + 1);
}

// Share `share` of all messages; the block has numbered.
__device__ __forceinline__ void SendRouting(const Plan& plan, const Piece& piece, int share) {
  const Routing& r = plan.p.routing;
  const int warp = threadIdx.x / 32, q = threadIdx.x & 7;
  const int lines = plan.p.staging.count_lines + r.tokens, groups = (lines + kRoundLines - 1) / kRoundLines;
  const int warps = plan.routing_shares * kWarps;
  for (int item = share * kWarps + warp; item < groups * r.ranks; item += warps) {
    int to = r.rank + 1 + item / groups;
    if (to >= r.ranks) to -= r.ranks;
    if (!(plan.run.active >> to & 1)) continue;
    const int first = item % groups * kRoundLines, line = first + piece.line;
    const int token = line - plan.p.staging.count_lines;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (line < lines && token < 0) {
      const int local = plan.at.local, at = line * kLineCounts + q * 4;
      const int* totals = plan.In<int>(plan.at.totals) + to * local;
      if (at < local) v.x = totals[at];
      if (at + 1 < local) v.y = totals[at + 1];
      if (!piece.flags && at + 2 < local) v.z = totals[at + 2];
      if (!piece.flags && at + 3 < local) v.w = totals[at + 3];
    } else if (line < lines) {
      const float* weights = plan.In<float>(plan.at.weights) + token * r.top_k;
      const int slot = q * 2;
      v.x = SlotWord(plan, to, token, slot);
      if (v.x) v.y = __float_as_uint(weights[slot]);
      if (!piece.flags) v.z = SlotWord(plan, to, token, slot + 1);
      if (v.z) v.w = __float_as_uint(weights[slot + 1]);
    }
    StoreRound(plan.Message(to, r.rank) + static_cast<uint64_t>(first) * kLineBytes, piece, v,
               min(kRoundLines, lines - first), plan.run.epoch);
  }
  if (plan.p.clean_topk_idx) {
    const int16_t* experts = plan.In<int16_t>(plan.at.experts);
    for (int i = share * kThreads + threadIdx.x; i < r.tokens * r.top_k; i += plan.routing_shares * kThreads) {
      const int expert = experts[i];
      const bool moves = expert >= 0 && (plan.run.active >> (expert / r.local_experts) & 1);
      plan.p.clean_topk_idx[i] = moves ? expert : -1;
    }
  }
}

// Receiving. All threads of the block: counts of all sources. `adopt()` does what no block has started, before the
// first long wait. False: the group has failed.
template <class Adopt>
__device__ __forceinline__ bool ReceiveCounts(const Plan& plan, const Piece& piece, Adopt adopt) {
  const Routing& r = plan.p.routing;
  const int warp = threadIdx.x / 32, q = threadIdx.x & 7, local = plan.at.local;
  const int per_source = plan.p.staging.count_lines, lines = r.ranks * per_source;
  int* counts = plan.In<int>(plan.at.counts);
  bool idle = false, arrived = true;
  auto load = [&](int first, uint4* v) {  // the lanes whose lines have not come
    const int line = first + piece.line, source = line / per_source;
    bool missing = false;
    if (line < lines && (plan.run.active >> source & 1)) {
      const char* at = plan.Message(r.rank, source) + (line - source * per_source) * kLineBytes;
      *v = LoadVectorSystem(reinterpret_cast<const uint4*>(at) + q);
      missing = piece.flags && v->w != plan.run.epoch;
    }
    if (static_cast<int>(threadIdx.x) < plan.Shares()) {
      idle = LoadRelaxedGpu(&plan.run.control->started[threadIdx.x]) != plan.run.epoch;
    }
    return __ballot_sync(0xFFFFFFFFu, missing);
  };
  auto keep = [&](int first, const uint4& v) {
    const int line = first + piece.line, source = line / per_source;
    if (line >= lines) return;
    const int at = (line - source * per_source) * kLineCounts + q * 4;
    const bool active = plan.run.active >> source & 1;
    const int most = r.tokens * r.top_k;
    auto put = [&](int i, uint32_t count) {
      if (at + i >= local) return;
      counts[source * local + at + i] = active ? static_cast<int>(min(count, static_cast<uint32_t>(most))) : 0;
    };
    put(0, v.x), put(1, v.y);
    if (!piece.flags) put(2, v.z), put(3, v.w);
  };
  auto source_of = [&](int first, uint32_t mask) { return (first + (__ffs(mask) - 1) / 8) / per_source; };
  // At first without the block: then it looks for work that others wait for.
  for (int first = warp * kRoundLines; first < max(lines, (warp + 1) * kRoundLines); first += kWarps * kRoundLines) {
    uint4 v = make_uint4(0, 0, 0, 0);
    uint32_t mask = load(first, &v);
#pragma unroll 1
    for (int poll = 0; mask && poll < 64; ++poll) mask = load(first, &v);
    arrived &= mask == 0;
    keep(first, v);
  }
  Phase(3);
  if (__syncthreads_or(idle || !arrived)) {
    adopt();
    bool good = true;
    for (int first = warp * kRoundLines; first < lines && good; first += kWarps * kRoundLines) {
      uint4 v = make_uint4(0, 0, 0, 0);
      good = AwaitLines([&] { return load(first, &v); }, [&](uint32_t mask) { return source_of(first, mask); },
                        [] { return false; }, plan.run, Step::kMetadata);
      if (good) keep(first, v);
    }
    if (!__syncthreads_and(good)) return false;
  }
  // Rows of the sources before, and of all.
  const bool writes = plan.receiver == 0;
  for (int l = threadIdx.x; l < local; l += kThreads) {
    int sum = 0;
    for (int source = 0; source < r.ranks; ++source) {
      const int rows = counts[source * local + l];
      counts[source * local + l] = sum;
      sum = AddSaturated(sum, rows);
      if (writes) plan.p.recv_counts[source * r.local_experts + l] = rows;
    }
    plan.In<int>(plan.at.groups)[l] = sum;
  }
  if (writes && local < r.local_experts) {
    const int rest = r.local_experts - local;
    for (int i = threadIdx.x; i < r.ranks * rest; i += kThreads) {
      plan.p.recv_counts[i / rest * r.local_experts + local + i % rest] = 0;
    }
  }
  __syncthreads();
  return true;
}

// Lane k's position of slot k of a (source, token) whose slot word is `word`: -1, -2 or a row.
__device__ __forceinline__ int Position(const Plan& plan, int source, uint32_t word) {
  const Routing& r = plan.p.routing;
  if (word == 0) return -1;
  const int local = static_cast<int>(word & 0xFFFF) - 1;
  const int column = r.layout == Layout::kRanked ? 0 : local;
  if (local < 0 || local >= r.local_experts) return -1;
  const int in_group =
      AddSaturated(plan.In<int>(plan.at.counts)[source * plan.at.local + column], static_cast<int>(word >> 16));
  if (r.layout == Layout::kPadded && in_group >= r.ranks * r.tokens) return -2;
  const int position = AddSaturated(plan.In<int>(plan.at.starts)[column], in_group);
  return position < r.capacity ? position : -2;
}

// Positions and weights of a (source, token): part 0's warp writes them. All lanes.
__device__ __forceinline__ void WriteRouting(const Plan& plan, int64_t pair, uint32_t word, float weight, int position,
                                             int first_row) {
  const DispatchParams& p = plan.p;
  const Routing& r = p.routing;
  const int lane = threadIdx.x & 31;
  if (r.layout == Layout::kRanked) {
    if (lane == 0) p.positions[pair] = position;
    if (first_row >= 0 && lane < r.top_k) {
      const int64_t at = static_cast<int64_t>(first_row) * r.top_k + lane;
      p.local_idx[at] = static_cast<int>(word & 0xFFFF) - 1;
      p.weights[at] = word ? weight : 0.0f;
    }
  } else if (lane < r.top_k) {
    p.positions[pair * r.slots + lane] = position;
    if (position >= 0) p.weights[position] = weight;
  }
}

}  // namespace xen_moe
