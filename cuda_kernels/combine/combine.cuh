// Combine in one launch.
//
// What moves: the expert's rank adds the rows of (source, token) in slot order in float32 (times their weights), rounds
// the sum to the wire, and pushes it to the token's rank, staging row [this rank][token]. There the partial rows are
// added in ascending rank order and rounded to the output. This rank's own partial row is summed in place and never
// staged. Who does it: the first `push_blocks` blocks reduce and push, the other blocks sum what has arrived; a block
// that has finished pushing joins the summing. Who waits for whom: reducing waits for no rank; summing waits for a flag
// per (expert rank, token, part), and a warp whose flag is not up yet leaves this rank's partial row in the output and
// goes on with other tokens (SumOrDefer). Every rank in a token's topk_idx sends one partial row, even if all its rows
// were dropped, so topk_idx determines which flags to wait for. An inactive rank sends none and gets none. The resident
// blocks push all rows before they wait (claims.cuh). Positions are checked before they become addresses. Memory order:
// as in dispatch.cuh. Multiply and add are rounded separately: __fmul_rn, __fadd_rn.
#pragma once

#include "cuda_kernels/combine/row_stream.cuh"
#include "cuda_kernels/core/claims.cuh"
#include "cuda_kernels/core/launch.cuh"
#include "cuda_kernels/core/octet.cuh"
#include "cuda_kernels/core/operation.cuh"
#include "cuda_kernels/core/rounds.cuh"
#include "cuda_kernels/core/routing.cuh"
#include "cuda_kernels/core/signal.cuh"
#include "cuda_kernels/core/wire_chunk.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

// Tokens of a warp whose staged rows had not arrived when their turn came: in the output is this rank's partial row,
// rounded, if it has one.
constexpr int kDeferred = 8;

struct CombineShared {
  Running run;
  int rows[kWarps][kMaxSlots];        // rows of y to add, in slot order
  float weights[kWarps][kMaxSlots];   // their weights
  RankIndex sources[kWarps][kRanks];  // ranks that send a partial row of the current token, ascending
  int deferred[kWarps][kDeferred];    // items of summing, oldest first from a place that moves round; ~item: no own row
  SignalBox signals;
};

// The rows of one (source, token) that this rank holds. `belongs`: an entry of the token's topk_idx is on this rank.
struct GatheredRows {
  int count;
  bool belongs;
};

__device__ __forceinline__ GatheredRows GatherRows(const CombineParams& p, CombineShared& shared, int source,
                                                   int token) {
  const Routing& r = p.routing;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const int* positions = p.positions + (static_cast<int64_t>(source) * r.tokens + token) * r.slots;
  GatheredRows out{0, false};
  __syncwarp();
  if (!Holds(shared.run.active, source)) return out;
  for (int base = 0; base < r.slots; base += 32) {
    const int slot = base + lane;
    const int position = slot < r.slots ? positions[slot] : -1;
    const bool real = position >= 0 && position < r.capacity;
    const uint32_t placed = __ballot_sync(0xFFFFFFFFu, real);
    if (real) {
      const int at = out.count + __popc(placed & ((1u << lane) - 1));
      shared.rows[warp][at] = position;
      shared.weights[warp][at] = p.weights ? p.weights[position] : 1.0f;
    }
    out.count += __popc(placed);
    out.belongs |= __any_sync(0xFFFFFFFFu, position != -1);
  }
  __syncwarp();
  return out;
}

template <class Y>
__device__ __forceinline__ void AddRow(Octet& acc, const RawOctet<Y>& raw, float weight, bool weighted) {
  const Octet y = Widen(raw);
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    acc.v[i] = __fadd_rn(acc.v[i], weighted ? __fmul_rn(weight, y.v[i]) : y.v[i]);
  }
}
// Always multiplies: without weights GatherRows sets them to one, and a product by one has the same bits.
template <class Y, int kSteps>
__device__ __forceinline__ void AddRows(Octet (&acc)[kSteps], const RawOctet<Y> (&raw)[kSteps], float weight) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) AddRow(acc[s], raw[s], weight, true);
}
__device__ __forceinline__ void Add(Octet& acc, const Octet& other) {
#pragma unroll
  for (int i = 0; i < kOctet; ++i) acc.v[i] = __fadd_rn(acc.v[i], other.v[i]);
}
template <int kSteps>
__device__ __forceinline__ void Clear(Octet (&acc)[kSteps]) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) acc[s] = Octet{};
}

// acc = sum over the gathered rows of weight * y, `kSteps` warp steps from element `base`, through registers.
template <class Y, int kSteps>
__device__ __forceinline__ void ReduceRows(const CombineParams& p, const CombineShared& shared, int count, int base,
                                           int end, bool vector, Octet (&acc)[kSteps]) {
  const int warp = threadIdx.x / 32, e = base + (threadIdx.x & 31) * kOctet;
  const Y* y = static_cast<const Y*>(p.y);
  Clear(acc);
  for (int i = 0; i < count; ++i) {
    RawOctet<Y> raw[kSteps];
    const Y* row = y + static_cast<int64_t>(shared.rows[warp][i]) * p.routing.hidden;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) raw[s] = LoadOctet(row, e + s * kWarpElements, end, vector);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) AddRow(acc[s], raw[s], shared.weights[warp][i], p.weights != nullptr);
  }
}

// Rounds a partial row as the wire would.
template <class Y, WireType kWire>
__device__ __forceinline__ Octet RoundToWire(const Octet& partial, bool ue8m0) {
  if constexpr (kWire == WireType::kNative) {
    return Widen(Narrow<Y>(partial));
  } else {
    return Dequantize<kWire>(Quantize<kWire>(partial, ue8m0));
  }
}

__device__ __forceinline__ uint32_t PartialFlagIndex(const CombineParams& p, int source, int token, int part) {
  return (static_cast<uint32_t>(source) * p.routing.tokens + token) * p.schedule.parts + part;
}

// Quantizes kSteps steps of a partial row, of which each lane holds its octets, to a chunk of the wire.
template <WireType kWire, int kSteps>
__device__ __forceinline__ WireChunk<kWire, kSteps> ToChunk(const Octet (&partial)[kSteps], bool ue8m0) {
  WireChunk<kWire, kSteps> chunk;
  chunk.template Quantize<float>([&](int s) { return Narrow<float>(partial[s]); }, ue8m0);
  return chunk;
}

// Sends each partial row of `source` to the source itself, into the staging row of this rank there.
struct DirectPush {
  // The number of pairs of a source and a token, in the order in which they are pushed.
  __device__ __forceinline__ static int Pairs(const Routing& r) { return (r.ranks - 1) * r.tokens; }
  __device__ __forceinline__ static void Pair(const Routing& r, int pair, int* source, int* token) {
    PairOfOthers(r, pair, source, token);
  }
  __device__ __forceinline__ static int Target(const Routing&, int source) { return source; }
  __device__ __forceinline__ static int Slot(const Routing& r, int) { return r.rank; }
  __device__ __forceinline__ static bool Takes(const Running&, int) { return true; }
};

// Adds up the rows that this rank holds of one token, and sends one part of the sum. `item` numbers the pairs of a
// source and a token, times the parts. kGeneral: for every hidden size, with the octets of a quantized wire in the
// order of their elements.
template <class Y, WireType kWire, int kSteps, bool kGeneral, class Way>
__device__ __forceinline__ void PushPartial(const CombineParams& p, CombineShared& shared, char* ring, bool vector,
                                            Signaller& signaller, int item) {
  const Routing& r = p.routing;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const Y* y = static_cast<const Y*>(p.y);
  const int part = item % p.schedule.parts;
  int source, token;
  Way::Pair(r, item / p.schedule.parts, &source, &token);
  const GatheredRows rows = GatherRows(p, shared, source, token);
  if (!rows.belongs) return;
  const int target = Way::Target(r, source), slot = Way::Slot(r, source);
  if (!Way::Takes(shared.run, target)) return;
  char* wire = shared.run.data[target] + p.staging.rows + StagedRow(r, p.staging, slot, token) * p.staging.row_bytes;
  const int begin = min(r.hidden, part * p.schedule.part_elements);
  const int end = min(r.hidden, begin + p.schedule.part_elements);
  auto store = [&](int base, const Octet(&acc)[kSteps]) {
    if constexpr (kWire != WireType::kNative && !kGeneral) {
      ToChunk<kWire>(acc, p.ue8m0).Store(wire, p.staging.scale_offset, base, end);
    } else {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int e = base + s * kWarpElements + lane * kOctet;
        if constexpr (kWire == WireType::kNative) {
          StoreOctet(reinterpret_cast<Y*>(wire), e, end, vector, Narrow<Y>(acc[s]));
        } else {
          StoreQuantized<kWire>(wire, p.staging.scale_offset, e, end, Quantize<kWire>(acc[s], p.ue8m0));
        }
      }
    }
  };
  if (vector) {
    Octet acc[kSteps];
    RowStream<Y, kSteps>::Run(
        ring, rows.count, begin, end, [&](int i) { return y + static_cast<int64_t>(shared.rows[warp][i]) * r.hidden; },
        [&](int) { Clear(acc); },
        [&](int i, const RawOctet<Y>(&raw)[kSteps]) { AddRows(acc, raw, shared.weights[warp][i]); }, [&](int) {},
        [&](int base) { store(base, acc); });
  } else {
    for (int base = begin; base < end; base += kSteps * kWarpElements) {
      Octet acc[kSteps];
      ReduceRows<Y, kSteps>(p, shared, rows.count, base, end, vector, acc);
      store(base, acc);
    }
  }
  signaller.Raise(OneRank(target), PartialFlagIndex(p, slot, token, part));
}

// Calls push(signaller, item) for the parts of all `pairs` whose rows the peers wait for. Many items are claimed one by
// one; few items are shares of the pushing blocks.
template <class Push>
__device__ __forceinline__ void PushItems(const CombineParams& p, CombineShared& shared, int pairs, uint32_t epoch,
                                          Push push) {
  const Schedule& s = p.schedule;
  const int items = pairs * s.parts;
  const int block = static_cast<int>(blockIdx.x), warp = threadIdx.x / 32;
  if (block >= s.push_blocks || items == 0) return;
  const bool few = !kRings && items <= s.push_blocks * kWarps;
  Signaller signaller{shared.signals, shared.run, p.staging.row_flags, epoch, few};
  if (!few && warp == kSignalWarp) return signaller.RunSignalWarp();
  Claims claims(&shared.run.control->claimed[static_cast<int>(Work::kPush)], items, false);
  int item = items;
  if (!few) {
    item = claims.First();
  } else if (StartShare(shared.run.control, block, epoch, p.call.active != nullptr)) {
    item = block + warp * s.push_blocks;
  }
  for (int next = 0;;) {
    if (item < items) push(signaller, item);
    if (few) {
      const int share = AdoptShare(shared.run.control, s.push_blocks, epoch, &next);
      if (share < 0) break;
      item = share + warp * s.push_blocks;
    } else if (item < items) {
      item = claims.Next();
    } else {
      break;
    }
  }
  signaller.Finish();
}

// Pushes all partial rows that the peers wait for.
template <class Y, WireType kWire, int kSteps, bool kGeneral, class Way = DirectPush>
__device__ __forceinline__ void PushPartials(const CombineParams& p, CombineShared& shared, char* ring, bool vector,
                                             uint32_t epoch) {
  const int pairs = kRings ? (p.routing.ranks - 1) * TokensAhead(p.routing, p.staging) : Way::Pairs(p.routing);
  PushItems(p, shared, pairs, epoch, [&](Signaller& signaller, int item) {
    PushPartial<Y, kWire, kSteps, kGeneral, Way>(p, shared, ring, vector, signaller, item);
  });
}

// Loads kSteps steps of a staged row whose octets lie in the order of their elements.
template <class Y, WireType kWire, int kSteps>
__device__ __forceinline__ void LoadPartial(const CombineParams& p, const char* wire, int base, int end, bool vector,
                                            Octet (&partial)[kSteps]) {
  const int e = base + (threadIdx.x & 31) * kOctet;
  if constexpr (kWire == WireType::kNative) {
    RawOctet<Y> raw[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      raw[s] = LoadOctet(reinterpret_cast<const Y*>(wire), e + s * kWarpElements, end, vector);
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) partial[s] = Widen(raw[s]);
  } else {
    QuantizedOctet<kWire> q[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
      q[s] = LoadQuantized<kWire>(wire, p.staging.scale_offset, e + s * kWarpElements, end);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) partial[s] = Dequantize<kWire>(q[s]);
  }
}

// out = sum over `ranks`, ascending, of staged rows and of the listed rows of `y`, this rank's (rounded to the wire
// together).
template <class Y, int kSteps>
__device__ __forceinline__ void StreamPartials(const CombineParams& p, CombineShared& shared, char* ring, const Y* y,
                                               const RankMask& ranks, int own, int token, int begin, int end, Y* out) {
  const Routing& r = p.routing;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const RankMask below = ranks & RanksBelow(r.rank), above = ranks & RanksAbove(r.rank), staged = below | above;
  // Entries: ranks below, own rows, ranks above.
  const int first_own = CountRanks(below), first_above = first_own + own;
  ForEachOwnRank(lane, r.ranks, [&](int rank) {
    if (Holds(staged, rank)) shared.sources[warp][CountRanks(staged & RanksBelow(rank))] = rank;
  });
  __syncwarp();
  auto row_of = [&](int i) {
    if (i >= first_own && i < first_above) return y + static_cast<int64_t>(shared.rows[warp][i - first_own]) * r.hidden;
    const int rank = shared.sources[warp][i < first_own ? i : i - own];
    return reinterpret_cast<const Y*>(shared.run.data[r.rank] + p.staging.rows +
                                      StagedRow(r, p.staging, rank, token) * p.staging.row_bytes);
  };
  Octet total[kSteps], partial[kSteps];
  auto clear = [&](int) {
    Clear(total);
    Clear(partial);
  };
  auto add = [&](int i, const RawOctet<Y>(&raw)[kSteps]) {
    if (i >= first_own && i < first_above) {
      AddRows(partial, raw, shared.weights[warp][i - first_own]);
    } else {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) Add(total[s], Widen(raw[s]));
    }
  };
  auto after_row = [&](int i) {
    if (own > 0 && i == first_above - 1) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) Add(total[s], Widen(Narrow<Y>(partial[s])));
    }
  };
  auto store = [&](int base) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      StoreOctet(out, base + s * kWarpElements + lane * kOctet, end, true, Narrow<Y>(total[s]));
    }
  };
  RowStream<Y, kSteps>::Run(ring, first_above + CountRanks(above), begin, end, row_of, clear, add, after_row, store);
}

// StreamPartials for a quantized wire. Own rows go through the ring in shared memory, staged rows through registers;
// the first kAhead staged rows of a batch are loaded before its own rows are summed.
template <class Y, WireType kWire, int kSteps>
__device__ __forceinline__ void StreamChunks(const CombineParams& p, CombineShared& shared, char* ring,
                                             const RankMask& ranks, int own, int token, int begin, int end, Y* out) {
  constexpr int kAhead = 2;
  const Routing& r = p.routing;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const Y* y = static_cast<const Y*>(p.y);
  const char* const staged = shared.run.data[r.rank] + p.staging.rows;
  WireChunk<kWire, kSteps> ahead[kAhead];
  Octet partial[kSteps];
  RankMask to_load = NoRanks();
  auto load = [&](WireChunk<kWire, kSteps>& chunk, int base) {
    if (!Any(to_load)) return;
    const int rank = FirstRank(to_load);
    DropFirst(to_load);
    chunk.Load(staged + StagedRow(r, p.staging, rank, token) * p.staging.row_bytes, p.staging.scale_offset, base, end);
  };
  auto begin_batch = [&](int base) {
    Clear(partial);
    to_load = ranks & ~OneRank(r.rank);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(ahead[i], base);
  };
  auto end_batch = [&](int base) {
    Octet total[kSteps];
    Clear(total);
    auto add = [&](const WireChunk<kWire, kSteps>& chunk) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) Add(total[s], chunk.Rounded(s, chunk.Scale(s)));
    };
    for (RankMask m = ranks; Any(m); DropFirst(m)) {
      if (FirstRank(m) == r.rank) {
        add(ToChunk<kWire>(partial, p.ue8m0));
        continue;
      }
      add(ahead[0]);
#pragma unroll
      for (int i = 1; i < kAhead; ++i) ahead[i - 1] = ahead[i];
      load(ahead[kAhead - 1], base);
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      StoreOctet(out, base + s * kWarpElements + lane * kOctet, end, true, Narrow<Y>(total[s]));
    }
  };
  RowStream<Y, kSteps>::Run(
      ring, own, begin, end, [&](int i) { return y + static_cast<int64_t>(shared.rows[warp][i]) * r.hidden; },
      begin_batch, [&](int i, const RawOctet<Y>(&raw)[kSteps]) { AddRows(partial, raw, shared.weights[warp][i]); },
      [](int) {}, end_batch);
}

// Waits until every other rank of `ranks` has sent its part of the token. All lanes call it; false if the group has
// failed. `waits`: false to look once, and to return whether they have.
__device__ __forceinline__ bool AwaitPartials(const CombineParams& p, const CombineShared& shared,
                                              const RankMask& ranks, int token, int part, uint32_t epoch,
                                              bool waits = true) {
  bool arrived = true;
  ForEachOwnRank(threadIdx.x & 31, p.routing.ranks, [&](int rank) {
    if (!arrived || !Holds(ranks, rank) || rank == p.routing.rank) return;
    const char* half = shared.run.half[p.routing.rank];
    const uint32_t* flag =
        reinterpret_cast<const uint32_t*>(half + p.staging.row_flags) + PartialFlagIndex(p, rank, token, part);
    arrived = waits ? WaitFlag(flag, shared.run, epoch, Step::kRows, rank) : LoadAcquireSystem(flag) == epoch;
  });
  arrived = __all_sync(0xFFFFFFFFu, arrived);
  __syncwarp();  // all lanes may read what one lane has acquired
  return arrived;
}

// Sums as SumPartials does, for a native wire and rows of a multiple of kOctet elements within a node. A warp waits
// only when it has no other token left or kDeferred tokens whose rows have not arrived.
template <class Y, int kSteps>
__device__ __forceinline__ void SumOrDefer(const CombineParams& p, CombineShared& shared, char* ring, uint32_t epoch) {
  const Routing& r = p.routing;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, items = r.tokens * p.schedule.parts;
  Claims claims(&shared.run.control->claimed[static_cast<int>(Work::kPlace)], items,
                items <= static_cast<int>(gridDim.x) * kWarps);
  int* const deferred = shared.deferred[warp];
  uint32_t first = 0, count = 0;
  for (int item = claims.First();;) {
    const bool looks = count > 0, waits = looks && (item >= items || count == kDeferred);
    const int oldest = looks ? deferred[first % kDeferred] : 0;
    const bool has_own = oldest >= 0;
    int now = has_own ? oldest : ~oldest, token = now / p.schedule.parts, part = now % p.schedule.parts;
    RankMask ranks = NoRanks();
    bool finishes = false;
    if (looks) {
      ranks = RanksOf(p.topk_idx, token, r, shared.run.active);
      finishes = AwaitPartials(p, shared, ranks, token, part, epoch, waits);
      if (waits && !finishes) return;
    }
    if (!finishes && item >= items) return;
    const Y* y = static_cast<const Y*>(p.out);
    int own = 0;
    bool defers = false;
    __syncwarp();
    if (finishes) {
      own = has_own ? 1 : 0;
      if (lane == 0) shared.rows[warp][0] = token, shared.weights[warp][0] = 1.0f;
      ++first, --count;
      __syncwarp();
    } else {
      now = item, token = now / p.schedule.parts, part = now % p.schedule.parts;
      ranks = RanksOf(p.topk_idx, token, r, shared.run.active);
      own = GatherRows(p, shared, r.rank, token).count;
      y = static_cast<const Y*>(p.y);
      defers = !AwaitPartials(p, shared, ranks, token, part, epoch, false);
      item = claims.Next();
    }
    if (defers) ranks = ranks & OneRank(r.rank);
    if (!defers || own > 0) {
      const int begin = min(r.hidden, part * p.schedule.part_elements);
      const int end = min(r.hidden, begin + p.schedule.part_elements);
      Y* out = static_cast<Y*>(p.out) + static_cast<int64_t>(token) * r.hidden;
      StreamPartials<Y, kSteps>(p, shared, ring, y, ranks, own, token, begin, end, out);
    }
    if (defers) {
      if (lane == 0) deferred[(first + count) % kDeferred] = own > 0 ? now : ~now;
      ++count;
      __threadfence_block();  // each lane reads back by cp.async what it has stored
      __syncwarp();
    }
  }
}

// kGeneral: every hidden size, and two axes: partial rows are added inside each node first, rounded to the wire, and
// then added over the nodes. `taking`: given if the operation goes through rings.
template <class Y, WireType kWire, int kSteps, bool kGeneral, class Items = Claims, class... Takes>
__device__ __forceinline__ void SumPartials(const CombineParams& p, CombineShared& shared, char* ring, bool vector,
                                            uint32_t epoch, const Takes&... taking) {
  const Routing& r = p.routing;
  const int lane = threadIdx.x & 31;
  const bool nodes_apart = r.ranks_per_node != r.ranks;
  const int items = r.tokens * p.schedule.parts;
  Items claims(&shared.run.control->claimed[static_cast<int>(Work::kPlace)], items,
               items <= static_cast<int>(gridDim.x) * kWarps, taking...);
  for (int item = claims.First(); item < items; item = claims.Next()) {
    const int token = item / p.schedule.parts, part = item % p.schedule.parts;
    const RankMask ranks = RanksOf(p.topk_idx, token, r, shared.run.active);
    const GatheredRows own = GatherRows(p, shared, r.rank, token);
    if (!AwaitPartials(p, shared, ranks, token, part, epoch)) return;
    const int begin = min(r.hidden, part * p.schedule.part_elements);
    const int end = min(r.hidden, begin + p.schedule.part_elements);
    Y* out = static_cast<Y*>(p.out) + static_cast<int64_t>(token) * r.hidden;
    if constexpr (kWire == WireType::kNative && !kGeneral) {
      const Y* y = static_cast<const Y*>(p.y);
      StreamPartials<Y, kSteps>(p, shared, ring, y, ranks, own.count, token, begin, end, out);
    } else if constexpr (!kGeneral) {
      StreamChunks<Y, kWire, kSteps>(p, shared, ring, ranks, own.count, token, begin, end, out);
    } else
      for (int base = begin; base < end; base += kSteps * kWarpElements) {
        Octet total[kSteps], nodes[kGeneral ? kSteps : 1];
        Clear(total);
        if constexpr (kGeneral) Clear(nodes);
        int node = 0;
        auto close_node = [&] {
          if constexpr (kGeneral) {
#pragma unroll
            for (int s = 0; s < kSteps; ++s) Add(nodes[s], RoundToWire<Y, kWire>(total[s], p.ue8m0));
            Clear(total);
          }
        };
        for (RankMask m = ranks; Any(m); DropFirst(m)) {
          const int rank = FirstRank(m);
          if constexpr (kGeneral) {
            if (nodes_apart && rank / r.ranks_per_node != node) {
              close_node();
              node = rank / r.ranks_per_node;
            }
          }
          Octet partial[kSteps];
          if (rank == r.rank) {
            ReduceRows<Y, kSteps>(p, shared, own.count, base, end, vector, partial);
#pragma unroll
            for (int s = 0; s < kSteps; ++s) partial[s] = RoundToWire<Y, kWire>(partial[s], p.ue8m0);
          } else {
            const char* wire =
                shared.run.data[r.rank] + p.staging.rows + StagedRow(r, p.staging, rank, token) * p.staging.row_bytes;
            LoadPartial<Y, kWire, kSteps>(p, wire, base, end, vector, partial);
          }
#pragma unroll
          for (int s = 0; s < kSteps; ++s) Add(total[s], partial[s]);
        }
        if (nodes_apart) close_node();
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          const int e = base + s * kWarpElements + lane * kOctet;
          StoreOctet(out, e, end, vector, Narrow<Y>(kGeneral && nodes_apart ? nodes[kGeneral ? s : 0] : total[s]));
        }
      }
  }
}

// SumPartials through rings; also pushes the rows that PushPartials has left.
template <class Y, WireType kWire, int kSteps, bool kGeneral>
__device__ __forceinline__ void SumInRounds(const CombineParams& p, CombineShared& shared, char* ring, bool vector,
                                            uint32_t epoch) {
  const int parts = p.schedule.parts;
  GoThroughRounds(
      shared.run, shared.signals, p.routing, p.staging, (p.routing.ranks - 1) * parts,
      [&](Signaller& signaller, int item) {
        PushPartial<Y, kWire, kSteps, kGeneral, DirectPush>(p, shared, ring, vector, signaller, item);
      },
      [&](const Rounds& rounds) {
        const Taking taking{rounds, parts};
        SumPartials<Y, kWire, kSteps, kGeneral, RoundClaims>(p, shared, ring, vector, epoch, taking);
      });
}

// Returns the warp steps whose accumulators a warp holds in registers.
template <class Y>
__host__ __device__ constexpr int StepsOf(bool general) {
  return general || sizeof(Y) == 4 ? 2 : 4;
}

template <class Y, WireType kWire, bool kGeneral>
__global__ void __launch_bounds__(kThreads, 1) CombineKernel(const __grid_constant__ CombineParams p) {
  constexpr int kSteps = StepsOf<Y>(kGeneral);
  __shared__ CombineShared shared;
  extern __shared__ __align__(128) char rings[];
  char* ring = rings + threadIdx.x / 32 * RowStream<Y, kSteps>::kRingBytes;
  InitSignalBox(shared.signals);
  AwaitKernelBefore();
  BeginOperation(shared.run, p.call, Operation::kCombine, p.routing.ranks, p.routing.rank);
  if (!shared.run.refused) {
    const uint32_t epoch = shared.run.epoch;
    const bool vector = !kGeneral || p.routing.hidden % kOctet == 0;
    PushPartials<Y, kWire, kSteps, kGeneral>(p, shared, ring, vector, epoch);
    if constexpr (kRings) {
      SumInRounds<Y, kWire, kSteps, kGeneral>(p, shared, ring, vector, epoch);
    } else if constexpr (kWire == WireType::kNative && !kGeneral) {
      SumOrDefer<Y, kSteps>(p, shared, ring, epoch);
    } else {
      SumPartials<Y, kWire, kSteps, kGeneral>(p, shared, ring, vector, epoch);
    }
  }
  FinishOperation(shared.run, [&](uint32_t index, uint32_t count) {
    FillBytes(p.out, static_cast<uint64_t>(p.routing.tokens) * p.routing.hidden * sizeof(Y), kPoison, index, count);
  });
}

}  // namespace xen_moe::XEN_MOE_VARIANT
