// Combine across nodes, in one launch. Within a node it is combine/combine.cuh.
//
// What moves: every expert's rank sums the rows of a token as within a node, and pushes the partial row, over NVLink,
// to the rank of its own node that has the same place as the token's rank. That rank adds the partial rows of its node
// in ascending rank order, its own among them in place, rounds to the wire, and sends one row per token to the token's
// rank, a chunk at a time. The token's rank adds the rows of the nodes in ascending node order: this node's from its
// partial rows, those of other nodes as they arrived. Who does it: the first `push_blocks` blocks push partial rows,
// first those that continue to other nodes; every rank announces for which tokens it has rows (`masks`). After that the
// pushing blocks, and a third of the other blocks from the beginning, add and send for the other nodes; the remaining
// blocks, and those that have finished, sum the tokens of this rank. All warps of a block work on one chunk. Who waits
// for whom: pushing waits for no rank; adding waits for the pushing of this node; summing waits for this node's pushing
// and the other nodes' adding. The first blocks claim each kind of work to its end before they continue: so every wait
// ends, with any number of resident blocks. Memory order: rail.cuh and combine/combine.cuh. The contents of a chunk are
// checked before they become addresses.
#pragma once

#include <type_traits>

#include "cuda_kernels/combine/combine.cuh"
#include "cuda_kernels/core/launch.cuh"
#include "cuda_kernels/node/direct.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

// A partial row goes to the rank of this node with the source's place, and is staged as this rank's row for the
// source's node. If that is this rank, the row is not pushed but added in place.
struct NodeAggregated {
  __device__ __forceinline__ static int Target(const Routing& r, int source) {
    return r.rank / r.ranks_per_node * r.ranks_per_node + source % r.ranks_per_node;
  }
  __device__ __forceinline__ static int Slot(const Routing& r, int source) {
    return source / r.ranks_per_node * r.ranks_per_node + r.rank % r.ranks_per_node;
  }
  // The pairs of a token and a source in any node whose place is not this rank's: sources of other nodes token by
  // token, and then those of this node.
  __device__ __forceinline__ static int Pairs(const Routing& r) {
    return r.ranks / r.ranks_per_node * (r.ranks_per_node - 1) * r.tokens;
  }
  __device__ __forceinline__ static void Pair(const Routing& r, int pair, int* source, int* token) {
    const int per_node = r.ranks_per_node, nodes = r.ranks / per_node, others = per_node - 1;
    const int first = r.rank / per_node, far = (nodes - 1) * others;
    int node = first;
    if (pair < far * r.tokens) {
      *token = pair / far;
      node = first + 1 + pair % far / others;
      if (node >= nodes) node -= nodes;
    } else {
      pair -= far * r.tokens;
      *token = pair / others;
    }
    // `far` is a multiple of `others`.
    *source = node * per_node + (r.rank + 1 + pair % others) % per_node;
  }
  // An inactive rank adds nothing: this rank's rows bypass it (SendOwn).
  __device__ __forceinline__ static bool Takes(const Running& run, int target) { return Holds(run.meets, target); }
};

// Returns whether this block adds for the other nodes before it sums: all pushing blocks do, and a third of the others.
__device__ __forceinline__ bool AddsForNodes(const Schedule& s) {
  return static_cast<int>(blockIdx.x) < s.push_blocks + (s.blocks - s.push_blocks) / 3;
}

__device__ __forceinline__ uint32_t* MaskFlag(char* half, const RailPlan& plan, int slot, int chunk) {
  return reinterpret_cast<uint32_t*>(half + plan.routing_flags) + slot * plan.chunks + chunk;
}
__device__ __forceinline__ uint32_t* MaskOf(char* data, const RailPlan& plan, int slot, int chunk) {
  return reinterpret_cast<uint32_t*>(data + plan.masks) + slot * plan.chunks + chunk;
}

// Returns the tokens of a chunk of `source` that have rows here, to all lanes.
__device__ __forceinline__ uint32_t TokensOfSource(const CombineParams& p, const RailPlan& plan, int source,
                                                   int chunk) {
  const Routing& r = p.routing;
  const int lane = threadIdx.x & 31, token = chunk * plan.chunk_tokens + lane;
  bool belongs = false;
  if (lane < TokensOf(plan, chunk, r.tokens)) {
    const int* const positions = p.positions + (static_cast<int64_t>(source) * r.tokens + token) * r.slots;
    for (int slot = 0; slot < r.slots; ++slot) belongs |= positions[slot] != -1;
  }
  return __ballot_sync(0xFFFFFFFFu, belongs);
}

// Sends each rank of this node that adds for a source the mask of that source's tokens with rows here.
__device__ __forceinline__ void SendMasks(const CombineParams& p, const CombineShared& shared, const RailPlan& plan) {
  const Routing& r = p.routing;
  const int lane = threadIdx.x & 31, others = r.ranks - plan.per_node, items = others * plan.chunks;
  Claims claims(&shared.run.control->claimed[static_cast<int>(Work::kRailSend)], items, false);
  for (int item = claims.First(); item < items; item = claims.Next()) {
    const int chunk = item / others, n = item % others;
    const int source = n < plan.node * plan.per_node ? n : n + plan.per_node;
    const int target = NodeAggregated::Target(r, source), slot = NodeAggregated::Slot(r, source);
    if (!Holds(shared.run.active, source) || !NodeAggregated::Takes(shared.run, target)) continue;
    const uint32_t mask = TokensOfSource(p, plan, source, chunk);
    if (lane == 0) {
      *MaskOf(shared.run.data[target], plan, slot, chunk) = mask;
      __threadfence_system();
      StoreRelaxedSystem(MaskFlag(shared.run.half[target], plan, slot, chunk), shared.run.epoch);
    }
  }
}

// All lanes call it: waits for a part of a token's partial row from the ranks of this node, given by their places and
// staged in the slots from `slots` on. Returns false if the group has failed.
__device__ __forceinline__ bool AwaitPartials(const CombineParams& p, const CombineShared& shared, const RailPlan& plan,
                                              int slots, const RankMask& places, int token, int part) {
  bool arrived = true;
  ForEachOwnRank(threadIdx.x & 31, plan.per_node, [&](int place) {
    if (!arrived || !Holds(places, place)) return;
    const uint32_t* flags = reinterpret_cast<const uint32_t*>(shared.run.half[p.routing.rank] + p.staging.row_flags);
    arrived = WaitFlag(flags + PartialFlagIndex(p, slots + place, token, part), shared.run, shared.run.epoch,
                       Step::kRows, plan.node * plan.per_node + place);
  });
  arrived = __all_sync(0xFFFFFFFFu, arrived);
  __syncwarp();  // all lanes may read what one lane has acquired
  return arrived;
}
__device__ __forceinline__ const char* StagedPartial(const CombineParams& p, const CombineShared& shared, int slot,
                                                     int token) {
  return shared.run.data[p.routing.rank] + p.staging.rows +
         (static_cast<uint64_t>(slot) * p.routing.tokens + token) * p.staging.row_bytes;
}

// Stores kSteps steps of a row in the wire's format, octets in the order of their elements.
template <class Y, WireType kWire, int kSteps>
__device__ __forceinline__ void StoreWire(const CombineParams& p, char* wire, int base, int end, bool vector,
                                          const Octet (&values)[kSteps]) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int e = base + s * kWarpElements + static_cast<int>(threadIdx.x & 31) * kOctet;
    if constexpr (kWire == WireType::kNative) {
      StoreOctet(reinterpret_cast<Y*>(wire), e, end, vector, Narrow<Y>(values[s]));
    } else {
      StoreQuantized<kWire>(wire, p.staging.scale_offset, e, end, Quantize<kWire>(values[s], p.ue8m0));
    }
  }
}

// out = sum over the nodes, ascending, of this node's total and the rows `far_row(node)` of the nodes `far`. The total
// is the sum over the places of this node, ascending, of the partial rows of `places` (staged in the slots from `slots`
// on) and of this rank's own `own` gathered rows. Without kFar, out is the total alone. All rows have the format of y.
template <class Y, int kSteps, bool kFar, class FarRow>
__device__ __forceinline__ void StreamNodes(const CombineParams& p, CombineShared& shared, const RailPlan& plan,
                                            char* ring, const RankMask& places, int slots, int own, uint32_t far,
                                            int token, int begin, int end, Y* out, FarRow far_row) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const RankMask low = places & RanksBelow(plan.index), high = places & RanksAbove(plan.index);
  const uint32_t before = far & ((1u << plan.node) - 1), after = far & ~before;
  // Entries: nodes before, places below, own rows, places above, nodes after.
  const int first_near = __popc(before), first_own = first_near + CountRanks(low), last_own = first_own + own;
  const int near_end = last_own + CountRanks(high), rows = near_end + __popc(after);
  RankIndex* const sources = shared.sources[warp];
  __syncwarp();
  if (before >> lane & 1) sources[__popc(before & ((1u << lane) - 1))] = lane;
  if (after >> lane & 1) sources[near_end - own + __popc(after & ((1u << lane) - 1))] = lane;
  ForEachOwnRank(lane, plan.per_node, [&](int place) {
    if (Holds(low, place)) sources[first_near + CountRanks(low & RanksBelow(place))] = place;
    if (Holds(high, place)) sources[first_own + CountRanks(high & RanksBelow(place))] = place;
  });
  __syncwarp();
  const Y* const y = static_cast<const Y*>(p.y);
  auto row_of = [&](int i) {
    if (i >= first_own && i < last_own)
      return y + static_cast<int64_t>(shared.rows[warp][i - first_own]) * p.routing.hidden;
    const int source = sources[i < first_own ? i : i - own];
    if (kFar && (i < first_near || i >= near_end)) return reinterpret_cast<const Y*>(far_row(source));
    return reinterpret_cast<const Y*>(StagedPartial(p, shared, slots + source, token));
  };
  Octet sum[kSteps], total[kSteps], partial[kSteps];
  auto clear = [&](int) {
    if constexpr (kFar) Clear(sum);
    Clear(total);
    Clear(partial);
  };
  auto add = [&](int i, const RawOctet<Y>(&raw)[kSteps]) {
    if (i >= first_own && i < last_own) {
      AddRows(partial, raw, shared.weights[warp][i - first_own]);
    } else if (kFar && (i < first_near || i >= near_end)) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) Add(sum[s], Widen(raw[s]));
    } else {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) Add(total[s], Widen(raw[s]));
    }
  };
  auto after_row = [&](int i) {
    if (own > 0 && i == last_own - 1) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) Add(total[s], Widen(Narrow<Y>(partial[s])));
    }
    if (kFar && near_end > first_near && i == near_end - 1) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) Add(sum[s], Widen(Narrow<Y>(total[s])));
    }
  };
  auto store = [&](int base) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      StoreOctet(out, base + s * kWarpElements + lane * kOctet, end, true, Narrow<Y>(kFar ? sum[s] : total[s]));
    }
  };
  RowStream<Y, kSteps>::Run(ring, rows, begin, end, row_of, clear, add, after_row, store);
}

// total = the sum over the places of this node, ascending, as in StreamNodes, for kSteps steps from element `base` on.
// It takes every hidden size and wire.
template <class Y, WireType kWire, int kSteps>
__device__ __forceinline__ void AddNode(const CombineParams& p, CombineShared& shared, const RailPlan& plan,
                                        bool vector, const RankMask& places, int slots, int own, int token, int base,
                                        int end, Octet (&total)[kSteps]) {
  Clear(total);
  for (RankMask m = places; Any(m); DropFirst(m)) {
    Octet partial[kSteps];
    const int place = FirstRank(m);
    if (place == plan.index) {
      ReduceRows<Y, kSteps>(p, shared, own, base, end, vector, partial);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) partial[s] = RoundToWire<Y, kWire>(partial[s], p.ue8m0);
    } else {
      LoadPartial<Y, kWire, kSteps>(p, StagedPartial(p, shared, slots + place, token), base, end, vector, partial);
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) Add(total[s], partial[s]);
  }
}

// Sends this rank's own partial rows for a chunk of `to`, bypassing the inactive rank of this node that would add them.
template <class Y, WireType kWire, int kSteps, class Link>
__device__ __noinline__ void SendOwn(const CombineParams& p, CombineShared& shared, const Rail<Link>& rail, bool vector,
                                     int to, int chunk) {
  const uint32_t tokens = TokensOfSource(p, rail.plan, to, chunk);
  EachOwnRecord(rail.plan, chunk, tokens, [&](int record, int token) {
    const GatheredRows rows = GatherRows(p, shared, to, token);
    char* const wire = shared.run.data[p.routing.rank] + rail.SentRecord(to, chunk, record);
    for (int base = 0; base < p.routing.hidden; base += kSteps * kWarpElements) {
      Octet partial[kSteps];
      ReduceRows<Y, kSteps>(p, shared, rows.count, base, p.routing.hidden, vector, partial);
      StoreWire<Y, kWire, kSteps>(p, wire, base, p.routing.hidden, vector, partial);
    }
  });
  __syncthreads();
  if (threadIdx.x < 32) rail.Send(to, chunk, tokens);
}

// Adds the partial rows of this node for the tokens of ranks on other nodes, and sends them.
template <class Y, WireType kWire, int kSteps, class Link>
__device__ __forceinline__ void SendSums(const CombineParams& p, CombineShared& shared, const Rail<Link>& rail,
                                         char* ring, bool vector) {
  const Routing& r = p.routing;
  const RailPlan& plan = rail.plan;
  const int lane = threadIdx.x & 31, turns = rail.Turns(), items = turns * plan.chunks;
  uint32_t* const counter = &shared.run.control->claimed[static_cast<int>(Work::kRailReceive)];
  for (int item; (item = BlockClaim(counter, 1)) < items;) {
    const int chunk = item / turns, to = rail.RankTo(item % turns), slots = to / plan.per_node * plan.per_node;
    if (!rail.Goes(to, r.rank)) continue;
    if (!rail.OnRail(to)) {
      SendOwn<Y, kWire, kSteps>(p, shared, rail, vector, to, chunk);
      continue;
    }
    bool arrived = true;
    auto takes = [&](int place) { return place < plan.per_node && rail.Takes(plan.node * plan.per_node + place); };
    auto mask_of = [&](int place) {
      return LoadRelaxedSystem(MaskOf(shared.run.data[r.rank], plan, slots + place, chunk));
    };
    if (threadIdx.x < 32) {
      ForEachOwnRank(lane, plan.per_node, [&](int place) {
        if (!arrived || !takes(place)) return;
        arrived = WaitFlag(MaskFlag(shared.run.half[r.rank], plan, slots + place, chunk), shared.run, shared.run.epoch,
                           Step::kMetadata, plan.node * plan.per_node + place);
      });
    }
    if (!__syncthreads_and(arrived)) return;
    uint32_t mask = 0;  // of this lane's places together
    ForEachOwnRank(lane, plan.per_node, [&](int place) {
      if (takes(place)) mask |= mask_of(place);
    });
    const uint32_t tokens = __reduce_or_sync(0xFFFFFFFFu, mask);
    EachOwnRecord(plan, chunk, tokens, [&](int record, int token) {
      if (!arrived) return;
      const int bit = token - chunk * plan.chunk_tokens;
      const RankMask adds = RankVotes(lane, plan.per_node, [&](int place) {
                              return takes(place) && (kLargeGroups ? mask_of(place) : mask) >> bit & 1;
                            }).Ballot();
      const RankMask others = adds & ~OneRank(plan.index);
      const GatheredRows own = GatherRows(p, shared, to, token);
      char* const wire = shared.run.data[r.rank] + rail.SentRecord(to, chunk, record);
      for (int part = 0; part < p.schedule.parts; ++part) {
        if (!(arrived = AwaitPartials(p, shared, plan, slots, others, token, part))) return;
        const int begin = min(r.hidden, part * p.schedule.part_elements);
        const int end = min(r.hidden, begin + p.schedule.part_elements);
        if constexpr (kWire == WireType::kNative) {
          if (vector) {
            StreamNodes<Y, kSteps, false>(p, shared, plan, ring, others, slots, own.count, 0, token, begin, end,
                                          reinterpret_cast<Y*>(wire), [](int) -> const char* { return nullptr; });
            continue;
          }
        }
        for (int base = begin; base < end; base += kSteps * kWarpElements) {
          Octet total[kSteps];
          AddNode<Y, kWire, kSteps>(p, shared, plan, vector, adds, slots, own.count, token, base, end, total);
          StoreWire<Y, kWire, kSteps>(p, wire, base, end, vector, total);
        }
      }
    });
    if (!__syncthreads_and(arrived)) return;
    if (threadIdx.x < 32) rail.Send(to, chunk, tokens);
  }
}

// Data about the current chunk that the warps of a block share.
struct ArrivedShared {
  uint32_t came[kLargeGroups ? kRanks : 32];  // by rail.Place(rank): tokens that the rank has sent a row for
};
// ArrivedShared::came as all lanes of a warp hold it: each lane's own word or, if there may be more ranks than lanes, a
// pointer to the words.
using Came = std::conditional_t<kLargeGroups, const uint32_t*, uint32_t>;
template <class T = Came>
__device__ __forceinline__ T CameOf(const ArrivedShared& arrivals) {
  if constexpr (std::is_pointer_v<T>) {
    return arrivals.came;
  } else {
    return arrivals.came[threadIdx.x & 31];
  }
}
__device__ __forceinline__ uint32_t CameFrom(const uint32_t* came, int place) { return came[place]; }
__device__ __forceinline__ uint32_t CameFrom(uint32_t came, int place) { return __shfl_sync(0xFFFFFFFFu, came, place); }
// Returns the nodes whose rank on this rail has sent a row for a token: bit FarBit(rail, node) each.
template <class Link>
__device__ __forceinline__ uint32_t FarNodes(const Rail<Link>& rail, const uint32_t* came, int bit) {
  const int node = threadIdx.x & 31;
  const bool sent = node < rail.plan.nodes && came[rail.Place(rail.RankOn(node))] >> bit & 1;
  return __ballot_sync(0xFFFFFFFFu, sent);
}
template <class Link>
__device__ __forceinline__ uint32_t FarNodes(const Rail<Link>&, uint32_t came, int bit) {
  return __ballot_sync(0xFFFFFFFFu, came >> bit & 1);
}
template <class Link>
__device__ __forceinline__ int FarBit(const Rail<Link>& rail, int node) {
  return kLargeGroups ? node : rail.Place(rail.RankOn(node));
}

// partial = the rows of node `node`, whose rank on the rail is inactive, as the node's ranks have sent them: added and
// rounded as that rank would have done. `came`: the tokens that each rank has sent a row for.
template <class Y, WireType kWire, int kSteps, class Link>
__device__ __noinline__ void AddFar(const CombineParams& p, const CombineShared& shared, const Rail<Link>& rail,
                                    bool vector, int node, int chunk, int bit, Came came, int base, int end,
                                    Octet (&partial)[kSteps]) {
  Octet total[kSteps];
  Clear(total);
  for (int rank = node * rail.plan.per_node; rank < (node + 1) * rail.plan.per_node; ++rank) {
    const uint32_t tokens = CameFrom(came, rank);
    if (!(tokens >> bit & 1)) continue;
    const int record = __popc(tokens & ((1u << bit) - 1));
    const char* const row = shared.run.data[p.routing.rank] + rail.ArrivedRecord(rank, chunk, record);
    LoadPartial<Y, kWire, kSteps>(p, row, base, end, vector, partial);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) Add(total[s], partial[s]);
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) partial[s] = RoundToWire<Y, kWire>(total[s], p.ue8m0);
}

// Sums the tokens of this rank.
template <class Y, WireType kWire, int kSteps, class Link>
__device__ __forceinline__ void SumNodes(const CombineParams& p, CombineShared& shared, const Rail<Link>& rail,
                                         ArrivedShared& arrivals, char* ring, bool vector) {
  const Routing& r = p.routing;
  const RailPlan& plan = rail.plan;
  const int lane = threadIdx.x & 31, items = plan.chunks, first = plan.node * plan.per_node;
  uint32_t* const counter = &shared.run.control->claimed[static_cast<int>(Work::kPlace)];
  auto await = [&](int chunk) {
    for (int place = lane; place < static_cast<int>(sizeof(arrivals.came) / 4); place += 32) arrivals.came[place] = 0;
    __syncwarp();
    for (int turn = 0; turn < rail.Turns(); ++turn) {
      const int from = rail.RankFrom(turn);
      uint32_t tokens = 0;
      if (!rail.Goes(r.rank, from)) continue;
      if (!rail.Await(from, chunk, &tokens)) return false;
      if (lane == 0) arrivals.came[rail.Place(from)] = tokens;
    }
    return true;
  };
  for (int chunk; (chunk = BlockClaim(counter, 1)) < items;) {
    bool arrived = threadIdx.x >= 32 || await(chunk);
    if (!__syncthreads_and(arrived)) return;
    const Came came = CameOf(arrivals);
    EachOwnRecord(plan, chunk, ExistingTokens(plan, chunk, r.tokens), [&](int bit, int token) {
      if (!arrived) return;
      const RankMask near = RanksOf(p.topk_idx, token, r, shared.run.meets);
      const RankMask places = Shifted(near, first), others = Shifted(near & ~OneRank(r.rank), first);
      const uint32_t far = FarNodes(rail, came, bit);
      const GatheredRows own = GatherRows(p, shared, r.rank, token);
      auto far_row = [&](int node) -> const char* {
        const int from = rail.RankOn(node);
        const uint32_t before = arrivals.came[rail.Place(from)] & ((1u << bit) - 1);
        return shared.run.data[r.rank] + rail.ArrivedRecord(from, chunk, __popc(before));
      };
      Y* const out = static_cast<Y*>(p.out) + static_cast<int64_t>(token) * r.hidden;
      for (int part = 0; part < p.schedule.parts; ++part) {
        if (!(arrived = AwaitPartials(p, shared, plan, first, others, token, part))) return;
        const int begin = min(r.hidden, part * p.schedule.part_elements);
        const int end = min(r.hidden, begin + p.schedule.part_elements);
        if constexpr (kWire == WireType::kNative) {
          if (vector && !plan.masked) {
            StreamNodes<Y, kSteps, true>(p, shared, plan, ring, others, first, own.count, far, token, begin, end, out,
                                         far_row);
            continue;
          }
        }
        for (int base = begin; base < end; base += kSteps * kWarpElements) {
          Octet sum[kSteps], total[kSteps], partial[kSteps];
          Clear(sum);
          for (int node = 0; node < plan.nodes; ++node) {
            if (node == plan.node) {
              AddNode<Y, kWire, kSteps>(p, shared, plan, vector, places, first, own.count, token, base, end, total);
#pragma unroll
              for (int s = 0; s < kSteps; ++s) partial[s] = RoundToWire<Y, kWire>(total[s], p.ue8m0);
            } else if (plan.masked && !rail.Takes(rail.RankOn(node))) {
              AddFar<Y, kWire, kSteps>(p, shared, rail, vector, node, chunk, bit, came, base, end, partial);
            } else if (far >> FarBit(rail, node) & 1) {
              LoadPartial<Y, kWire, kSteps>(p, far_row(node), base, end, vector, partial);
            } else {
              continue;
            }
#pragma unroll
            for (int s = 0; s < kSteps; ++s) Add(sum[s], partial[s]);
          }
#pragma unroll
          for (int s = 0; s < kSteps; ++s) {
            StoreOctet(out, base + s * kWarpElements + lane * kOctet, end, vector, Narrow<Y>(sum[s]));
          }
        }
      }
    });
    if (!__syncthreads_and(arrived)) return;
  }
}

template <class Y, WireType kWire, class Link>
__global__ void __launch_bounds__(kThreads, 1)
    NodeCombineKernel(const __grid_constant__ CombineParams p, const __grid_constant__ RailParams rails,
                      const __grid_constant__ Link link) {
  constexpr int kSteps = StepsOf<Y>(true);
  __shared__ CombineShared shared;
  __shared__ ArrivedShared arrivals;
  extern __shared__ __align__(128) char rings[];
  char* ring = rings + threadIdx.x / 32 * RowStream<Y, kSteps>::kRingBytes;
  InitSignalBox(shared.signals);
  BeginOperation(shared.run, p.call, Operation::kCombine, p.routing.ranks, p.routing.rank,
                 NodeMask(rails.plan, rails.plan.node), JoinBarrier<Link>(rails, link, shared.run));
  const Rail<Link> rail(rails, link, shared.run, p.staging.data_bytes);
  if (!shared.run.refused) {
    const bool vector = p.routing.hidden % kOctet == 0;
    SendMasks(p, shared, rails.plan);
    PushPartials<Y, kWire, kSteps, true, NodeAggregated>(p, shared, ring, vector, shared.run.epoch);
    if (AddsForNodes(p.schedule)) SendSums<Y, kWire, kSteps>(p, shared, rail, ring, vector);
    SumNodes<Y, kWire, kSteps>(p, shared, rail, arrivals, ring, vector);
    rail.Leave(p.call);
  }
  FinishOperation(shared.run, [&](uint32_t index, uint32_t count) {
    if (index == 0 && threadIdx.x == 0) rail.PutFailure();
    FillBytes(p.out, static_cast<uint64_t>(p.routing.tokens) * p.routing.hidden * sizeof(Y), kPoison, index, count);
  });
}

// Returns a cudaError_t. `p.staging` as PlanRail has completed it.
template <class Y, WireType kWire, class Link>
int LaunchNodeCombine(const CombineParams& p, const RailParams& rails, const Link& link, cudaStream_t stream) {
  if (Unfit(p) || UnfitRail(p.call, p.routing, p.schedule, rails.plan) || p.schedule.low_latency ||
      p.routing.ranks > kRanks) {
    return cudaErrorInvalidValue;
  }
  const int rings = kWarps * RingStages() * RowStream<Y, StepsOf<Y>(true)>::kChunkBytes;
  return Launch(NodeCombineKernel<Y, kWire, Link>, p.schedule.blocks, kThreads, rings, stream, p, rails, link);
}
template <class Y, WireType kWire, class Link>
int PreloadNodeCombine() {
  const int rings = kWarps * RingStages() * RowStream<Y, StepsOf<Y>(true)>::kChunkBytes;
  return LoadKernel(NodeCombineKernel<Y, kWire, Link>, rings);
}

}  // namespace xen_moe::XEN_MOE_VARIANT
