// Placing the rows of an asynchronous dispatch, four (source, token) pairs at a time.
//
// Before a row can be copied, its positions and its flag must be known: a chain of loads that takes much longer than
// the copy. Here eight lanes handle a pair, one lane for each slot, so that a warp goes through that chain once for
// four rows. Then lane 0 copies all four as one sequence of chunks, while the other lanes place the scales.
//
// Who waits for whom and the memory order are those of PlaceRows (dispatch.cuh) and of bulk_copy.cuh: the lanes of slot
// 0 acquire the flags of their rows, __syncwarp passes that on to lane 0, and its proxy fence comes before its bulk
// copies.
#pragma once

#include "cuda_kernels/dispatch/bulk_copy.cuh"
#include "cuda_kernels/dispatch/dispatch.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

constexpr int kGroupSlots = 32 / kBulkRows;  // slots of a pair, at most

// A pair of a source and a token, as its eight lanes know it.
struct Resolved {
  int position;  // of this lane's slot; -1, -2: as in the result
  int source, token;
  uint32_t places;  // the slots that have a row, to all lanes of the pair
  bool named;       // an expert of the token is on this rank
};

// Resolves the positions of pair `pair`, and writes its metadata outputs. All lanes call it; `real`: the pair exists.
__device__ __forceinline__ Resolved ResolvePair(const DispatchParams& p, const LayoutScratch& scratch,
                                                const int* starts, const char* data, int pair, bool real) {
  const Routing& r = p.routing;
  const int lane = threadIdx.x & 31, slot = lane % kGroupSlots;
  Resolved out{-1, r.rank, pair, 0, false};
  if (pair >= r.tokens) {  // as in PlaceRows: own rows first, then token by token, the sources interleaved
    const int staged = pair - r.tokens;
    out.token = staged / (r.ranks - 1);
    out.source = r.rank + 1 + staged % (r.ranks - 1);
    if (out.source >= r.ranks) out.source -= r.ranks;
  }
  if (real && slot < r.slots) {
    const int64_t at = (static_cast<int64_t>(out.source) * r.tokens + out.token) * r.slots + slot;
    if (p.known_positions) {
      out.position = p.positions[at];
      if (out.position >= r.capacity) out.position = -2;
    } else {
      const int64_t entry = static_cast<int64_t>(out.token) * r.top_k + slot;
      const int routed = RoutingOf(p, scratch, data, out.source)[entry];  // an expert or a word
      const float weight = OfSource(p.topk_weights, data, p.staging.topk_weights, r, out.source)[entry];
      out.position = PlaceOf(p, scratch, starts, out.source, out.token, slot, routed);
      p.positions[at] = out.position;
      if (out.position >= 0) p.weights[out.position] = weight;
    }
  }
  const uint32_t of_pair = ((1u << kGroupSlots) - 1) << (lane - slot);
  out.places = (__ballot_sync(0xFFFFFFFFu, out.position >= 0) & of_pair) >> (lane - slot);
  out.named = __ballot_sync(0xFFFFFFFFu, out.position != -1) & of_pair;
  return out;
}

// Places the scales of `rows` rows of the ring. All lanes call it.
__device__ __forceinline__ void PlaceScalesOf(const DispatchParams& p, const BulkRing& ring, int rows,
                                              const int* list) {
  if (!p.row_scales) return;
  const int blocks = BulkCodec::ScaleBlocks(p.routing.hidden);
  for (int b = threadIdx.x & 31; b < blocks; b += 32) {
    float scale[kBulkRows];
#pragma unroll
    for (int i = 0; i < kBulkRows; ++i) {
      if (i < rows) scale[i] = __ldcs(ring.scales[i] + b);
    }
#pragma unroll
    for (int i = 0; i < kBulkRows; ++i) {
      if (i >= rows) break;
      for (int j = ring.first[i]; j < ring.first[i] + ring.count[i]; ++j) {
        p.row_scales[static_cast<int64_t>(list[j]) * blocks + b] = scale[i];
      }
    }
  }
}

// Copies `rows` rows of the ring, of `bytes` bytes each, to their places. All lanes call it; lane 0 copies.
__device__ __forceinline__ void CopyGroup(const DispatchParams& p, BulkRing& ring, int rows, const int* list,
                                          int bytes) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  const int lane = threadIdx.x & 31;
  const uint32_t begin = ring.loads, end = begin + rows * ((bytes + kBulkChunk - 1) / kBulkChunk);
  uint32_t loads = begin;
  int load_row = 0, load_at = 0;
  // Two chunks ahead of the stores (bulk_copy.cuh).
  auto load = [&] {
    if (loads == end) return;
    const uint32_t slot = loads % kBulkStages;
    AwaitStoresRead<1>();
    BulkLoad(ring.chunk[slot], ring.from[load_row] + load_at, static_cast<uint32_t>(min(kBulkChunk, bytes - load_at)),
             &ring.arrived[slot]);
    ++loads;
    load_at += kBulkChunk;
    if (load_at >= bytes) load_at = 0, ++load_row;
  };
  if (lane == 0) {
    FenceAsyncProxy();
    for (int i = 0; i < kBulkStages - 1; ++i) load();
  }
  __syncwarp();
  PlaceScalesOf(p, ring, rows, list);
  if (lane == 0) {
    uint32_t chunk = begin;
#pragma unroll 1
    for (int row = 0; row < rows; ++row) {
      const int first = ring.first[row], last = first + ring.count[row];
#pragma unroll 1
      for (int at = 0; at < bytes; at += kBulkChunk, ++chunk) {
        const uint32_t slot = chunk % kBulkStages;
        const uint32_t size = static_cast<uint32_t>(min(kBulkChunk, bytes - at));
        AwaitArrival(&ring.arrived[slot], chunk / kBulkStages & 1);
#pragma unroll 1
        for (int i = first; i < last; ++i) {
          BulkStore(static_cast<char*>(p.rows) + static_cast<int64_t>(list[i]) * bytes + at, ring.chunk[slot], size);
        }
        CommitStores();
        load();
      }
    }
    ring.loads = end;
  }
  __syncwarp();
#endif
}

// PlaceRows for whole rows and few slots. Returns false, without any effect, if the operation is of another kind.
__device__ __forceinline__ bool PlaceGroups(BulkCodec*, const DispatchParams& p, DispatchShared& shared,
                                            const LayoutScratch& scratch, const int* starts, uint32_t epoch) {
  const Routing& r = p.routing;
  if (p.schedule.parts > 1 || r.layout == Layout::kRanked || r.slots > kGroupSlots) return false;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, slot = lane % kGroupSlots, first = lane - slot;
  const char* half = shared.run.half[r.rank];
  const char* data = shared.run.data[r.rank];
  const uint32_t* flags = reinterpret_cast<const uint32_t*>(half + p.staging.row_flags);
  int* list = shared.rows[warp];
  BulkRing& ring = BulkCodec::Ring();
  const int pairs = r.ranks * r.tokens, groups = (pairs + kBulkRows - 1) / kBulkRows;
  const int row_bytes = static_cast<int>(BulkCodec::Vectors(p, r.hidden) * sizeof(int4));
  Claims claims(&shared.run.control->claimed[static_cast<int>(Work::kPlace)], groups,
                groups <= static_cast<int>(gridDim.x) * kWarps);
  bool routed = !HasBases(scratch);
  for (int group = claims.First(); group < groups; group = claims.Next()) {
    if (!routed && (group + 1) * kBulkRows > r.tokens && !(routed = AwaitWords(p, shared, epoch))) return true;
    const int pair = group * kBulkRows + lane / kGroupSlots;
    const Resolved found = ResolvePair(p, scratch, starts, data, min(pair, pairs - 1), pair < pairs);
    const bool moves = Holds(shared.run.active, found.source);
    const bool staged = found.source != r.rank;
    bool arrived = true;
    if (slot == 0 && found.named && moves && staged) {  // dropped rows are sent too, and must be awaited: workspace.h
      arrived =
          WaitFlag(flags + RowFlagIndex(p, found.source, found.token, 0), shared.run, epoch, Step::kRows, found.source);
    }
    arrived = __all_sync(0xFFFFFFFFu, arrived);
    if (!arrived) return true;
    if (found.position >= 0) list[first + __popc(found.places & ((1u << slot) - 1))] = found.position;
    const bool copied = slot == 0 && found.places && moves;
    const uint32_t rows = __ballot_sync(0xFFFFFFFFu, copied);
    if (copied) {
      const int at = __popc(rows & ((1u << lane) - 1));
      const int64_t staging_row = static_cast<int64_t>(found.source) * r.tokens + found.token;
      const char* wire = data + p.staging.rows + staging_row * p.staging.row_bytes;
      ring.from[at] = staged ? wire : reinterpret_cast<const char*>(BulkCodec::Row(p, found.token));
      ring.scales[at] = staged ? reinterpret_cast<const float*>(wire + p.staging.scale_offset)
                               : p.scales + static_cast<int64_t>(found.token) * BulkCodec::ScaleBlocks(r.hidden);
      ring.first[at] = first;
      ring.count[at] = __popc(found.places);
    }
    __syncwarp();  // lane 0 and all other lanes may read what some lanes have acquired and written
    // Rows of a redispatch that belong to an inactive rank.
    for (uint32_t out = __ballot_sync(0xFFFFFFFFu, slot == 0 && found.places && !moves); out; out &= out - 1) {
      const int leader = __ffs(out) - 1;
      const int count = __popc(__shfl_sync(0xFFFFFFFFu, found.places, leader));
      ZeroRows(p, Range{0, r.hidden}, Rows{list + leader, count});
    }
    CopyGroup(p, ring, __popc(rows), list, row_bytes);
  }
  return true;
}

}  // namespace xen_moe::XEN_MOE_VARIANT
