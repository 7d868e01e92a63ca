// Dispatch and redispatch in one launch.
//
// What moves: row t of x goes once to every other rank that owns one of its experts, into that rank's staging row [this
// rank][t]; from there that rank copies it to its rows of the output. Own rows go straight from x to the output. Who
// does it: the last `layout_blocks` blocks send the routing metadata; the first `push_blocks` blocks push rows and
// raise a flag per (source, token, part). Either the senders number their rows with the metadata (numbers.cuh), or the
// other blocks count rows and compute positions meanwhile (layout.cuh), and blocks that have finished pushing join
// them. Then every block places rows, own rows first, each as soon as its flag is up. Who waits for whom: pushing and
// sending wait for no rank (in large groups with many tokens, rows go through rings: rounds.cuh). Counting waits for
// every peer's metadata, placing for this GPU's counting, or for the senders' counts and words, and for the row's flag.
// The resident blocks do all work that other ranks wait for before they wait themselves (claims.cuh): so every wait
// ends, with any number of resident blocks on any rank. Memory order: stores to a peer, __syncwarp or __syncthreads,
// system-scope fence, relaxed flag store; the reader's system-scope acquire of the flag makes them visible. workspace.h
// says why two halves suffice. Top-k indices, positions and counts are checked before they become addresses, whether
// they come from a peer or from a handle. Entries of an inactive rank are treated as unused slots: they are neither
// sent nor counted, and nothing is awaited from that rank.
#pragma once

#include "cuda_kernels/core/launch.cuh"
#include "cuda_kernels/core/operation.cuh"
#include "cuda_kernels/core/rounds.cuh"
#include "cuda_kernels/core/row_codec.cuh"
#include "cuda_kernels/core/signal.cuh"
#include "cuda_kernels/dispatch/numbers.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

struct DispatchShared {
  Running run;
  int rows[kWarps][kMaxSlots];
  SignalBox signals;
};

__device__ __forceinline__ uint32_t RowFlagIndex(const DispatchParams& p, int source, int token, int part) {
  return (static_cast<uint32_t>(source) * p.routing.tokens + token) * p.schedule.parts + part;
}
__device__ __forceinline__ uint32_t* MetadataFlag(char* half, const Staging& staging, int source, int slice) {
  return reinterpret_cast<uint32_t*>(half + staging.metadata_flags) + source * kMaxBlocks + slice;
}

template <class Codec>
__device__ __forceinline__ void PushRow(const DispatchParams& p, const DispatchShared& shared, Signaller& signaller,
                                        int item) {
  const Routing& r = p.routing;
  const int first = r.rank + 1 < r.ranks ? r.rank + 1 : 0;
  const int token = item / p.schedule.parts, part = item % p.schedule.parts;
  const RankMask ranks = RanksOf(p.topk_idx, token, r, shared.run.meets) & ~OneRank(r.rank);
  if (!Any(ranks)) return;
  const uint64_t row = p.staging.rows + StagedRow(r, p.staging, r.rank, token) * p.staging.row_bytes;
  Codec::Push(p, token, PartOf(part, p.schedule, r.hidden),
              Targets{TurnedRanks::Of(ranks, first, r.ranks), shared.run.data, row});
  signaller.Raise(ranks, RowFlagIndex(p, r.rank, token, part));
}

// Returns whether the senders number the rows of this dispatch. Large groups do not.
__device__ __forceinline__ bool SendersNumber(const DispatchParams& p) {
  return !kLargeGroups && !p.known_positions && xen_moe::SendersNumber(p.routing, p.schedule);
}

// Sends slice `slice` of this rank's topk_idx and topk_weights to every peer, and writes its share of the clean
// indices.
__device__ __forceinline__ void SendRouting(const DispatchParams& p, const DispatchShared& shared, int slice) {
  const Routing& r = p.routing;
  const int words = r.tokens * r.top_k, slices = p.schedule.layout_blocks;
  for (int64_t i = slice * kThreads + static_cast<int>(threadIdx.x); i < words; i += slices * kThreads) {
    const int expert = p.topk_idx[i];
    const float weight = p.topk_weights[i];
    const bool moves = expert >= 0 && expert < r.experts && Holds(shared.run.active, expert / r.local_experts);
    if (p.clean_topk_idx) p.clean_topk_idx[i] = moves ? expert : -1;
    for (int n = 1; n < r.ranks; ++n) {
      const int peer = (r.rank + n) % r.ranks;
      if (!Holds(shared.run.meets, peer)) continue;
      char* data = shared.run.data[peer];
      const int64_t at = static_cast<int64_t>(r.rank) * words + i;
      reinterpret_cast<int*>(data + p.staging.topk_idx)[at] = expert;
      reinterpret_cast<float*>(data + p.staging.topk_weights)[at] = weight;
    }
  }
}

// Sends slice `slice` of the metadata. All threads of the block call it.
__device__ __forceinline__ void SendMetadata(const DispatchParams& p, const DispatchShared& shared, int* dynamic,
                                             uint32_t epoch, int slice) {
  const Routing& r = p.routing;
  const bool number = SendersNumber(p);
  if (number) {
    SendNumbers(p, shared.run, dynamic, slice);
  } else {
    SendRouting(p, shared, slice);
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  ForEachOwnRank(threadIdx.x, r.ranks, [&](int rank) {
    if (!Holds(shared.run.meets, rank) || (rank == r.rank && !number)) return;
    __threadfence_system();
    StoreRelaxedSystem(MetadataFlag(shared.run.half[rank], p.staging, r.rank, slice), epoch);
  });
}
// All threads of the block call it. Returns false if the group has failed.
__device__ __forceinline__ bool AwaitMetadata(const DispatchParams& p, const DispatchShared& shared, uint32_t epoch) {
  const Routing& r = p.routing;
  const int slices = p.schedule.layout_blocks;
  bool arrived = true;
  for (int i = threadIdx.x; i < r.ranks * slices && arrived; i += kThreads) {
    const int source = i / slices;
    if (source == r.rank || !Holds(shared.run.meets, source)) continue;
    const uint32_t* flag = MetadataFlag(shared.run.half[r.rank], p.staging, source, i % slices);
    arrived = WaitFlag(flag, shared.run, epoch, Step::kMetadata, source);
  }
  return __syncthreads_and(arrived);
}

// Where senders number rows: waits for the counts of all sources, which come with a source's last slice, and for all
// words of this rank's own. All threads of the block call it. Returns false if the group has failed.
__device__ __forceinline__ bool AwaitCounts(const DispatchParams& p, const DispatchShared& shared, uint32_t epoch) {
  const int ranks = p.routing.ranks, own = p.routing.rank, slices = p.schedule.layout_blocks;
  bool arrived = true;
  for (int i = threadIdx.x; i < ranks + slices && arrived; i += kThreads) {
    const int source = i < ranks ? i : own;
    if (!Holds(shared.run.meets, source)) continue;
    const uint32_t* flag = MetadataFlag(shared.run.half[own], p.staging, source, i < ranks ? slices - 1 : i - ranks);
    arrived = WaitFlag(flag, shared.run, epoch, source == own ? Step::kLocalBlocks : Step::kMetadata, source);
  }
  return __syncthreads_and(arrived);
}
// Where senders number rows: waits for the words of all other ranks. All lanes of a warp call it. Returns false if the
// group has failed.
__device__ __forceinline__ bool AwaitWords(const DispatchParams& p, const DispatchShared& shared, uint32_t epoch) {
  const Routing& r = p.routing;
  const int slices = p.schedule.layout_blocks;
  bool arrived = true;
  for (int i = threadIdx.x & 31; i < r.ranks * slices && arrived; i += 32) {
    const int source = i / slices;
    if (source == r.rank || !Holds(shared.run.meets, source)) continue;
    const uint32_t* flag = MetadataFlag(shared.run.half[r.rank], p.staging, source, i % slices);
    arrived = WaitFlag(flag, shared.run, epoch, Step::kMetadata, source);
  }
  arrived = __all_sync(0xFFFFFFFFu, arrived);
  __syncwarp();  // all lanes may read what one lane has acquired
  return arrived;
}

// Does the work that the peers wait for. Slices of the metadata are shares of the last blocks. The first blocks push
// rows: they claim them one by one, and the signalling warp raises the flags; if there is at most one row per warp,
// rows are shares too. In an operation that goes through rings, the rows of the first rounds are always claimed,
// because nothing may be stored twice.
template <class Codec>
__device__ __forceinline__ void Send(const DispatchParams& p, DispatchShared& shared, int* dynamic, uint32_t epoch) {
  const Schedule& s = p.schedule;
  Control* const control = shared.run.control;
  const int block = static_cast<int>(blockIdx.x), warp = static_cast<int>(threadIdx.x / 32);
  const int slices = p.known_positions ? 0 : s.layout_blocks, slice = block - (s.blocks - slices);
  const bool once = p.call.active != nullptr;
  if (slice >= 0 && StartShare(control, slice, epoch, once)) SendMetadata(p, shared, dynamic, epoch, slice);
  if (block >= s.push_blocks) return;
  const int items = p.routing.ranks > 1 ? TokensAhead(p.routing, p.staging) * s.parts : 0;
  const bool few = !kRings && items <= s.push_blocks * kWarps;
  Signaller signaller{shared.signals, shared.run, p.staging.row_flags, epoch, few};
  Claims claims(&control->claimed[static_cast<int>(Work::kPush)], items, false);
  int item = items;
  if (few) {
    if (StartShare(control, slices + block, epoch, once)) item = block + warp * s.push_blocks;
  } else if (warp == kSignalWarp) {
    signaller.RunSignalWarp();
  } else {
    item = claims.First();
  }
  for (int next = 0;;) {
    while (item < items) {
      PushRow<Codec>(p, shared, signaller, item);
      item = few ? items : claims.Next();
    }
    if (next == 0 && warp != kSignalWarp) signaller.Finish();
    const int share = AdoptShare(control, slices + (few ? s.push_blocks : 0), epoch, &next);
    if (share < 0) return;
    if (share < slices) {
      SendMetadata(p, shared, dynamic, epoch, share);
    } else {
      item = share - slices + warp * s.push_blocks;
    }
  }
}

// Writes zeros into a part of the rows of a redispatch that belong to an inactive rank.
__device__ __forceinline__ void ZeroRows(const DispatchParams& p, Range range, const Rows& rows) {
  const int64_t element = p.element == Element::kF32 ? 4 : p.element == Element::kByte ? 1 : 2;
  for (int i = 0; i < rows.count; ++i) {
    char* row = static_cast<char*>(p.rows) + static_cast<int64_t>(rows.list[i]) * p.routing.hidden * element;
    for (int64_t b = range.begin * element + (threadIdx.x & 31); b < range.end * element; b += 32) row[b] = 0;
  }
}

// Writes the positions of one (source, token) that have a row into `list`, and its metadata outputs. All lanes return
// the count, or -1 if no expert of the token is here.
__device__ __forceinline__ int ResolveRows(const DispatchParams& p, const LayoutScratch& scratch, const int* starts,
                                           const char* data, int source, int token, bool write, int* list) {
  const Routing& r = p.routing;
  const int lane = threadIdx.x & 31;
  const int64_t pair = static_cast<int64_t>(source) * r.tokens + token;
  const int* topk = RoutingOf(p, scratch, data, source) + static_cast<int64_t>(token) * r.top_k;
  int count = 0;
  bool belongs = false;
  for (int base = 0; base < r.slots; base += 32) {
    const int slot = base + lane;
    int position = -1;
    float weight = 0.0f;  // loaded together with the routing
    if (slot < r.slots) {
      if (p.known_positions) {
        position = p.positions[pair * r.slots + slot];
        if (position >= r.capacity) position = -2;
      } else {
        if (write && r.layout != Layout::kRanked) {
          weight = OfSource(p.topk_weights, data, p.staging.topk_weights, r, source)[token * r.top_k + slot];
        }
        position = PlaceOf(p, scratch, starts, source, token, slot, topk[slot]);
        if (write) p.positions[pair * r.slots + slot] = position;
      }
    }
    const uint32_t placed = __ballot_sync(0xFFFFFFFFu, position >= 0);
    if (position >= 0) list[count + __popc(placed & ((1u << lane) - 1))] = position;
    count += __popc(placed);
    belongs |= __any_sync(0xFFFFFFFFu, position != -1);
    if (position >= 0 && write && !p.known_positions && r.layout != Layout::kRanked) p.weights[position] = weight;
  }
  __syncwarp();
  if (count > 0 && write && !p.known_positions && r.layout == Layout::kRanked) {
    const float* weights = OfSource(p.topk_weights, data, p.staging.topk_weights, r, source);
    for (int k = lane; k < r.top_k; k += 32) {
      const int local = LocalExpert(topk[k], r);
      const int64_t at = static_cast<int64_t>(list[0]) * r.top_k + k;
      p.local_idx[at] = local;
      p.weights[at] = local >= 0 ? weights[static_cast<int64_t>(token) * r.top_k + k] : 0.0f;
    }
  }
  return belongs ? count : -1;
}

// The order in which the rows of other ranks are placed: token by token, the sources interleaved, as they arrive.
struct InPushOrder {
  __device__ __forceinline__ static void Pair(const Routing& r, int pair, int* source, int* token) {
    PairOfOthers(r, pair, source, token);
  }
};

// `taking`: given if the operation goes through rings.
template <class Codec, class Order = InPushOrder, class Items = Claims, class... Takes>
__device__ __forceinline__ void PlaceRows(const DispatchParams& p, DispatchShared& shared, const LayoutScratch& scratch,
                                          const int* starts, uint32_t epoch, const Takes&... taking) {
  const Routing& r = p.routing;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const char* half = shared.run.half[r.rank];
  const char* data = shared.run.data[r.rank];
  int* list = shared.rows[warp];
  const int own_items = r.tokens * p.schedule.parts;
  const int items = r.ranks * own_items;
  Items claims(&shared.run.control->claimed[static_cast<int>(Work::kPlace)], items,
               items <= static_cast<int>(gridDim.x) * kWarps, taking...);
  bool routed = !HasBases(scratch);  // the other ranks' routing has arrived
  for (int item = claims.First(); item < items; item = claims.Next()) {
    int source = r.rank, token = item / p.schedule.parts;
    const int part = item % p.schedule.parts;
    if (item >= own_items) {
      if (!routed && !(routed = AwaitWords(p, shared, epoch))) return;
      Order::Pair(r, token - r.tokens, &source, &token);
    }
    __syncwarp();
    const Rows rows{list, ResolveRows(p, scratch, starts, data, source, token, part == 0, list)};
    if (rows.count < (source == r.rank ? 1 : 0)) continue;
    const Range range = PartOf(part, p.schedule, r.hidden);
    if (!Holds(shared.run.active, source)) {
      ZeroRows(p, range, rows);
    } else if (source == r.rank) {
      Codec::PlaceOwn(p, token, range, rows);
    } else {
      bool arrived = true;
      if (lane == 0) {
        const uint32_t* flags = reinterpret_cast<const uint32_t*>(half + p.staging.row_flags);
        arrived = WaitFlag(flags + RowFlagIndex(p, source, token, part), shared.run, epoch, Step::kRows, source);
      }
      arrived = __shfl_sync(0xFFFFFFFFu, arrived, 0);
      __syncwarp();  // all lanes may read what one lane has acquired
      if (!arrived) return;
      if (rows.count == 0) continue;  // dropped, but sent, so it had to be awaited: workspace.h
      Codec::PlaceStaged(p, data + p.staging.rows + StagedRow(r, p.staging, source, token) * p.staging.row_bytes, range,
                         rows);
    }
  }
}

// PlaceRows through rings; also pushes the rows that Send has left.
template <class Codec>
__device__ __forceinline__ void PlaceInRounds(const DispatchParams& p, DispatchShared& shared,
                                              const LayoutScratch& scratch, const int* starts, uint32_t epoch) {
  const Routing& r = p.routing;
  const int parts = p.schedule.parts;
  GoThroughRounds(
      shared.run, shared.signals, r, p.staging, parts,
      [&](Signaller& signaller, int item) { PushRow<Codec>(p, shared, signaller, item); },
      [&](const Rounds& rounds) {
        const Taking taking{rounds, (r.ranks - 1) * parts};
        PlaceRows<Codec, InPushOrder, RoundClaims>(p, shared, scratch, starts, epoch, taking);
      });
}

// A codec's own function to place all rows, if it has one (bulk_place.cuh). Returns false if it has done nothing.
template <class Codec>
__device__ __forceinline__ bool PlaceGroups(Codec*, const DispatchParams&, DispatchShared&, const LayoutScratch&,
                                            const int*, uint32_t) {
  return false;
}

// Rows that round a group up to the alignment are zero, with weight and scale zero. Block `index` of `count` does its
// share.
__device__ __forceinline__ void ZeroPadding(const DispatchParams& p, const LayoutScratch& scratch, const int* starts,
                                            int index, int count) {
  const Routing& r = p.routing;
  if (r.layout != Layout::kGrouped || r.alignment == 1) return;
  const int lane = threadIdx.x & 31;
  const int bytes = p.element == Element::kF32 ? 4 : p.element == Element::kByte ? 1 : 2;
  const int64_t row_bytes = static_cast<int64_t>(r.hidden) * bytes;
  const int blocks = (r.hidden + kScaleBlock - 1) / kScaleBlock;
  const int rows_at_most = r.alignment - 1;
#pragma unroll 1
  for (int64_t item = static_cast<int64_t>(index) * kWarps + threadIdx.x / 32;
       item < static_cast<int64_t>(r.local_experts) * rows_at_most; item += count * kWarps) {
    const int l = static_cast<int>(item / rows_at_most), i = static_cast<int>(item % rows_at_most);
    const int64_t real = ExpertRows(p, scratch, l), row = starts[l] + real + i;
    if (real + i >= RoundUp(static_cast<int>(real), r.alignment) || row >= r.capacity) continue;
    char* at = static_cast<char*>(p.rows) + row * row_bytes;
    if (row_bytes % 16 == 0) {
#pragma unroll 1
      for (int64_t b = lane; b < row_bytes / 16; b += 32) reinterpret_cast<int4*>(at)[b] = make_int4(0, 0, 0, 0);
    } else {
#pragma unroll 1
      for (int64_t b = lane; b < row_bytes; b += 32) at[b] = 0;
    }
    if (p.row_scales) {
#pragma unroll 1
      for (int b = lane; b < blocks; b += 32) p.row_scales[row * blocks + b] = 0.0f;
    }
    if (lane == 0 && !p.known_positions) p.weights[row] = 0.0f;
  }
}

// Ranked layout: sets the experts of unused rows to -1, so that the caller's counts are right.
__device__ __forceinline__ void ClearUnusedRows(const DispatchParams& p, const LayoutScratch& scratch, int index,
                                                int count) {
  const Routing& r = p.routing;
  if (r.layout != Layout::kRanked || p.known_positions) return;
  const int64_t begin = static_cast<int64_t>(min(r.capacity, ExpertRows(p, scratch, 0))) * r.top_k;
  const int64_t end = static_cast<int64_t>(r.capacity) * r.top_k;
#pragma unroll 1
  for (int64_t i = begin + index * kThreads + threadIdx.x; i < end; i += count * kThreads) {
    p.local_idx[i] = -1;
    p.weights[i] = 0.0f;
  }
}

// Computes positions: from the senders' numbers; or all blocks together; or, for a small batch, every block for itself
// in shared memory. Leaves them in `scratch`, and the groups' starts in `*starts`. `await()` waits for the metadata of
// all sources. Returns false if the group has failed.
template <class Await>
__device__ __forceinline__ bool ComputePositions(const DispatchParams& p, const DispatchShared& shared, int* dynamic,
                                                 LayoutScratch& scratch, int** starts, Await await) {
  const Routing& r = p.routing;
  *starts = dynamic;
  if (p.known_positions) {
    if (r.alignment > 1) ComputeStarts(p, scratch, *starts);
    return true;
  }
  if (SendersNumber(p)) {
    if (!AwaitCounts(p, shared, shared.run.epoch)) return false;
    ComputeBases(p, shared.run, dynamic, scratch, starts, blockIdx.x == 0);
    return true;
  }
  if (p.schedule.solo_layout) {
    scratch = MakeScratch(reinterpret_cast<char*>(dynamic), r, p.schedule);
    int* counters = scratch.totals + scratch.columns;
    *starts = counters + kWarps * scratch.columns;
    if (!await()) return false;
    CountAlone(p, shared.run, scratch, counters, blockIdx.x == 0);
  } else {
    if (!CountAndScan(p, shared.run, scratch, dynamic, await)) return false;
  }
  ComputeStarts(p, scratch, *starts);
  return true;
}

// Fails the group if no dispatch can have made the counts of a handle, instead of dropping rows without an error.
__device__ __forceinline__ void CheckCounts(const DispatchParams& p, const Running& run) {
  const Routing& r = p.routing;
  bool bad = false;
  for (int i = threadIdx.x; i < r.ranks * r.local_experts; i += kThreads) {
    bad |= p.recv_counts[i] < 0 || p.recv_counts[i] > r.tokens * r.top_k;
  }
  if (__syncthreads_or(bad) && threadIdx.x == 0) Fail(run, Cause::kIndex, Step::kArrival, r.rank, r.rank, 0);
}

static __device__ __noinline__ void PoisonDispatch(const DispatchParams& p, uint32_t index, uint32_t count) {
  const Routing& r = p.routing;
  const uint64_t rows = r.capacity, element = p.element == Element::kF32 ? 4 : p.element == Element::kByte ? 1 : 2;
  const uint64_t scales = (r.hidden + kScaleBlock - 1) / kScaleBlock;
  const uint64_t pairs = static_cast<uint64_t>(r.ranks) * r.tokens;
  FillBytes(p.rows, rows * r.hidden * element, kPoison, index, count);
  FillBytes(p.row_scales, rows * scales * 4, kPoison, index, count);
  if (p.known_positions) return;  // positions and counts are operands
  FillBytes(p.positions, pairs * r.slots * 4, kPoison, index, count);
  FillBytes(p.recv_counts, static_cast<uint64_t>(r.ranks) * r.local_experts * 4, 0, index, count);
  FillBytes(p.weights, rows * (r.layout == Layout::kRanked ? r.top_k : 1) * 4, kPoison, index, count);
  FillBytes(p.local_idx, rows * r.top_k * 4, kPoison, index, count);
  FillBytes(p.clean_topk_idx, static_cast<uint64_t>(r.tokens) * r.top_k * 4, kPoison, index, count);
}

template <class Codec>
__global__ void __launch_bounds__(kThreads, 1) DispatchKernel(const __grid_constant__ DispatchParams p) {
  __shared__ DispatchShared shared;
  extern __shared__ __align__(128) int dynamic[];
  InitSignalBox(shared.signals);
  BeginRows(static_cast<Codec*>(nullptr));
  AwaitKernelBefore();
  BeginOperation(shared.run, p.call, p.known_positions ? Operation::kRedispatch : Operation::kDispatch, p.routing.ranks,
                 p.routing.rank);
  if (!shared.run.refused) {
    const uint32_t epoch = shared.run.epoch;
    Send<Codec>(p, shared, dynamic, epoch);
    int* starts;
    LayoutScratch scratch = MakeScratch(shared.run.scratch, p.routing, p.schedule);
    if (ComputePositions(p, shared, dynamic, scratch, &starts, [&] { return AwaitMetadata(p, shared, epoch); })) {
      if constexpr (kRings) {
        PlaceInRounds<Codec>(p, shared, scratch, starts, epoch);
      } else if (!PlaceGroups(static_cast<Codec*>(nullptr), p, shared, scratch, starts, epoch)) {
        PlaceRows<Codec>(p, shared, scratch, starts, epoch);
      }
      ZeroPadding(p, scratch, starts, blockIdx.x, gridDim.x);
      ClearUnusedRows(p, scratch, blockIdx.x, gridDim.x);
    }
    if (p.known_positions && Any(shared.run.active) && blockIdx.x == gridDim.x - 1) CheckCounts(p, shared.run);
  }
  EndRows(static_cast<Codec*>(nullptr));
  FinishOperation(shared.run, [&](uint32_t index, uint32_t count) { PoisonDispatch(p, index, count); });
}

template <class Codec>
int LaunchWith(const DispatchParams& p, cudaStream_t stream, int shared_bytes = kLayoutSharedBytes) {
  if (Unfit(p) || p.routing.ranks > kRanks || kRings != (p.staging.ring_tokens > 0)) return cudaErrorInvalidValue;
  return LaunchEarly(DispatchKernel<Codec>, p.schedule.blocks, shared_bytes, stream, p);
}
template <class Codec>
int Preload() {
  return LoadKernel(DispatchKernel<Codec>, kLayoutSharedBytes);
}

}  // namespace xen_moe::XEN_MOE_VARIANT
