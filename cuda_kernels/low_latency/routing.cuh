// The routing of a low-latency dispatch: which blocks take part, how rows are numbered, and the messages that carry it.
//
// A rank's message to another rank: `count_lines` lines with its rows per local expert of the other rank, then a line
// per token with a word for every slot: number << 16 | local expert + 1, and the slot's weight. The number is the row's
// number among the rows that this rank sends to that expert (ranked layout: to that rank); with the counts of the
// sources before and the groups' starts it determines the position. low_latency/dispatch.cu says who waits for whom.
#pragma once

#include "cuda_kernels/dispatch/layout.cuh"
#include "cuda_kernels/low_latency/low_latency.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

// The operation as a block sees it. `shared`: the block's dynamic shared memory.
struct Plan {
  const DispatchParams& p;
  const LowLatencySchedule& schedule;
  const Running& run;
  char* shared;
  SharedPlan at;
  int receiver;  // this block's number among the receivers, or negative

  __device__ __forceinline__ Plan(const DispatchParams& params, const LowLatencySchedule& low_latency,
                                  const Running& running, char* dynamic)
      : Plan(params, low_latency, running, dynamic, PlanShared(params.routing)) {}
  __device__ __forceinline__ Plan(const DispatchParams& params, const LowLatencySchedule& low_latency,
                                  const Running& running, char* dynamic, const SharedPlan& places)
      : p(params), schedule(low_latency), run(running), shared(dynamic), at(places) {
    receiver = static_cast<int>(blockIdx.x) - (static_cast<int>(gridDim.x) - schedule.receivers);
  }
  __device__ __forceinline__ int Lines(int round) const {
    return round == p.staging.row_rounds - 1 ? schedule.last_lines : kRoundLines;
  }
  __device__ __forceinline__ int Shares() const { return schedule.routing + schedule.push; }
  template <class T>
  __device__ __forceinline__ T* In(uint32_t offset) const {
    return reinterpret_cast<T*>(shared + offset);
  }
  // Places in a half: a line of the message of `source`, and a round of its token's row.
  __device__ __forceinline__ uint64_t MessageAt(int source, int line) const {
    return run.line_border +
           static_cast<uint64_t>(source * (p.staging.count_lines + p.routing.tokens) + line) * kLineBytes;
  }
  __device__ __forceinline__ uint64_t RowAt(int source, int token, int round) const {
    const uint32_t row = source * p.routing.tokens + token;
    return run.line_border + p.staging.row_lines * kLineBytes +
           static_cast<uint64_t>(row * p.staging.row_rounds + round) * kRoundBytes;
  }
};

// Column of entry `i`, or -1. Ranked: entries are (token, rank), of the ranks that own any of the token's experts.
__device__ __forceinline__ int ColumnOfEntry(const Plan& plan, int i) {
  const Routing& r = plan.p.routing;
  const int16_t* experts = plan.In<int16_t>(plan.at.experts);
  if (r.layout != Layout::kRanked) return experts[i];
  const int token = i / r.ranks, rank = i - token * r.ranks;
  bool here = false;
#pragma unroll 1
  for (int k = 0; k < r.top_k; ++k) {
    const int local = experts[token * r.top_k + k] - rank * r.local_experts;
    here |= local >= 0 && local < r.local_experts;
  }
  return here ? rank : -1;
}

// A barrier of all warps but the first.
__device__ __forceinline__ void SyncNumbering() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads - 32) : "memory"); }

// All warps but the first, which finds the epoch meanwhile: load the routing, and number the rows of each column,
// including those of inactive ranks, to which nothing is sent. A __syncthreads must follow.
__device__ __forceinline__ void NumberRows(const Plan& plan) {
  constexpr int kThreadsHere = kThreads - 32, kWarpsHere = kWarps - 1;
  const Routing& r = plan.p.routing;
  const int thread = static_cast<int>(threadIdx.x) - 32, warp = thread / 32, lane = threadIdx.x & 31;
  const int columns = plan.at.columns, slots = r.tokens * r.top_k;
  int16_t* experts = plan.In<int16_t>(plan.at.experts);
  float* weights = plan.In<float>(plan.at.weights);
#pragma unroll 1
  for (int i = thread; i < slots; i += kThreadsHere) {
    const int expert = plan.p.topk_idx[i];
    const float weight = plan.p.topk_weights[i];
    experts[i] = expert >= 0 && expert < r.experts ? static_cast<int16_t>(expert) : int16_t{-1};
    weights[i] = weight;
  }
  uint16_t* numbers = plan.In<uint16_t>(plan.at.numbers);
  uint16_t* before = plan.In<uint16_t>(plan.at.before);
  uint16_t* mine = before + warp * columns;
#pragma unroll 1
  for (int i = lane; i < columns; i += 32) mine[i] = 0;
  SyncNumbering();
  const int each = ((plan.at.entries + kWarpsHere - 1) / kWarpsHere + 31) / 32 * 32;
  const int end = min(plan.at.entries, (warp + 1) * each);
#pragma unroll 1
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
  SyncNumbering();
#pragma unroll 1
  for (int column = thread; column < columns; column += kThreadsHere) {
    int rows[kWarpsHere], sum = 0;
#pragma unroll
    for (int w = 0; w < kWarpsHere; ++w) rows[w] = before[w * columns + column];
#pragma unroll
    for (int w = 0; w < kWarpsHere; ++w) {
      before[w * columns + column] = static_cast<uint16_t>(sum);
      sum += rows[w];
    }
    plan.In<int>(plan.at.totals)[column] = sum;
  }
  SyncNumbering();
#pragma unroll 1
  for (int entry = warp * each + lane; entry < end; entry += 32) {
    const int column = ColumnOfEntry(plan, entry);
    if (column >= 0) numbers[entry] = static_cast<uint16_t>(numbers[entry] + mine[column]);
  }
}

// Returns a slot's word for rank `to`: number << 16 | local expert + 1, or 0 if the slot is not for that rank.
__device__ __forceinline__ uint32_t SlotWord(const Plan& plan, int to, int token, int slot) {
  const Routing& r = plan.p.routing;
  if (slot >= r.top_k) return 0;
  const int entry = token * r.top_k + slot;
  const int expert = plan.In<int16_t>(plan.at.experts)[entry], local = expert - to * r.local_experts;
  if (expert < 0 || local < 0 || local >= r.local_experts) return 0;
  const bool ranked = r.layout == Layout::kRanked;
  const uint32_t number = plan.In<uint16_t>(plan.at.numbers)[ranked ? token * r.ranks + to : entry];
  return number << 16 | static_cast<uint32_t>(local + 1);
}

// Sends share `share` of all messages; the block has numbered the rows.
__device__ __forceinline__ void SendRouting(const Plan& plan, const Piece& piece, int share) {
  const Routing& r = plan.p.routing;
  const int warp = threadIdx.x / 32, q = threadIdx.x & 7;
  const int lines = plan.p.staging.count_lines + r.tokens, groups = (lines + kRoundLines - 1) / kRoundLines;
  const int warps = plan.schedule.routing * kWarps;
#pragma unroll 1
  for (int item = share * kWarps + warp; item < groups * r.ranks; item += warps) {
    const int group = item / r.ranks;  // the counts of all ranks come first: everything waits for them
    int to = r.rank + 1 + item - group * r.ranks;
    if (to >= r.ranks) to -= r.ranks;
    if (!Holds(plan.run.active, to)) continue;
    const int first = group * kRoundLines, line = first + piece.line;
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
    StoreRound(plan.run.half[to] + plan.MessageAt(r.rank, first), piece, v, min(kRoundLines, lines - first),
               plan.run.epoch);
  }
  if (plan.p.clean_topk_idx) {
    const int16_t* experts = plan.In<int16_t>(plan.at.experts);
#pragma unroll 1
    for (int i = share * kThreads + threadIdx.x; i < r.tokens * r.top_k; i += plan.schedule.routing * kThreads) {
      const int expert = experts[i];
      const bool moves = expert >= 0 && Holds(plan.run.active, plan.schedule.by_local_experts(expert));
      plan.p.clean_topk_idx[i] = moves ? expert : -1;
    }
  }
}

// All threads of the block: replaces the counts of all sources by the rows of the sources before, and computes the rows
// of all sources. One block writes them into the result.
__device__ __forceinline__ void SumCounts(const Plan& plan) {
  const Routing& r = plan.p.routing;
  const int local = plan.at.local;
  const bool writes = plan.receiver == 0;
  int* counts = plan.In<int>(plan.at.counts);
#pragma unroll 1
  for (int l = threadIdx.x; l < local; l += kThreads) {
    int sum = 0;
    constexpr int kAtOnce = 4;  // sources whose counts are loaded together
#pragma unroll 1
    for (int first = 0; first < r.ranks; first += kAtOnce) {
      int rows[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) rows[i] = first + i < r.ranks ? counts[(first + i) * local + l] : 0;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i >= r.ranks) break;
        counts[(first + i) * local + l] = sum;
        sum = AddSaturated(sum, rows[i]);
        if (writes) plan.p.recv_counts[(first + i) * r.local_experts + l] = rows[i];
      }
    }
    plan.In<int>(plan.at.groups)[l] = sum;
  }
  if (writes && local < r.local_experts) {
    const int rest = r.local_experts - local;
#pragma unroll 1
    for (int i = threadIdx.x; i < r.ranks * rest; i += kThreads) {
      plan.p.recv_counts[i / rest * r.local_experts + local + i % rest] = 0;
    }
  }
}

// All threads of the block: receive the counts of all sources. `adopt()` does the shares that no block has started,
// before the first long wait. `far`: has the counts of ranks of other nodes (node/low_latency_dispatch.cuh). Returns
// false if the group has failed.
template <class Adopt, class Far = SingleNode>
__device__ __forceinline__ bool ReceiveCounts(const Plan& plan, const Piece& piece, Adopt adopt,
                                              const Far& far = Far()) {
  const Routing& r = plan.p.routing;
  const int warp = threadIdx.x / 32, q = threadIdx.x & 7, local = plan.at.local;
  const int per_source = plan.p.staging.count_lines, lines = r.ranks * per_source, most = r.tokens * r.top_k;
  int* counts = plan.In<int>(plan.at.counts);
  for (bool patient = false;; patient = true) {  // the first wait is short
    bool idle = false, good = true;
#pragma unroll 1
    for (int first = warp * kRoundLines; good && first < max(lines, (warp + 1) * kRoundLines);
         first += kWarps * kRoundLines) {
      const int line = first + piece.line, source = static_cast<int>(plan.schedule.by_count_lines(line)),
                begin = line - source * per_source;
      const bool active = line < lines && Holds(plan.run.active, source);
      const char* from = plan.run.half[r.rank] + plan.MessageAt(source, begin);
      uint4 v;
      auto missing = [&] {
        v = LoadLinePart(from, q, active);
        if (static_cast<int>(threadIdx.x) < plan.Shares()) {
          idle = LoadRelaxedGpu(&plan.run.control->started[threadIdx.x]) != plan.run.epoch;
        }
        return __ballot_sync(0xFFFFFFFFu, active && piece.flags && v.w != plan.run.epoch);
      };
      auto source_of = [&](uint32_t mask) { return (first + (__ffs(mask) - 1) / 8) / per_source; };
      good = AwaitLines(missing, source_of, [&] { return !patient; }, plan.run, Step::kMetadata);
      const uint32_t values[4] = {v.x, v.y, v.z, v.w};
      if (line < lines) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = begin * kLineCounts + q * 4 + i;
          if (at >= local || (piece.flags && i > 1)) continue;
          counts[source * local + at] = active ? static_cast<int>(min(values[i], static_cast<uint32_t>(most))) : 0;
        }
      }
    }
    if (!__syncthreads_or(patient ? !good : idle || !good)) break;
    if (patient) return false;
    adopt();
  }
  if constexpr (Far::kAny) {
    if (!far.ReceiveCounts()) return false;
  }
  SumCounts(plan);
  __syncthreads();
  return true;
}

// Returns lane k's position of slot k of a (source, token) whose slot word is `word`: -1, -2 or a row.
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

// Writes slot k's row of a (source, token), which lane k holds, and its weight into the results. Not for the ranked
// layout.
__device__ __forceinline__ void WriteSlots(const Plan& plan, int source, int token, int own, float weight, bool write) {
  const Routing& r = plan.p.routing;
  const int lane = threadIdx.x & 31;
  if (!write || lane >= r.top_k) return;
  plan.p.positions[(static_cast<int64_t>(source) * r.tokens + token) * r.slots + lane] = own;
  if (own >= 0) plan.p.weights[own] = weight;
}

// Returns the positions of a (source, token); lane k holds slot k's word and weight. Lane k gets slot k's row (ranked
// layout: lane 0 gets the only row), or a negative number. `write`: also writes them into the results. All lanes call
// it.
__device__ __forceinline__ int ResolveSlots(const Plan& plan, int source, int token, uint32_t word, float weight,
                                            bool write) {
  const DispatchParams& p = plan.p;
  const Routing& r = p.routing;
  const int lane = threadIdx.x & 31;
  int own = Position(plan, source, word);
  if (r.layout != Layout::kRanked) {
    WriteSlots(plan, source, token, own, weight, write);
    return own;
  }
  // One row, for all slots that want it.
  const uint32_t here = __ballot_sync(0xFFFFFFFFu, own != -1);
  const int row = here ? __shfl_sync(0xFFFFFFFFu, own, __ffs(here) - 1) : -1;
  if (write && lane == 0) p.positions[static_cast<int64_t>(source) * r.tokens + token] = row;
  if (write && row >= 0 && lane < r.top_k) {
    const int64_t at = static_cast<int64_t>(row) * r.top_k + lane;
    p.local_idx[at] = static_cast<int>(word & 0xFFFF) - 1;
    p.weights[at] = word ? weight : 0.0f;
  }
  return lane == 0 ? row : -1;
}

// ResolveSlots from the token's line, once it has arrived. Returns false if the group has failed.
__device__ __forceinline__ bool ResolveRows(const Plan& plan, const Piece& piece, int source, int token, bool write,
                                            int* position) {
  const DispatchParams& p = plan.p;
  const Routing& r = p.routing;
  const int lane = threadIdx.x & 31;
  uint4 slots = make_uint4(0, 0, 0, 0);
  if (Holds(plan.run.active, source)) {
    const char* line = plan.run.half[r.rank] + plan.MessageAt(source, p.staging.count_lines + token);
    const bool good = AwaitLines(
        [&] {
          slots = LoadLinePart(line, lane & 7);
          return __ballot_sync(0xFFFFFFFFu, piece.flags && slots.w != plan.run.epoch);
        },
        [&](uint32_t) { return source; }, [] { return false; }, plan.run, Step::kMetadata);
    if (!good) return false;
  }
  const uint32_t low = __shfl_sync(0xFFFFFFFFu, slots.x, lane / 2), high = __shfl_sync(0xFFFFFFFFu, slots.z, lane / 2);
  const uint32_t low_weight = __shfl_sync(0xFFFFFFFFu, slots.y, lane / 2);
  const uint32_t high_weight = __shfl_sync(0xFFFFFFFFu, slots.w, lane / 2);
  const uint32_t word = lane >= r.top_k ? 0 : lane & 1 ? high : low;
  const float weight = __uint_as_float(lane & 1 ? high_weight : low_weight);
  *position = ResolveSlots(plan, source, token, word, weight, write);
  return true;
}

}  // namespace xen_moe::XEN_MOE_VARIANT
