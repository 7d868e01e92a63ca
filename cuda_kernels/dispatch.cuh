// Dispatch and redispatch in one launch.
//
// What moves: row t of x goes once to every other rank that owns one of its experts, into that rank's staging row
// [this rank][t]; from there to the rows of the output that want it. Own rows go straight from x to the output.
// Who does it: the first `push_blocks` blocks push rows and raise a flag per (source, token, part), the last
// `layout_blocks` blocks exchange the routing metadata and compute positions while rows are in flight; then every block
// places rows, own ones first, each as soon as its flag is up. Who waits for whom: pushing waits for nobody. Counting
// waits for every peer's metadata, placing for this GPU's counting and for the row's flag. All blocks are resident (at
// most one per SM), so every wait ends. Memory order: stores to a peer, __syncwarp or __syncthreads, system-scope
// fence, relaxed flag store; the reader's system-scope acquire of the flag makes them visible. workspace.h says why two
// halves suffice.
#pragma once

#include "layout.cuh"
#include "row_codec.cuh"
#include "signal.cuh"

namespace xen_moe {

struct DispatchShared {
  char* half[kMaxRanks];  // the current half of each rank's staging area: its flags
  char* data[kMaxRanks];  // and its data
  int rows[kWarps][kMaxSlots];
  SignalBox signals;
};

__device__ __forceinline__ uint32_t RowFlagIndex(const DispatchParams& p, int source, int token, int part) {
  return (static_cast<uint32_t>(source) * p.routing.tokens + token) * p.schedule.parts + part;
}
__device__ __forceinline__ uint32_t* PresenceFlag(char* half, const Staging& staging, int source, int block) {
  return reinterpret_cast<uint32_t*>(half + staging.presence_flags) + source * kMaxBlocks + block;
}

template <class Codec>
__device__ __forceinline__ void PushRows(const DispatchParams& p, DispatchShared& shared, uint32_t epoch) {
  const Routing& r = p.routing;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const int first = r.rank + 1 < r.ranks ? r.rank + 1 : 0;
  const int items = r.tokens * p.schedule.parts;
  const bool direct = items <= p.schedule.push_blocks * kWarps;
  Signaller signaller{shared.signals, shared.half, p.staging.row_flags, epoch, direct};
  const int pushing_warps = direct ? kWarps : kSignalWarp;
  if (warp >= pushing_warps) return signaller.Serve();
  for (int item = blockIdx.x + warp * p.schedule.push_blocks; item < items;
       item += p.schedule.push_blocks * pushing_warps) {
    const int token = item / p.schedule.parts, part = item % p.schedule.parts;
    uint32_t ranks = 0;
    for (int k = lane; k < r.top_k; k += 32) {
      const int expert = p.topk_idx[static_cast<int64_t>(token) * r.top_k + k];
      if (expert >= 0 && expert < r.experts) ranks |= 1u << (expert / r.local_experts);
    }
    ranks = __reduce_or_sync(0xFFFFFFFFu, ranks) & ~(1u << r.rank);
    if (ranks == 0) continue;
    const uint32_t rotated = (ranks >> first) | (ranks << (r.ranks - first) & ((1u << r.ranks) - 1));
    const uint64_t row = p.staging.rows + (static_cast<uint64_t>(r.rank) * r.tokens + token) * p.staging.row_bytes;
    Codec::Push(p, token, PartOf(part, p.schedule, r.hidden), Targets{rotated, first, r.ranks, shared.data, row});
    signaller.Raise(ranks, RowFlagIndex(p, r.rank, token, part));
  }
  signaller.Finish();
}

// Sends this rank's topk_idx and topk_weights to every peer, block by block.
__device__ __forceinline__ void SendMetadata(const DispatchParams& p, const DispatchShared& shared, int index,
                                             const Patience& patience) {
  const Routing& r = p.routing;
  const int words = r.tokens * r.top_k, blocks = p.schedule.layout_blocks;
  for (int i = index * kThreads + threadIdx.x; i < words; i += blocks * kThreads) {
    const int expert = p.topk_idx[i];
    const float weight = p.topk_weights[i];
    for (int n = 1; n < r.ranks; ++n) {
      char* data = shared.data[(r.rank + n) % r.ranks];
      const int64_t at = static_cast<int64_t>(r.rank) * words + i;
      reinterpret_cast<int*>(data + p.staging.topk_idx)[at] = expert;
      reinterpret_cast<float*>(data + p.staging.topk_weights)[at] = weight;
    }
  }
  __syncthreads();
  if (threadIdx.x < r.ranks && threadIdx.x != r.rank) {
    __threadfence_system();
    StoreRelaxedSystem(PresenceFlag(shared.half[threadIdx.x], p.staging, r.rank, index), patience.epoch);
  }
}
__device__ __forceinline__ void AwaitMetadata(const DispatchParams& p, const DispatchShared& shared,
                                              const Patience& patience) {
  const Routing& r = p.routing;
  const int blocks = p.schedule.layout_blocks;
  for (int i = threadIdx.x; i < r.ranks * blocks; i += kThreads) {
    const int source = i / blocks;
    if (source == r.rank) continue;
    WaitFlag(PresenceFlag(shared.half[r.rank], p.staging, source, i % blocks), patience, Step::kMetadata, source);
  }
  __syncthreads();
}

// Redispatch has no metadata, but an operation must hear from every rank (workspace.h).
__device__ __forceinline__ void AnnouncePresence(const Routing& r, const Staging& staging, char* const* half,
                                                 uint32_t epoch) {
  if (threadIdx.x < r.ranks && threadIdx.x != r.rank) {
    StoreRelaxedSystem(PresenceFlag(half[threadIdx.x], staging, r.rank, 0), epoch);
  }
}
__device__ __forceinline__ void AwaitPresence(const Routing& r, const Staging& staging, char* const* half,
                                              const Patience& patience) {
  if (threadIdx.x < r.ranks && threadIdx.x != r.rank) {
    WaitFlag(PresenceFlag(half[r.rank], staging, threadIdx.x, 0), patience, Step::kPresence, threadIdx.x);
  }
}

// Positions of one (source, token) into `list` (those that have a row), and its metadata outputs. All lanes return the
// count.
__device__ __forceinline__ int ResolveRows(const DispatchParams& p, const LayoutScratch& scratch, const int* starts,
                                           const char* data, int source, int token, bool write, int* list) {
  const Routing& r = p.routing;
  const int lane = threadIdx.x & 31;
  const int64_t pair = static_cast<int64_t>(source) * r.tokens + token;
  const int* topk = SourceTopk(p.topk_idx, data, p.staging.topk_idx, r, source) + static_cast<int64_t>(token) * r.top_k;
  int count = 0;
  for (int base = 0; base < r.slots; base += 32) {
    const int slot = base + lane;
    int position = -1;
    if (slot < r.slots) {
      if (p.known_positions) {
        position = p.positions[pair * r.slots + slot];
        if (position >= r.capacity) position = -2;
      } else {
        position = PositionOf(p, scratch, starts, source, token, slot, topk[slot]);
        if (write) p.positions[pair * r.slots + slot] = position;
      }
    }
    const uint32_t placed = __ballot_sync(0xFFFFFFFFu, position >= 0);
    if (position >= 0) list[count + __popc(placed & ((1u << lane) - 1))] = position;
    count += __popc(placed);
    if (position >= 0 && write && !p.known_positions && r.layout != Layout::kRanked) {
      const float* weights = source == r.rank ? p.topk_weights
                                              : reinterpret_cast<const float*>(data + p.staging.topk_weights) +
                                                    static_cast<int64_t>(source) * r.tokens * r.top_k;
      p.weights[position] = weights[static_cast<int64_t>(token) * r.top_k + slot];
    }
  }
  __syncwarp();
  if (count > 0 && write && !p.known_positions && r.layout == Layout::kRanked) {
    const float* weights = source == r.rank ? p.topk_weights
                                            : reinterpret_cast<const float*>(data + p.staging.topk_weights) +
                                                  static_cast<int64_t>(source) * r.tokens * r.top_k;
    for (int k = lane; k < r.top_k; k += 32) {
      const int local = LocalExpert(topk[k], r);
      const int64_t at = static_cast<int64_t>(list[0]) * r.top_k + k;
      p.local_idx[at] = local;
      p.weights[at] = local >= 0 ? weights[static_cast<int64_t>(token) * r.top_k + k] : 0.0f;
    }
  }
  return count;
}

template <class Codec>
__device__ __forceinline__ void PlaceRows(const DispatchParams& p, DispatchShared& shared, const LayoutScratch& scratch,
                                          const int* starts, const Patience& patience) {
  const Routing& r = p.routing;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  char* half = shared.half[r.rank];
  char* data = shared.data[r.rank];
  int* list = shared.rows[warp];
  const int own_items = r.tokens * p.schedule.parts;
  const int items = r.ranks * own_items;
  Claims claims(&p.control->work[0], items, gridDim.x);
  for (int item = claims.First(); item < items; item = claims.Next()) {
    int source = r.rank, token = item / p.schedule.parts;
    const int part = item % p.schedule.parts;
    if (item >= own_items) {  // token by token, the sources interleaved: the order in which rows arrive
      const int pair = token - r.tokens;
      token = pair / (r.ranks - 1);
      source = r.rank + 1 + pair % (r.ranks - 1);
      if (source >= r.ranks) source -= r.ranks;
    }
    __syncwarp();
    const Rows rows{list, ResolveRows(p, scratch, starts, data, source, token, part == 0, list)};
    if (rows.count == 0) continue;
    const Range range = PartOf(part, p.schedule, r.hidden);
    if (source == r.rank) {
      Codec::PlaceOwn(p, token, range, rows);
    } else {
      bool arrived = true;
      if (lane == 0) {
        const uint32_t* flags = reinterpret_cast<const uint32_t*>(half + p.staging.row_flags);
        arrived = WaitFlag(flags + RowFlagIndex(p, source, token, part), patience, Step::kRows, source);
      }
      arrived = __shfl_sync(0xFFFFFFFFu, arrived, 0);
      __syncwarp();  // what one lane has acquired, all lanes may read
      if (!arrived) continue;
      Codec::PlaceStaged(
          p, data + p.staging.rows + (static_cast<uint64_t>(source) * r.tokens + token) * p.staging.row_bytes, range,
          rows);
    }
  }
}

// Rows that round a group up to the alignment are zero, with weight and scale zero.
__device__ __forceinline__ void ZeroPadding(const DispatchParams& p, const LayoutScratch& scratch, const int* starts) {
  const Routing& r = p.routing;
  if (r.layout != Layout::kGrouped || r.alignment == 1) return;
  const int lane = threadIdx.x & 31;
  const int bytes = p.element == Element::kF32 ? 4 : p.element == Element::kByte ? 1 : 2;
  const int64_t row_bytes = static_cast<int64_t>(r.hidden) * bytes;
  const int blocks = (r.hidden + kScaleBlock - 1) / kScaleBlock;
  const int rows_at_most = r.alignment - 1;
  for (int64_t item = blockIdx.x * kWarps + threadIdx.x / 32;
       item < static_cast<int64_t>(r.local_experts) * rows_at_most; item += gridDim.x * kWarps) {
    const int l = static_cast<int>(item / rows_at_most), i = static_cast<int>(item % rows_at_most);
    const int real = ExpertRows(p, scratch, l);
    const int64_t row = starts[l] + static_cast<int64_t>(real) + i;
    if (real + i >= RoundUp(real, r.alignment) || row >= r.capacity) continue;
    char* at = static_cast<char*>(p.rows) + row * row_bytes;
    if (row_bytes % 16 == 0) {
      for (int64_t b = lane; b < row_bytes / 16; b += 32) reinterpret_cast<int4*>(at)[b] = make_int4(0, 0, 0, 0);
    } else {
      for (int64_t b = lane; b < row_bytes; b += 32) at[b] = 0;
    }
    if (p.row_scales) {
      for (int b = lane; b < blocks; b += 32) p.row_scales[row * blocks + b] = 0.0f;
    }
    if (lane == 0 && !p.known_positions) p.weights[row] = 0.0f;
  }
}

// Ranked: the experts of rows that nobody sent are -1, so that the caller's counts are right.
__device__ __forceinline__ void ClearUnusedRows(const DispatchParams& p, const LayoutScratch& scratch) {
  const Routing& r = p.routing;
  if (r.layout != Layout::kRanked || p.known_positions) return;
  const int64_t begin = static_cast<int64_t>(min(r.capacity, ExpertRows(p, scratch, 0))) * r.top_k;
  const int64_t end = static_cast<int64_t>(r.capacity) * r.top_k;
  for (int64_t i = begin + blockIdx.x * kThreads + threadIdx.x; i < end; i += gridDim.x * kThreads) {
    p.local_idx[i] = -1;
    p.weights[i] = 0.0f;
  }
}

// Positions, by all blocks together or, for a small batch, by every block for itself in shared memory. Returns where
// the result is, with the groups' starts in `*starts`.
__device__ __forceinline__ LayoutScratch ComputePositions(const DispatchParams& p, const DispatchShared& shared,
                                                          int* dynamic, const Patience& patience, int** starts) {
  const Routing& r = p.routing;
  const int layout_index = static_cast<int>(blockIdx.x) - (p.schedule.blocks - p.schedule.layout_blocks);
  LayoutScratch scratch = MakeScratch(p.control->scratch, r, p.schedule);
  *starts = dynamic;
  if (p.known_positions) {
    if (r.alignment > 1) ComputeStarts(p, scratch, *starts);
    return scratch;
  }
  if (p.schedule.solo_layout) {
    scratch = MakeScratch(reinterpret_cast<char*>(dynamic), r, p.schedule);
    int* counters = scratch.totals + scratch.columns;
    *starts = counters + kWarps * scratch.columns;
    if (layout_index >= 0) SendMetadata(p, shared, layout_index, patience);
    AwaitMetadata(p, shared, patience);
    CountAlone(p, shared.data[r.rank], scratch, counters, blockIdx.x == 0);
  } else {
    if (layout_index >= 0) {
      SendMetadata(p, shared, layout_index, patience);
      AwaitMetadata(p, shared, patience);
      CountAndScan(p, shared.data[r.rank], scratch, layout_index, p.schedule.layout_blocks, dynamic, patience);
    }
    BlockAwait(&p.control->barrier[1], p.schedule.layout_blocks, patience, r.rank);
  }
  ComputeStarts(p, scratch, *starts);
  return scratch;
}

template <class Codec>
__global__ void __launch_bounds__(kThreads, 1) DispatchKernel(const __grid_constant__ DispatchParams p) {
  __shared__ DispatchShared shared;
  extern __shared__ __align__(16) int dynamic[];
  const Routing& r = p.routing;
  const uint32_t epoch = *static_cast<volatile uint32_t*>(&p.control->epoch) + 1;
  if (threadIdx.x < r.ranks) {
    const uint64_t half_bytes = p.control->half_bytes;
    shared.half[threadIdx.x] = p.control->staging[threadIdx.x] + (epoch & 1) * half_bytes;
    shared.data[threadIdx.x] = shared.half[threadIdx.x] + half_bytes - p.staging.data_bytes;
  }
  InitSignalBox(shared.signals);
  __syncthreads();
  const Patience patience{p.control, p.schedule.timeout_ns, epoch,
                          p.known_positions ? Operation::kRedispatch : Operation::kDispatch};
  if (!HasMemory(patience, p.staging.flag_bytes, p.staging.data_bytes, r.rank))
    return FinishOperation(p.control, epoch);
  if (p.known_positions && blockIdx.x == 0) AnnouncePresence(r, p.staging, shared.half, epoch);
  if (blockIdx.x < p.schedule.push_blocks) PushRows<Codec>(p, shared, epoch);
  int* starts;
  const LayoutScratch scratch = ComputePositions(p, shared, dynamic, patience, &starts);
  PlaceRows<Codec>(p, shared, scratch, starts, patience);
  ZeroPadding(p, scratch, starts);
  ClearUnusedRows(p, scratch);
  if (p.known_positions && blockIdx.x == gridDim.x - 1) AwaitPresence(r, p.staging, shared.half, patience);
  FinishOperation(p.control, epoch);
}

template <class Codec>
int LaunchWith(const DispatchParams& p, cudaStream_t stream) {
  DispatchKernel<Codec><<<p.schedule.blocks, kThreads, kLayoutSharedBytes, stream>>>(p);
  return cudaGetLastError();
}
template <class Codec>
int Preload() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, DispatchKernel<Codec>);
}

int LaunchQuantizedDispatch(const DispatchParams& params, cudaStream_t stream);  // dispatch_quantized.cu
int PreloadQuantizedDispatch();

}  // namespace xen_moe
