// Where every received row goes if the senders number their rows: each rank counts its own slots alone.
//
// A row's number is that among its source's rows for its expert, in the order of tokens and slots. A word of the
// routing holds a slot's expert and its row's number. Three steps:
//   number  each block with a share of the routing counts all slots in front of its share in shared memory, numbers its
//           own slots, and sends their words; the block with the last share knows all counts then, and sends each rank
//           those for its experts
//   bases   every block, when the counts of all sources are there: the first row of each source and expert
//   place   a row's position is bases[source][expert] + number
// No block waits for another block's counts, and the routing of other ranks is awaited only when their rows are placed.
// Who does it: Send (dispatch.cuh); a share may be repeated. Memory order: as for the routing that receivers number.
#pragma once

#include "cuda_kernels/dispatch/layout.cuh"
#include "cuda_kernels/dispatch/numbers_plan.h"

namespace xen_moe::XEN_MOE_VARIANT {

constexpr int kNumbersAtOnce = 1024;                     // slots that a block numbers before it sends their words
constexpr int kMostColumns = kMaxExperts + kSmallGroup;  // R * L; experts need not be a multiple of R
static_assert(4 * (2 * kMostColumns + kNumbersAtOnce) <= kLayoutSharedBytes, "counters and numbers");

__device__ __forceinline__ int WordOf(int expert, int number) { return number << kExpertBits | expert; }

// Returns whether `scratch` has what ComputeBases makes: `number` [T, slots] are the words of this rank, and `prefix`
// [R, L], in shared memory, is the first row of each source and expert.
__device__ __forceinline__ bool HasBases(const LayoutScratch& scratch) { return scratch.segments == 0; }

// Returns the [T, K] routing of source `s`: words, or experts where receivers number rows. The words of an inactive
// source may be anything.
__device__ __forceinline__ const int* RoutingOf(const DispatchParams& p, const LayoutScratch& scratch, const char* data,
                                                int s) {
  return OfSource(HasBases(scratch) ? scratch.number : p.topk_idx, data, p.staging.topk_idx, p.routing, s);
}

// Returns the position of the row of (source, token, slot), -1 or -2. `entry`: of the routing, a word or an expert.
__device__ __forceinline__ int PlaceOf(const DispatchParams& p, const LayoutScratch& scratch, const int* starts,
                                       int source, int token, int slot, int entry) {
  const Routing& r = p.routing;
  if (!HasBases(scratch)) return PositionOf(p, scratch, starts, source, token, slot, entry);
  const int column = entry >= 0 ? LocalExpert(entry & ((1 << kExpertBits) - 1), r) : -1;
  if (column < 0) return -1;
  const int base = scratch.prefix[source * scratch.columns + column], number = entry >> kExpertBits;
  if (base < 0) return -1;
  if (r.layout == Layout::kPadded && base - starts[column] + number >= r.ranks * r.tokens) return -2;
  const int position = AddSaturated(base, number);
  return position < r.capacity ? position : -2;
}

// Adds the number of each expert's rows in the first `slots` slots to `counts`. All warps of a block but the last
// one call it.
__device__ __forceinline__ void CountSlots(const DispatchParams& p, int slots, int* counts) {
  constexpr int kAhead = 8, kCounting = kThreads - 32;
  const int4* const experts = reinterpret_cast<const int4*>(p.topk_idx);
  auto add = [&](int expert) {
    if (expert >= 0 && expert < p.routing.experts) atomicAdd(counts + expert, 1);
  };
  for (int base = threadIdx.x; base < slots / 4; base += kAhead * kCounting) {
    int4 loaded[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = base + i * kCounting;
      loaded[i] = at < slots / 4 ? experts[at] : make_int4(-1, -1, -1, -1);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) add(loaded[i].x), add(loaded[i].y), add(loaded[i].z), add(loaded[i].w);
  }
  const int last = slots / 4 * 4 + static_cast<int>(threadIdx.x);
  if (last < slots) add(p.topk_idx[last]);
}

// Continues the counts with the slots from `first` to `end`, and writes each slot's number into `numbers`. One warp of
// a block calls it.
__device__ __forceinline__ void NumberSlots(const DispatchParams& p, int first, int end, int* counts, int* numbers) {
  constexpr int kAhead = 4;
  const int lane = threadIdx.x & 31;
  for (int base = first; base < end; base += 32 * kAhead) {
    int experts[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int slot = base + i * 32 + lane;
      experts[i] = slot < end ? p.topk_idx[slot] : -1;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int slot = base + i * 32 + lane, expert = experts[i];
      if (base + i * 32 >= end) break;
      const bool real = expert >= 0 && expert < p.routing.experts;
      const uint32_t same = __match_any_sync(0xFFFFFFFFu, real ? expert : -1);
      const int before = __popc(same & ((1u << lane) - 1));
      const int seen = real ? counts[expert] : 0;
      __syncwarp();
      if (real && before == 0) counts[expert] = seen + __popc(same);
      __syncwarp();
      if (slot < end) numbers[slot - first] = seen + before;
    }
  }
}

// Numbers slice `slice` of this rank's slots, sends words and weights to every peer, and writes its share of the clean
// indices. The last slice has this rank's counts with it. All threads of the block call it.
static __device__ __noinline__ void SendNumbers(const DispatchParams& p, const Running& run, int* shared, int slice) {
  const Routing& r = p.routing;
  const int slots = r.tokens * r.top_k, slices = p.schedule.layout_blocks, columns = r.ranks * r.local_experts;
  const int each = ((slots + slices - 1) / slices + 3) / 4 * 4;
  const int first = min(slots, slice * each), end = min(slots, first + each);
  int *const before = shared, *const here = before + columns, *const numbers = here + columns;
  int* const own = MakeScratch(run.scratch, r, p.schedule).number;
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * columns; i += kThreads) shared[i] = 0;
  for (int at = first; at == first || at < end; at += kNumbersAtOnce) {
    const int last = min(end, at + kNumbersAtOnce);
    __syncthreads();
    if (threadIdx.x / 32 == kWarps - 1) {
      NumberSlots(p, at, last, here, numbers);
    } else if (at == first) {
      CountSlots(p, first, before);
    }
    __syncthreads();
    for (int i = at + static_cast<int>(threadIdx.x); i < last; i += kThreads) {
      const int expert = p.topk_idx[i];
      const float weight = p.topk_weights[i];
      const bool moves = expert >= 0 && expert < r.experts && Holds(run.active, expert / r.local_experts);
      const int word = moves ? WordOf(expert, before[expert] + numbers[i - at]) : -1;
      if (p.clean_topk_idx) p.clean_topk_idx[i] = moves ? expert : -1;
      own[i] = word;
      for (int n = 1; n < r.ranks; ++n) {
        const int peer = (r.rank + n) % r.ranks;
        if (!Holds(run.meets, peer)) continue;
        char* data = run.data[peer];
        const int64_t to = static_cast<int64_t>(r.rank) * slots + i;
        reinterpret_cast<int*>(data + p.staging.topk_idx)[to] = word;
        reinterpret_cast<float*>(data + p.staging.topk_weights)[to] = weight;
      }
    }
  }
  if (slice != slices - 1) return;
  for (int i = threadIdx.x; i < columns; i += kThreads) {
    const int rank = i / r.local_experts, column = i % r.local_experts;
    if (!Holds(run.meets, rank)) continue;
    int* const counts = reinterpret_cast<int*>(run.data[rank] + NumberedCounts(r, p.staging));
    counts[r.rank * r.local_experts + column] = before[i] + here[i];
  }
}

// Computes the first row of each source and expert in shared memory, from the counts that have arrived; -1: the source
// is inactive. All threads of the block call it. `write`: the block also writes recv_counts.
__device__ __forceinline__ void ComputeBases(const DispatchParams& p, const Running& run, int* shared,
                                             LayoutScratch& scratch, int** starts, bool write) {
  const Routing& r = p.routing;
  const int columns = r.local_experts, all = r.ranks * columns;
  const int* const counts = reinterpret_cast<const int*>(run.data[r.rank] + NumberedCounts(r, p.staging));
  int* const bases = shared;
  scratch.prefix = bases;
  scratch.segments = 0;
  scratch.totals = bases + all;
  *starts = scratch.totals + columns;
  for (int i = threadIdx.x; i < all; i += kThreads) {
    const int rows = Holds(run.active, i / columns) ? min(max(counts[i], 0), r.tokens * r.top_k) : 0;
    if (write) p.recv_counts[i] = rows;
    bases[i] = rows;
  }
  __syncthreads();
  for (int l = threadIdx.x; l < columns; l += kThreads) {
    int before = 0;
    for (int i = l; i < all; i += columns) {
      const int rows = bases[i];
      bases[i] = before;
      before += rows;
    }
    scratch.totals[l] = before;
  }
  __syncthreads();
  ComputeStarts(p, scratch, *starts);
  for (int i = threadIdx.x; i < all; i += kThreads) {
    bases[i] = Holds(run.active, i / columns) ? AddSaturated((*starts)[i % columns], bases[i]) : -1;
  }
  __syncthreads();
}

}  // namespace xen_moe::XEN_MOE_VARIANT
