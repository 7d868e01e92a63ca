// Where every received row goes: counts per local expert and positions, by prefix sums over (source, token, slot).
//
// A segment is `segment_tokens` tokens of one source. Three steps:
//   count   a warp per segment: rows per expert, and each row's number among the segment's rows of that expert
//   scan    a warp per expert: exclusive prefix over the segments; totals per expert and per (source, expert)
//   start   every block: first row of each expert's group (in shared memory)
// A row's position is start[expert] + prefix[expert][segment] + number. The resident blocks claim segments and experts.
// Who waits for whom: a block that finds no item to claim waits until all claimed items are done, hence only for
// running blocks; through two counters with GPU-scope release and acquire. The metadata itself comes with system-scope
// flags (dispatch.cuh).
#pragma once

#include "cuda_kernels/core/claims.cuh"
#include "cuda_kernels/core/routing.cuh"
#include "cuda_kernels/dispatch/layout_plan.h"

namespace xen_moe::XEN_MOE_VARIANT {

// Returns the column of a segment's entry: its local expert; in the ranked layout, 0 for a token with any expert here.
// -1: no row here.
__device__ __forceinline__ int ColumnOf(const int* idx, int entry, const Routing& r) {
  if (r.layout != Layout::kRanked) return LocalExpert(idx[entry], r);
  int column = -1;
  for (int k = 0; k < r.top_k; ++k) {
    if (LocalExpert(idx[entry * r.top_k + k], r) >= 0) column = 0;
  }
  return column;
}

__device__ __forceinline__ void CountSegment(const DispatchParams& p, const Running& run, int segment,
                                             const LayoutScratch& scratch, int* counters) {
  const Routing& r = p.routing;
  const Schedule& schedule = p.schedule;
  const int lane = threadIdx.x & 31;
  const int source = segment / scratch.segments_per_source;
  const int* topk = OfSource(p.topk_idx, run.data[r.rank], p.staging.topk_idx, r, source);
  const bool moves = Holds(run.active, source);
  const int first = (segment % scratch.segments_per_source) * schedule.segment_tokens;
  const int tokens = min(schedule.segment_tokens, r.tokens - first);
  for (int l = lane; l < scratch.columns; l += 32) counters[l] = 0;
  __syncwarp();
  const int entries = tokens * r.slots;
  int* number = scratch.number + (static_cast<int64_t>(source) * r.tokens + first) * r.slots;
  const int* idx = topk + static_cast<int64_t>(first) * r.top_k;
  constexpr int kAhead = 4;  // groups of 32 entries that are read together
  for (int first_entry = 0; first_entry < entries; first_entry += 32 * kAhead) {
    int columns[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int entry = first_entry + i * 32 + lane;
      columns[i] = moves && entry < entries ? ColumnOf(idx, entry, r) : -1;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int entry = first_entry + i * 32 + lane, column = columns[i];
      if (first_entry + i * 32 >= entries) break;
      const uint32_t same = __match_any_sync(0xFFFFFFFFu, column);
      const int before = __popc(same & ((1u << lane) - 1));
      const int seen = column >= 0 ? counters[column] : 0;
      __syncwarp();
      if (column >= 0 && before == 0) counters[column] = seen + __popc(same);
      __syncwarp();
      if (entry < entries) number[entry] = column >= 0 ? seen + before : -1;
    }
  }
  for (int l = lane; l < scratch.columns; l += 32) {
    scratch.prefix[static_cast<int64_t>(l) * scratch.segments + segment] = counters[l];
  }
  __syncwarp();
}

__device__ __forceinline__ void ScanColumn(int column, const LayoutScratch& scratch, const Routing& r,
                                           int* recv_counts) {
  const int lane = threadIdx.x & 31;
  int* values = scratch.prefix + static_cast<int64_t>(column) * scratch.segments;
  int carry = 0;
  for (int source = 0; source < r.ranks; ++source) {
    const int begin = carry;
    for (int base = 0; base < scratch.segments_per_source; base += 32) {
      const int i = base + lane;
      int* at = values + source * scratch.segments_per_source + i;
      const int value = i < scratch.segments_per_source ? *at : 0;
      int sum = value;
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) {
        const int other = __shfl_up_sync(0xFFFFFFFFu, sum, d);
        if (lane >= d) sum += other;
      }
      if (i < scratch.segments_per_source) *at = carry + sum - value;
      carry += __shfl_sync(0xFFFFFFFFu, sum, 31);
    }
    if (lane == 0 && recv_counts) recv_counts[source * r.local_experts + column] = carry - begin;
  }
  if (lane == 0) scratch.totals[column] = carry;
}

// Counts and scans, together with the other blocks. `await()` waits for the metadata of all sources. Returns false if
// the group has failed.
template <class Await>
__device__ __forceinline__ bool CountAndScan(const DispatchParams& p, const Running& run, const LayoutScratch& scratch,
                                             int* shared, Await await) {
  const Routing& r = p.routing;
  Control* const control = run.control;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const int counting_warps = min(kWarps, kLayoutSharedBytes / (4 * scratch.columns));
  int done = 0;
  for (;;) {
    const int first = BlockClaim(&control->claimed[static_cast<int>(Work::kSegments)], counting_warps);
    if (first >= scratch.segments) break;
    if (done == 0 && !await()) return false;
    const int segment = first + warp;
    if (warp < counting_warps && segment < scratch.segments) {
      CountSegment(p, run, segment, scratch, shared + warp * scratch.columns);
    }
    done += min(counting_warps, scratch.segments - first);
  }
  BlockComplete(&control->completed[0], done);
  if (!BlockAwait(&control->completed[0], scratch.segments, run)) return false;
  done = 0;
  for (;;) {
    const int first = BlockClaim(&control->claimed[static_cast<int>(Work::kColumns)], kWarps);
    if (first >= r.local_experts) break;
    const int column = first + warp;
    if (column < scratch.columns) {
      ScanColumn(column, scratch, r, p.recv_counts);
    } else if (column < r.local_experts) {
      for (int source = lane; source < r.ranks; source += 32) p.recv_counts[source * r.local_experts + column] = 0;
    }
    done += min(kWarps, r.local_experts - first);
  }
  BlockComplete(&control->completed[1], done);
  return BlockAwait(&control->completed[1], r.local_experts, run);
}

// Counts and scans as CountAndScan does, but by one block for itself, in shared memory. `write`: the block also writes
// recv_counts.
__device__ __forceinline__ void CountAlone(const DispatchParams& p, const Running& run, const LayoutScratch& scratch,
                                           int* counters, bool write) {
  const Routing& r = p.routing;
  const int warp = threadIdx.x / 32;
  for (int segment = warp; segment < scratch.segments; segment += kWarps) {
    CountSegment(p, run, segment, scratch, counters + warp * scratch.columns);
  }
  __syncthreads();
  for (int column = warp; column < scratch.columns; column += kWarps) {
    ScanColumn(column, scratch, r, write ? p.recv_counts : nullptr);
  }
  if (write) {
    for (int i = threadIdx.x; i < r.ranks * (r.local_experts - scratch.columns); i += kThreads) {
      const int rest = r.local_experts - scratch.columns;
      p.recv_counts[i / rest * r.local_experts + scratch.columns + i % rest] = 0;
    }
  }
  __syncthreads();
}

// Returns the sum, or the largest int if it is larger: counts from a handle may be any number.
__device__ __forceinline__ int AddSaturated(int x, int y) {
  return static_cast<int>(min(static_cast<uint32_t>(x) + static_cast<uint32_t>(y), 0x7FFFFFFFu));
}
// Neither argument is negative, so no sum exceeds 32 bits; a 64-bit division would be a function call.
__device__ __forceinline__ int RoundUp(int x, int multiple) {
  if (multiple == 1) return x;
  const uint32_t most = static_cast<uint32_t>(x) + static_cast<uint32_t>(multiple - 1);
  return static_cast<int>(min(most - most % static_cast<uint32_t>(multiple), 0x7FFFFFFFu));
}

// Returns the rows of local expert `l`, before dropping. Not negative.
__device__ __forceinline__ int ExpertRows(const DispatchParams& p, const LayoutScratch& scratch, int l) {
  if (!p.known_positions) return scratch.totals[l];
  int total = 0;
  for (int source = 0; source < p.routing.ranks; ++source) {
    total = AddSaturated(total, max(0, p.recv_counts[source * p.routing.local_experts + l]));
  }
  return total;
}

// Writes the first row of each column's group into `starts` (shared). `rows(l)`: the rows of a column, before dropping.
// All threads of the block call it.
template <class Rows>
__device__ __forceinline__ void StartGroups(const Routing& r, int columns, int* starts, Rows rows) {
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    int carry = 0;
#pragma unroll 1
    for (int base = 0; base < columns; base += 32) {
      const int l = base + lane;
      const int size = r.layout == Layout::kGrouped && l < columns ? RoundUp(rows(l), r.alignment) : 0;
      int sum = size;
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) {
        const int other = __shfl_up_sync(0xFFFFFFFFu, sum, d);
        if (lane >= d) sum = AddSaturated(sum, other);
      }
      const int before = __shfl_up_sync(0xFFFFFFFFu, sum, 1);
      if (l < columns) {
        starts[l] = r.layout == Layout::kPadded ? l * r.ranks * r.tokens : AddSaturated(carry, lane ? before : 0);
      }
      carry = AddSaturated(carry, __shfl_sync(0xFFFFFFFFu, sum, 31));
    }
  }
  __syncthreads();
}
__device__ __forceinline__ void ComputeStarts(const DispatchParams& p, const LayoutScratch& scratch, int* starts) {
  StartGroups(p.routing, scratch.columns, starts, [&](int l) { return ExpertRows(p, scratch, l); });
}

// Returns the position of the row of (source, token, slot), -1 or -2, from the blocks' counts.
__device__ __forceinline__ int PositionOf(const DispatchParams& p, const LayoutScratch& scratch, const int* starts,
                                          int source, int token, int slot, int expert) {
  const Routing& r = p.routing;
  const int number = scratch.number[(static_cast<int64_t>(source) * r.tokens + token) * r.slots + slot];
  if (number < 0) return -1;
  const int column = r.layout == Layout::kRanked ? 0 : LocalExpert(expert, r);
  if (column < 0) return -1;
  const int segment = source * scratch.segments_per_source + token / p.schedule.segment_tokens;
  const int in_group = number + scratch.prefix[static_cast<int64_t>(column) * scratch.segments + segment];
  if (r.layout == Layout::kPadded && in_group >= r.ranks * r.tokens) return -2;
  const int position = AddSaturated(starts[column], in_group);
  return position < r.capacity ? position : -2;
}

}  // namespace xen_moe::XEN_MOE_VARIANT
