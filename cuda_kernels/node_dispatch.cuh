// Dispatch across nodes, in one launch. Within a node it is dispatch.cuh.
//
// What moves: a token that has experts on another node goes there once, with its routing, to the rank of that node with
// this rank's place; that one stores it into the staging rows of all ranks of its node that want it, its own among
// them, and raises their flags, as if the token's rank had pushed it. From there on everything is as within a node.
// Who does it: every block packs and sends chunks, then takes its part of the pushing within the node, then forwards
// chunks that come from other nodes, then computes positions and places rows. Who waits for whom: packing, sending and
// pushing wait for nobody; forwarding waits for the chunk's sender; the others as in dispatch.cuh. Chunks are claimed,
// and all of them before their block goes on to wait for others: so every wait ends, with any number of resident
// blocks. Memory order: rail.cuh and dispatch.cuh. What a chunk says is checked before it becomes an address: tokens by
// their number in the block, experts by their range.
#pragma once

#include "direct.cuh"
#include "dispatch.cuh"

namespace XEN_MOE_KERNELS {

// Bit mask of the tokens of a chunk that have an expert on one of `ranks`, to all lanes.
__device__ __forceinline__ uint32_t TokensFor(const Routing& r, const RailPlan& plan, const int* topk_idx, int chunk,
                                              const RankMask& ranks) {
  const int lane = threadIdx.x & 31;
  bool goes = false;
  if (lane < TokensOf(plan, chunk, r.tokens)) {
    const int* const experts = topk_idx + static_cast<int64_t>(chunk * plan.chunk_tokens + lane) * r.top_k;
    for (int k = 0; k < r.top_k; ++k) {
      const int expert = experts[k];
      goes |= expert >= 0 && expert < r.experts && Holds(ranks, expert / r.local_experts);
    }
  }
  return __ballot_sync(0xFFFFFFFFu, goes);
}

// Packs and sends the chunks of all other nodes.
template <class Codec, class Link>
__device__ __forceinline__ void SendChunks(const DispatchParams& p, const DispatchShared& shared,
                                           const Rail<Link>& rail) {
  const Routing& r = p.routing;
  const int lane = threadIdx.x & 31, turns = rail.Turns(), items = turns * rail.plan.chunks;
  Claims claims(&shared.run.control->claimed[static_cast<int>(Work::kRailSend)], items, false);
  for (int item = claims.First(); item < items; item = claims.Next()) {
    const int chunk = item / turns, to = rail.RankTo(item % turns);
    if (!rail.Goes(r.rank, to)) continue;
    const RankMask node = NodeMask(rail.plan, to / rail.plan.per_node) & shared.run.active;
    const uint32_t tokens = TokensFor(r, rail.plan, p.topk_idx, chunk, rail.OnRail(to) ? node : OneRank(to));
    int record = 0;
    for (uint32_t m = tokens; m; m &= m - 1, ++record) {
      const int token = chunk * rail.plan.chunk_tokens + __ffs(m) - 1;
      const uint64_t at = rail.SentRecord(to, chunk, record);
      const Targets own{TurnedRanks::Only(r.rank, r.ranks), shared.run.data, at};
      for (int part = 0; part < p.schedule.parts; ++part)
        Codec::Push(p, token, PartOf(part, p.schedule, r.hidden), own);
      int* const routing = reinterpret_cast<int*>(shared.run.data[r.rank] + at + rail.plan.routing_offset);
      for (int k = lane; k < r.top_k; k += 32) {
        const int64_t entry = static_cast<int64_t>(token) * r.top_k + k;
        routing[k] = p.topk_idx[entry];
        reinterpret_cast<float*>(routing)[r.top_k + k] = p.topk_weights ? p.topk_weights[entry] : 0.0f;
      }
    }
    rail.Send(to, chunk, tokens);
  }
}

__device__ __forceinline__ uint32_t* RoutingFlag(char* half, const RailPlan& plan, int source, int chunk) {
  return reinterpret_cast<uint32_t*>(half + plan.routing_flags) + source * plan.chunks + chunk;
}

// Says to the ranks `to` that the routing of a chunk has come.
__device__ __forceinline__ void RaiseRouting(const DispatchShared& shared, const RailPlan& plan, int source, int chunk,
                                             const RankMask& to) {
  __threadfence_system();
  __syncwarp();
  EachOwnRank(threadIdx.x & 31, shared.run.ranks, [&](int rank) {
    if (!Holds(to, rank)) return;
    StoreRelaxedSystem(RoutingFlag(shared.run.half[rank], plan, source, chunk), shared.run.epoch);
  });
}

// The routing of a chunk's tokens, to the ranks `to` of this node. Tokens that do not come here have no experts there.
__device__ __forceinline__ void ForwardRouting(const DispatchParams& p, const DispatchShared& shared,
                                               const RailPlan& plan, int source, int chunk, uint32_t tokens,
                                               const char* records, const RankMask& to) {
  const Routing& r = p.routing;
  const int lane = threadIdx.x & 31, entries = TokensOf(plan, chunk, r.tokens) * r.top_k;
  const int64_t first = (static_cast<int64_t>(source) * r.tokens + chunk * plan.chunk_tokens) * r.top_k;
  for (int i = lane; i < entries; i += 32) {
    const int token = i / r.top_k, k = i % r.top_k;
    const bool comes = tokens >> token & 1;
    const char* const record = records + __popc(tokens & ((1u << token) - 1)) * plan.record_bytes;
    const int* const routing = reinterpret_cast<const int*>(record + plan.routing_offset);
    const int expert = comes ? routing[k] : -1;
    const float weight = comes ? reinterpret_cast<const float*>(routing)[r.top_k + k] : 0.0f;
    for (RankMask m = to; Any(m); DropFirst(m)) {
      char* const data = shared.run.data[FirstRank(m)];
      reinterpret_cast<int*>(data + p.staging.topk_idx)[first + i] = expert;
      reinterpret_cast<float*>(data + p.staging.topk_weights)[first + i] = weight;
    }
  }
  RaiseRouting(shared, plan, source, chunk, to);
}

// Forwards what comes from the other nodes, chunk by chunk.
template <class Link>
__device__ __forceinline__ void ForwardChunks(const DispatchParams& p, const DispatchShared& shared,
                                              const Rail<Link>& rail) {
  const Routing& r = p.routing;
  const RailPlan& plan = rail.plan;
  const int lane = threadIdx.x & 31, turns = rail.Turns(), items = turns * plan.chunks;
  Claims claims(&shared.run.control->claimed[static_cast<int>(Work::kRailReceive)], items, false);
  for (int item = claims.First(); item < items; item = claims.Next()) {
    const int chunk = item / turns, source = rail.RankFrom(item % turns);
    if (!rail.Goes(source, r.rank)) continue;
    uint32_t tokens = 0;
    if (!rail.Await(source, chunk, &tokens)) return;
    const RankMask here = rail.OnRail(source) ? shared.run.meets : OneRank(r.rank);
    const int count = TokensOf(plan, chunk, r.tokens);
    if (count < 32) tokens &= (1u << count) - 1;
    const char* const records = shared.run.data[r.rank] + rail.LandedRecord(source, chunk, 0);
    if (!p.known_positions) {
      ForwardRouting(p, shared, plan, source, chunk, tokens, records, here);
    } else if (chunk == 0) {
      RaiseRouting(shared, plan, source, chunk, here);
    }
    int n = 0;
    for (uint32_t m = tokens; m; m &= m - 1, ++n) {
      const int token = chunk * plan.chunk_tokens + __ffs(m) - 1;
      const char* const record = records + n * plan.record_bytes;
      const int* const routing = reinterpret_cast<const int*>(record + plan.routing_offset);
      const RankMask ranks = RanksOf(routing, 0, r, here);
      const uint64_t row = p.staging.rows + (static_cast<uint64_t>(source) * r.tokens + token) * p.staging.row_bytes;
      CopyCodec<int4>::Copy(reinterpret_cast<const int4*>(record), static_cast<int>(p.staging.row_bytes / 16),
                            [&](auto store) {
                              for (RankMask to = ranks; Any(to); DropFirst(to)) {
                                store(reinterpret_cast<int4*>(shared.run.data[FirstRank(to)] + row));
                              }
                            });
      __threadfence_system();
      __syncwarp();
      EachOwnRank(lane, r.ranks, [&](int rank) {
        if (!Holds(ranks, rank)) return;
        uint32_t* const flags = reinterpret_cast<uint32_t*>(shared.run.half[rank] + p.staging.row_flags);
        for (int part = 0; part < p.schedule.parts; ++part) {
          StoreRelaxedSystem(flags + RowFlagIndex(p, source, token, part), shared.run.epoch);
        }
      });
    }
  }
}

// That the first `chunks` chunks of all ranks of other nodes have come to this one. All threads of the block call it.
__device__ __forceinline__ bool AwaitFar(const DispatchParams& p, const DispatchShared& shared, const RailPlan& plan,
                                         int chunks) {
  const Routing& r = p.routing;
  bool arrived = true;
  for (int i = threadIdx.x; i < r.ranks * chunks && arrived; i += kThreads) {
    const int source = i / chunks;
    if (source / plan.per_node == plan.node || !Holds(shared.run.active, source)) continue;
    const uint32_t* flag = RoutingFlag(shared.run.half[r.rank], plan, source, i % chunks);
    arrived = WaitFlag(flag, shared.run, shared.run.epoch, Step::kMetadata, source);
  }
  return __syncthreads_and(arrived);
}

template <class Codec, class Link>
__global__ void __launch_bounds__(kThreads, 1)
    NodeDispatchKernel(const __grid_constant__ DispatchParams p, const __grid_constant__ RailParams rails,
                       const __grid_constant__ Link link) {
  __shared__ DispatchShared shared;
  extern __shared__ __align__(128) int dynamic[];
  InitSignalBox(shared.signals);
  BeginOperation(shared.run, p.call, p.known_positions ? Operation::kRedispatch : Operation::kDispatch, p.routing.ranks,
                 p.routing.rank, NodeMask(rails.plan, rails.plan.node), Meeting<Link>(rails, link, shared.run));
  const Rail<Link> rail(rails, link, shared.run, p.staging.data_bytes);
  if (!shared.run.refused) {
    SendChunks<Codec>(p, shared, rail);
    Send<Codec>(p, shared, shared.run.epoch);
    ForwardChunks(p, shared, rail);
    int* starts;
    LayoutScratch scratch = MakeScratch(shared.run.scratch, p.routing, p.schedule);
    auto await = [&] {  // the routing of all ranks
      return AwaitMetadata(p, shared, shared.run.epoch) && AwaitFar(p, shared, rails.plan, rails.plan.chunks);
    };
    if (ComputePositions(p, shared, dynamic, scratch, &starts, await)) {
      PlaceRows<Codec>(p, shared, scratch, starts, shared.run.epoch);
      ZeroPadding(p, scratch, starts, blockIdx.x, gridDim.x);
      ClearUnusedRows(p, scratch, blockIdx.x, gridDim.x);
    }
    if (p.known_positions && blockIdx.x == gridDim.x - 1) {
      if (Any(shared.run.active)) CheckCounts(p, shared.run);
      AwaitFar(p, shared, rails.plan, 1);  // rail_plan.h says what for
    }
    rail.Leave(p.call);
  }
  FinishOperation(shared.run, [&](uint32_t index, uint32_t count) {
    if (index == 0 && threadIdx.x == 0) rail.TellFailure();
    PoisonDispatch(p, index, count);
  });
}

// A cudaError_t. `p.staging` as PlanRail has completed it.
template <class Codec, class Link>
int LaunchNodeDispatch(const DispatchParams& p, const RailParams& rails, const Link& link, cudaStream_t stream) {
  if (Unfit(p) || UnfitRail(p.call, p.routing, p.schedule, rails.plan) || p.schedule.low_latency ||
      p.routing.ranks > kRanks) {
    return cudaErrorInvalidValue;
  }
  NodeDispatchKernel<Codec, Link><<<p.schedule.blocks, kThreads, kLayoutSharedBytes, stream>>>(p, rails, link);
  return cudaGetLastError();
}

}  // namespace XEN_MOE_KERNELS
