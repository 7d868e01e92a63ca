// Dispatch of tokens' numbers on the only rank of a group (core/alone.h): one wave of blocks, none of which waits for
// another.
//
// Each thread places the row of one slot. Each block counts every expert's rows by itself, and keeps two counts: of the
// slots in front of the block's own slots, and of all others. For 4096 tokens with 8 slots it reads 128 KiB of indices
// from the L2 cache, and makes an addition in shared memory for each index. That takes less time than a wait for the
// counts of other blocks and a sum over these. Integers are added, so that the order of additions does not matter.
#pragma once

#include "cuda_kernels/core/alone.h"
#include "cuda_kernels/dispatch/dispatch.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

// Adds the number of each expert's rows to `before` for the slots in front of slot `first`, a multiple of 4, and to
// `counts` for slot `first` and all slots behind it. All threads of the block call it.
__device__ __forceinline__ void CountEverySlot(const DispatchParams& p, int first, int* before, int* counts) {
  const Routing& r = p.routing;
  auto add = [&](int* to, int expert) {
    const int column = LocalExpert(expert, r);
    if (column >= 0) atomicAdd(to + column, 1);
  };
  constexpr int kAhead = 4;
  const int slots = r.tokens * r.top_k, vectors = slots / 4;
  const int4* experts = reinterpret_cast<const int4*>(p.topk_idx);
  for (int base = threadIdx.x; base < vectors; base += kAhead * kThreads) {
    int4 loaded[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = base + i * kThreads;
      loaded[i] = at < vectors ? experts[at] : make_int4(-1, -1, -1, -1);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      int* const to = 4 * (base + i * kThreads) < first ? before : counts;
      add(to, loaded[i].x), add(to, loaded[i].y), add(to, loaded[i].z), add(to, loaded[i].w);
    }
  }
  const int last = 4 * vectors + static_cast<int>(threadIdx.x);
  if (last < slots) add(last < first ? before : counts, p.topk_idx[last]);
}

static __global__ void __launch_bounds__(kThreads) AloneDispatchKernel(const __grid_constant__ DispatchParams p) {
  extern __shared__ __align__(128) int dynamic[];
  const Routing& r = p.routing;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, columns = r.local_experts;
  LayoutScratch scratch{};
  scratch.columns = columns;
  scratch.totals = dynamic;
  int* const before = dynamic + columns;
  int* const of_warps = before + columns;  // [kWarps, columns]: rows of each expert in the slots of a warp
  int* const starts = of_warps + kWarps * columns;
  if (threadIdx.x == 0) ShowBegin(p.call);
  const uint64_t failure = LoadRelaxedSystem(&p.call.mailbox->failure);
  const bool moves = p.call.active == nullptr || p.call.active[0];
  const int slots = r.tokens * r.top_k, first = static_cast<int>(blockIdx.x) * kThreads;
  const int slot = first + static_cast<int>(threadIdx.x);
  const int expert = slot < slots ? p.topk_idx[slot] : -1;
  const int column = moves ? LocalExpert(expert, r) : -1;
  for (int i = threadIdx.x; i < (2 + kWarps) * columns; i += kThreads) dynamic[i] = 0;
  if (__syncthreads_or(failure != 0)) return PoisonDispatch(p, blockIdx.x, gridDim.x);
  const uint32_t same = __match_any_sync(0xFFFFFFFFu, column);
  const int ahead = __popc(same & ((1u << lane) - 1));
  if (column >= 0 && ahead == 0) of_warps[warp * columns + column] = __popc(same);
  if (moves) CountEverySlot(p, first, before, scratch.totals);
  __syncthreads();
  for (int i = threadIdx.x; i < columns; i += kThreads) scratch.totals[i] += before[i];
  __syncthreads();
  ComputeStarts(p, scratch, starts);
  if (slot < slots) {
    int position = -1;
    if (column >= 0) {
      int in_group = before[column] + ahead;
      for (int w = 0; w < warp; ++w) in_group += of_warps[w * columns + column];
      position = AddSaturated(starts[column], in_group);
      if (position >= r.capacity || (r.layout == Layout::kPadded && in_group >= r.tokens)) position = -2;
    }
    p.positions[slot] = position;
    if (p.clean_topk_idx) p.clean_topk_idx[slot] = column >= 0 ? expert : -1;
    if (position >= 0) {
      p.weights[position] = p.topk_weights[slot];
      static_cast<int4*>(p.rows)[position] = static_cast<const int4*>(p.x)[slot / r.top_k];
    }
  }
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < columns; i += kThreads) p.recv_counts[i] = scratch.totals[i];
  }
  ZeroPadding(p, scratch, starts, blockIdx.x, gridDim.x);
}

inline int LaunchAloneDispatch(const DispatchParams& p, cudaStream_t stream) {
  if (Unfit(p)) return cudaErrorInvalidValue;
  return Launch(AloneDispatchKernel, AloneBlocks(p.routing), kThreads, AloneSharedBytes(p.routing), stream, p);
}

}  // namespace xen_moe::XEN_MOE_VARIANT
