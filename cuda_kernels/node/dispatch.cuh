// Dispatch across nodes, in one launch. Within a node it is dispatch/dispatch.cuh.
//
// What moves: a token that has experts on another node goes there once, to the rank of that node with this rank's
// place. That rank stores it into the staging rows of all ranks of its node that need it, its own among them, and
// raises their flags, as if the token's rank had pushed it. The routing of these tokens is sent ahead, in leads: so
// positions are known, and rows placed, while most rows are still on their way, and only the slow link takes time. From
// there on everything is as within a node. Who does it: every block, with all its warps on one message, packs and sends
// leads and then chunks. The first blocks push within the node; half of them and the last blocks forward chunks; every
// block forwards leads, computes positions and places rows, those of this node first. Who waits for whom: packing,
// sending and pushing wait for no rank; forwarding waits for the chunk's sender, and for the block here that forwards
// its lead; all else as in dispatch/dispatch.cuh. Messages are claimed, and the first blocks claim all of them before
// they wait for other ranks: so every wait ends, with any number of resident blocks. Memory order: rail.cuh and
// dispatch/dispatch.cuh. The contents of a message are checked before they become addresses: tokens by their number in
// the block, experts by their range.
#pragma once

#include "cuda_kernels/core/launch.cuh"
#include "cuda_kernels/dispatch/dispatch.cuh"
#include "cuda_kernels/node/direct.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

// Data about the current message that the warps of a block share: the tokens of its chunks.
struct MessageShared {
  uint32_t tokens[kLeadChunks];
};

// Returns whether a block forwards chunks before it places rows: the first blocks, which then push within the node, and
// the last blocks do. A chunk takes about 10 us of a block's time, most of it waiting for memory, and a network of 50
// GB/s delivers a chunk of fp8 rows every 1 to 2 us.
__device__ __forceinline__ bool ForwardsFirst(const Schedule& s) {
  return static_cast<int>(blockIdx.x) < max(1, s.push_blocks / 2);
}
__device__ __forceinline__ bool ForwardsLast(const Schedule& s) {
  return static_cast<int>(blockIdx.x) >= s.blocks - (s.blocks - s.push_blocks) / 4;
}

// Returns the tokens of a chunk that have an expert on one of `ranks`, to all lanes.
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
// Calls f(chunk, tokens, record) for the chunks of a lead that are assigned to this warp; `record`: that of the chunk's
// first token. Returns the records of all chunks together.
template <class F>
__device__ __forceinline__ int EachOwnChunk(const RailPlan& plan, int lead, const uint32_t* tokens, F f) {
  const int warp = threadIdx.x / 32, first = lead * kLeadChunks;
  int records = 0;
  for (int i = 0; i < kLeadChunks && first + i < plan.chunks; ++i) {
    if (i % kWarps == warp) f(first + i, tokens[i], records);
    records += __popc(tokens[i]);
  }
  return records;
}

// Packs and sends the routing of a lead's tokens.
template <class Link>
__device__ __forceinline__ void SendLead(const DispatchParams& p, const DispatchShared& shared, const Rail<Link>& rail,
                                         MessageShared& message, const RankMask& ranks, int to, int lead) {
  const Routing& r = p.routing;
  const RailPlan& plan = rail.plan;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  for (int i = warp; i < kLeadChunks; i += kWarps) {
    const int chunk = lead * kLeadChunks + i;
    const uint32_t tokens = chunk < plan.chunks ? TokensFor(r, plan, p.topk_idx, chunk, ranks) : 0;
    if (lane == 0) message.tokens[i] = tokens;
  }
  __syncthreads();
  LeadHeader* const header = reinterpret_cast<LeadHeader*>(shared.run.data[r.rank] + rail.SentLead(to, lead));
  if (threadIdx.x < kLeadChunks) header->tokens[threadIdx.x] = message.tokens[threadIdx.x];
  const int records = EachOwnChunk(plan, lead, message.tokens, [&](int chunk, uint32_t tokens, int record) {
    char* const at = reinterpret_cast<char*>(header + 1) + record * plan.routing_bytes;
    for (int i = lane; i < TokensOf(plan, chunk, r.tokens) * r.top_k; i += 32) {
      const int token = i / r.top_k, k = i % r.top_k;
      if (!(tokens >> token & 1)) continue;
      int* const routing = reinterpret_cast<int*>(at + __popc(tokens & ((1u << token) - 1)) * plan.routing_bytes);
      const int64_t entry = static_cast<int64_t>(chunk) * plan.chunk_tokens * r.top_k + i;
      routing[k] = p.topk_idx[entry];
      reinterpret_cast<float*>(routing)[r.top_k + k] = p.topk_weights ? p.topk_weights[entry] : 0.0f;
    }
  });
  __syncthreads();
  if (warp == 0) rail.SendLead(to, lead, records);
}

// Packs and sends everything for the other nodes: all leads, then all chunks.
template <class Codec, class Link>
__device__ __forceinline__ void SendChunks(const DispatchParams& p, const DispatchShared& shared,
                                           const Rail<Link>& rail, MessageShared& message) {
  const Routing& r = p.routing;
  const int turns = rail.Turns(), leads = turns * rail.plan.leads, items = leads + turns * rail.plan.chunks;
  uint32_t* const counter = &shared.run.control->claimed[static_cast<int>(Work::kRailSend)];
  for (int item; (item = BlockClaim(counter, 1)) < items;) {
    const int to = rail.RankTo((item < leads ? item : item - leads) % turns);
    if (!rail.Goes(r.rank, to)) continue;
    const RankMask node = NodeMask(rail.plan, to / rail.plan.per_node) & shared.run.active;
    const RankMask ranks = rail.OnRail(to) ? node : OneRank(to);
    if (item < leads) {
      SendLead(p, shared, rail, message, ranks, to, item / turns);
      continue;
    }
    const int chunk = (item - leads) / turns;
    const uint32_t tokens = TokensFor(r, rail.plan, p.topk_idx, chunk, ranks);
    EachOwnRecord(rail.plan, chunk, tokens, [&](int record, int token) {
      const Targets own{TurnedRanks::Only(r.rank, r.ranks), shared.run.data, rail.SentRecord(to, chunk, record)};
      for (int part = 0; part < p.schedule.parts; ++part)
        Codec::Push(p, token, PartOf(part, p.schedule, r.hidden), own);
    });
    __syncthreads();
    if (threadIdx.x < 32) rail.Send(to, chunk, tokens);
  }
}

__device__ __forceinline__ uint32_t* RoutingFlag(char* half, const RailPlan& plan, int source, int lead) {
  return reinterpret_cast<uint32_t*>(half + plan.routing_flags) + source * plan.chunks + lead;
}

// Signals the ranks `to` that the routing of a lead has arrived. One warp calls it after a barrier.
__device__ __forceinline__ void RaiseRouting(const DispatchShared& shared, const RailPlan& plan, int source, int lead,
                                             const RankMask& to) {
  __threadfence_system();
  __syncwarp();
  ForEachOwnRank(threadIdx.x & 31, shared.run.ranks, [&](int rank) {
    if (!Holds(to, rank)) return;
    StoreRelaxedSystem(RoutingFlag(shared.run.half[rank], plan, source, lead), shared.run.epoch);
  });
}

// Stores the routing of a chunk's tokens at the ranks `to` of this node. Tokens that are not in the chunk have no
// experts there.
__device__ __forceinline__ void ForwardRouting(const DispatchParams& p, const DispatchShared& shared,
                                               const RailPlan& plan, int source, int chunk, uint32_t tokens,
                                               const char* records, const RankMask& to) {
  const Routing& r = p.routing;
  const int lane = threadIdx.x & 31, entries = TokensOf(plan, chunk, r.tokens) * r.top_k;
  const int64_t first = (static_cast<int64_t>(source) * r.tokens + chunk * plan.chunk_tokens) * r.top_k;
  for (int i = lane; i < entries; i += 32) {
    const int token = i / r.top_k, k = i % r.top_k;
    const bool comes = tokens >> token & 1;
    const int* const routing =
        reinterpret_cast<const int*>(records + __popc(tokens & ((1u << token) - 1)) * plan.routing_bytes);
    const int expert = comes ? routing[k] : -1;
    const float weight = comes ? reinterpret_cast<const float*>(routing)[r.top_k + k] : 0.0f;
    for (RankMask m = to; Any(m); DropFirst(m)) {
      char* const data = shared.run.data[FirstRank(m)];
      reinterpret_cast<int*>(data + p.staging.topk_idx)[first + i] = expert;
      reinterpret_cast<float*>(data + p.staging.topk_weights)[first + i] = weight;
    }
  }
}

// Forwards the routing that arrives from the other nodes, lead by lead. In a redispatch only this rank needs it, but
// the other ranks are signalled for the first lead all the same: rail_plan.h says why.
template <class Link>
__device__ __forceinline__ void ForwardLeads(const DispatchParams& p, const DispatchShared& shared,
                                             const Rail<Link>& rail, MessageShared& message) {
  const Routing& r = p.routing;
  const RailPlan& plan = rail.plan;
  const int turns = rail.Turns(), items = turns * plan.leads;
  uint32_t* const counter = &shared.run.control->claimed[static_cast<int>(Work::kRailLead)];
  for (int item; (item = BlockClaim(counter, 1)) < items;) {
    const int lead = item / turns, source = rail.RankFrom(item % turns);
    if (!rail.Goes(source, r.rank)) continue;
    if (!__syncthreads_and(threadIdx.x >= 32 || rail.AwaitLead(source, lead))) return;
    const bool alone = (p.known_positions && lead > 0) || !rail.OnRail(source);
    const RankMask to = alone ? OneRank(r.rank) : shared.run.meets;
    const LeadHeader* const header =
        reinterpret_cast<const LeadHeader*>(shared.run.data[r.rank] + rail.ArrivedLead(source, lead));
    if (threadIdx.x < kLeadChunks) {
      const int chunk = lead * kLeadChunks + threadIdx.x;
      message.tokens[threadIdx.x] =
          chunk < plan.chunks ? header->tokens[threadIdx.x] & ExistingTokens(plan, chunk, r.tokens) : 0;
    }
    __syncthreads();
    EachOwnChunk(plan, lead, message.tokens, [&](int chunk, uint32_t tokens, int record) {
      const char* const records = reinterpret_cast<const char*>(header + 1) + record * plan.routing_bytes;
      ForwardRouting(p, shared, plan, source, chunk, tokens, records, to);
    });
    __syncthreads();
    if (threadIdx.x < 32) RaiseRouting(shared, plan, source, lead, to);
  }
}

// Forwards the rows that arrive from the other nodes, chunk by chunk.
template <class Link>
__device__ __forceinline__ void ForwardChunks(const DispatchParams& p, const DispatchShared& shared,
                                              const Rail<Link>& rail, MessageShared& message) {
  const Routing& r = p.routing;
  const RailPlan& plan = rail.plan;
  const int lane = threadIdx.x & 31, turns = rail.Turns(), items = turns * plan.chunks;
  const int* const topk_idx = reinterpret_cast<const int*>(shared.run.data[r.rank] + p.staging.topk_idx);
  uint32_t* const counter = &shared.run.control->claimed[static_cast<int>(Work::kRailReceive)];
  auto await = [&](int source, int chunk) {
    uint32_t tokens = 0;
    bool arrived = rail.Await(source, chunk, &tokens);
    if (arrived && lane == 0) {
      const uint32_t* const routed = RoutingFlag(shared.run.half[r.rank], plan, source, chunk / kLeadChunks);
      message.tokens[0] = tokens & ExistingTokens(plan, chunk, r.tokens);
      arrived = WaitFlag(routed, shared.run, shared.run.epoch, Step::kMetadata, source);
    }
    return arrived;
  };
  for (int item; (item = BlockClaim(counter, 1)) < items;) {
    const int chunk = item / turns, source = rail.RankFrom(item % turns);
    if (!rail.Goes(source, r.rank)) continue;
    if (!__syncthreads_and(threadIdx.x >= 32 || await(source, chunk))) return;
    const RankMask here = rail.OnRail(source) ? shared.run.meets : OneRank(r.rank);
    EachOwnRecord(plan, chunk, message.tokens[0], [&](int record, int token) {
      const int pair = source * r.tokens + token;
      const RankMask ranks = RanksOf(topk_idx, pair, r, here);
      const uint64_t row = p.staging.rows + static_cast<uint64_t>(pair) * p.staging.row_bytes;
      const char* const staged = shared.run.data[r.rank] + rail.ArrivedRecord(source, chunk, record);
      CopyCodec<int4>::Copy(reinterpret_cast<const int4*>(staged), static_cast<int>(p.staging.row_bytes / 16),
                            [&](auto store) {
                              for (RankMask to = ranks; Any(to); DropFirst(to)) {
                                store(reinterpret_cast<int4*>(shared.run.data[FirstRank(to)] + row));
                              }
                            });
      __threadfence_system();
      __syncwarp();
      ForEachOwnRank(lane, r.ranks, [&](int rank) {
        if (!Holds(ranks, rank)) return;
        uint32_t* const flags = reinterpret_cast<uint32_t*>(shared.run.half[rank] + p.staging.row_flags);
        for (int part = 0; part < p.schedule.parts; ++part) {
          StoreRelaxedSystem(flags + RowFlagIndex(p, source, token, part), shared.run.epoch);
        }
      });
    });
  }
}

// Waits until the first `leads` leads of all ranks of other nodes have arrived at this rank. All threads of the block
// call it.
__device__ __forceinline__ bool AwaitFar(const DispatchParams& p, const DispatchShared& shared, const RailPlan& plan,
                                         int leads) {
  const Routing& r = p.routing;
  bool arrived = true;
  for (int i = threadIdx.x; i < r.ranks * leads && arrived; i += kThreads) {
    const int source = i / leads;
    if (source / plan.per_node == plan.node || !Holds(shared.run.active, source)) continue;
    const uint32_t* flag = RoutingFlag(shared.run.half[r.rank], plan, source, i % leads);
    arrived = WaitFlag(flag, shared.run, shared.run.epoch, Step::kMetadata, source);
  }
  return __syncthreads_and(arrived);
}

// The order in which rows are placed: rows of this node, which arrive soon, then the others, token by token, as they
// arrive.
struct OwnNodeFirst {
  __device__ __forceinline__ static void Pair(const Routing& r, int pair, int* source, int* token) {
    const int per_node = r.ranks_per_node, near = per_node - 1, far = r.ranks - per_node;
    const int first = r.rank / per_node * per_node;
    if (pair < near * r.tokens) {
      *token = pair / near;
      *source = first + (r.rank - first + 1 + pair % near) % per_node;
    } else {
      pair -= near * r.tokens;
      *token = pair / far;
      *source = first + per_node + pair % far;
      if (*source >= r.ranks) *source -= r.ranks;
    }
  }
};

template <class Codec, class Link>
__global__ void __launch_bounds__(kThreads, 1)
    NodeDispatchKernel(const __grid_constant__ DispatchParams p, const __grid_constant__ RailParams rails,
                       const __grid_constant__ Link link) {
  __shared__ DispatchShared shared;
  __shared__ MessageShared message;
  extern __shared__ __align__(128) int dynamic[];
  InitSignalBox(shared.signals);
  BeginOperation(shared.run, p.call, p.known_positions ? Operation::kRedispatch : Operation::kDispatch, p.routing.ranks,
                 p.routing.rank, NodeMask(rails.plan, rails.plan.node), JoinBarrier<Link>(rails, link, shared.run));
  const Rail<Link> rail(rails, link, shared.run, p.staging.data_bytes);
  if (!shared.run.refused) {
    // Few rows are pushed as shares of the pushing blocks; other blocks would repeat the share of a late block.
    const bool first = ForwardsFirst(p.schedule), forwards = first || ForwardsLast(p.schedule);
    const bool late = first && p.routing.tokens * p.schedule.parts > p.schedule.push_blocks * kWarps;
    SendChunks<Codec>(p, shared, rail, message);
    if (!late) Send<Codec>(p, shared, dynamic, shared.run.epoch);
    ForwardLeads(p, shared, rail, message);
    if (forwards) ForwardChunks(p, shared, rail, message);
    if (late) Send<Codec>(p, shared, dynamic, shared.run.epoch);
    int* starts;
    LayoutScratch scratch = MakeScratch(shared.run.scratch, p.routing, p.schedule);
    auto await = [&] {  // the routing of all ranks
      return AwaitMetadata(p, shared, shared.run.epoch) && AwaitFar(p, shared, rails.plan, rails.plan.leads);
    };
    if (ComputePositions(p, shared, dynamic, scratch, &starts, await)) {
      PlaceRows<Codec, OwnNodeFirst>(p, shared, scratch, starts, shared.run.epoch);
      ZeroPadding(p, scratch, starts, blockIdx.x, gridDim.x);
      ClearUnusedRows(p, scratch, blockIdx.x, gridDim.x);
    }
    if (p.known_positions && blockIdx.x == gridDim.x - 1) {
      if (Any(shared.run.active)) CheckCounts(p, shared.run);
      AwaitFar(p, shared, rails.plan, 1);  // rail_plan.h says why
    }
    rail.Leave(p.call);
  }
  FinishOperation(shared.run, [&](uint32_t index, uint32_t count) {
    if (index == 0 && threadIdx.x == 0) rail.PutFailure();
    PoisonDispatch(p, index, count);
  });
}

// Returns a cudaError_t. `p.staging` as PlanRail has completed it.
template <class Codec, class Link>
int LaunchNodeDispatch(const DispatchParams& p, const RailParams& rails, const Link& link, cudaStream_t stream) {
  if (Unfit(p) || UnfitRail(p.call, p.routing, p.schedule, rails.plan) || p.schedule.low_latency ||
      p.routing.ranks > kRanks) {
    return cudaErrorInvalidValue;
  }
  const auto kernel = NodeDispatchKernel<Codec, Link>;
  return Launch(kernel, p.schedule.blocks, kThreads, kLayoutSharedBytes, stream, p, rails, link);
}
template <class Codec, class Link>
int PreloadNodeDispatch() {
  return LoadKernel(NodeDispatchKernel<Codec, Link>, kLayoutSharedBytes);
}

}  // namespace xen_moe::XEN_MOE_VARIANT
