// Combine across nodes, in one launch. Within a node it is combine.cuh.
//
// What moves: every expert rank adds up the rows of a token as within a node, and pushes the partial row, over NVLink,
// to the rank of its own node that has the place of the token's rank. That one adds the partial rows of its node in
// ascending rank order, rounds to the wire, and sends one row per token to the token's rank, a chunk at a time. There
// the rows of the nodes are added in ascending node order: this node's from its partial rows, the others' as they came.
// Who does it: the first `push_blocks` blocks push partial rows; all say for which tokens they have any (`masks`), then
// add and send for the other nodes, then sum their own tokens, block of tokens by block of tokens. Who waits for whom:
// pushing waits for nobody; adding waits for the pushing of this node; summing waits for this node's pushing and the
// other nodes' adding. Each is claimed to the end before its block goes on: so every wait ends, with any number of
// resident blocks. Memory order: rail.cuh and combine.cuh. What a chunk says is checked before it becomes an address.
#pragma once

#include "combine.cuh"
#include "direct.cuh"

namespace XEN_MOE_KERNELS {

// A partial row goes to the rank of this node with the source's place, as this rank's for the source's node.
struct ByNode {
  __device__ __forceinline__ static int Target(const Routing& r, int source) {
    return r.rank / r.ranks_per_node * r.ranks_per_node + source % r.ranks_per_node;
  }
  __device__ __forceinline__ static int Slot(const Routing& r, int source) {
    return source / r.ranks_per_node * r.ranks_per_node + r.rank % r.ranks_per_node;
  }
  // One that is out adds nothing: this rank's rows go past it (SendOwn).
  __device__ __forceinline__ static bool Takes(const Running& run, int target) { return Holds(run.meets, target); }
};

__device__ __forceinline__ uint32_t* MaskFlag(char* half, const RailPlan& plan, int slot, int chunk) {
  return reinterpret_cast<uint32_t*>(half + plan.routing_flags) + slot * plan.chunks + chunk;
}
__device__ __forceinline__ uint32_t* MaskOf(char* data, const RailPlan& plan, int slot, int chunk) {
  return reinterpret_cast<uint32_t*>(data + plan.masks) + slot * plan.chunks + chunk;
}

// Bit mask of the tokens of a chunk of `source` that have rows here, to all lanes.
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

// Tells the rank of this node that adds for a source which of its tokens have rows here.
__device__ __forceinline__ void SendMasks(const CombineParams& p, const CombineShared& shared, const RailPlan& plan) {
  const Routing& r = p.routing;
  const int lane = threadIdx.x & 31, others = r.ranks - plan.per_node, items = others * plan.chunks;
  Claims claims(&shared.run.control->claimed[static_cast<int>(Work::kRailSend)], items, false);
  for (int item = claims.First(); item < items; item = claims.Next()) {
    const int chunk = item / others, n = item % others;
    const int source = n < plan.node * plan.per_node ? n : n + plan.per_node;
    const int target = ByNode::Target(r, source), slot = ByNode::Slot(r, source);
    if (!Holds(shared.run.active, source) || !ByNode::Takes(shared.run, target)) continue;
    const uint32_t mask = TokensOfSource(p, plan, source, chunk);
    if (lane == 0) {
      *MaskOf(shared.run.data[target], plan, slot, chunk) = mask;
      __threadfence_system();
      StoreRelaxedSystem(MaskFlag(shared.run.half[target], plan, slot, chunk), shared.run.epoch);
    }
  }
}

// All lanes call it: awaits the part of a token's partial row from the ranks of this node, named by their places,
// staged in the slots from `slots` on. False: the group has failed.
__device__ __forceinline__ bool AwaitPartials(const CombineParams& p, const CombineShared& shared, const RailPlan& plan,
                                              int slots, const RankMask& places, int token, int part) {
  bool arrived = true;
  EachOwnRank(threadIdx.x & 31, plan.per_node, [&](int place) {
    if (!arrived || !Holds(places, place)) return;
    const uint32_t* flags = reinterpret_cast<const uint32_t*>(shared.run.half[p.routing.rank] + p.staging.row_flags);
    arrived = WaitFlag(flags + PartialFlagIndex(p, slots + place, token, part), shared.run, shared.run.epoch,
                       Step::kRows, plan.node * plan.per_node + place);
  });
  arrived = __all_sync(0xFFFFFFFFu, arrived);
  __syncwarp();  // what one lane has acquired, all lanes may read
  return arrived;
}
__device__ __forceinline__ const char* StagedPartial(const CombineParams& p, const CombineShared& shared, int slot,
                                                     int token) {
  return shared.run.data[p.routing.rank] + p.staging.rows +
         (static_cast<uint64_t>(slot) * p.routing.tokens + token) * p.staging.row_bytes;
}

// Stores steps of a row as it goes over the wire.
template <class Y, WireType kWire, int kSteps>
__device__ __forceinline__ void StoreWire(const CombineParams& p, char* wire, int base, int end, bool vector,
                                          const Octet (&values)[kSteps]) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int e = base + s * kWarpElements + static_cast<int>(threadIdx.x & 31) * kOctet;
    if constexpr (kWire == WireType::kNative) {
      StoreOctet(reinterpret_cast<Y*>(wire), e, end, vector, Narrow<Y>(values[s]));
    } else {
      StoreQuantized(wire, p.staging.scale_offset, e, end, Quantize<kWire>(values[s], p.ue8m0));
    }
  }
}

// Sends this rank's own partial rows for a chunk of `to`, past the rank of this node that would add them and is out.
template <class Y, WireType kWire, int kSteps, class Link>
__device__ __noinline__ void SendOwn(const CombineParams& p, CombineShared& shared, const Rail<Link>& rail, bool vector,
                                     int to, int chunk) {
  const uint32_t tokens = TokensOfSource(p, rail.plan, to, chunk);
  int record = 0;
  for (uint32_t m = tokens; m; m &= m - 1, ++record) {
    const GatheredRows rows = GatherRows(p, shared, to, chunk * rail.plan.chunk_tokens + __ffs(m) - 1);
    char* const wire = shared.run.data[p.routing.rank] + rail.SentRecord(to, chunk, record);
    for (int base = 0; base < p.routing.hidden; base += kSteps * kWarpElements) {
      Octet partial[kSteps];
      ReduceRows<Y, kSteps>(p, shared, rows.count, base, p.routing.hidden, vector, partial);
      StoreWire<Y, kWire, kSteps>(p, wire, base, p.routing.hidden, vector, partial);
    }
  }
  rail.Send(to, chunk, tokens);
}

// Adds the partial rows of this node for the tokens of ranks on other nodes, and sends them.
template <class Y, WireType kWire, int kSteps, class Link>
__device__ __forceinline__ void SendSums(const CombineParams& p, CombineShared& shared, const Rail<Link>& rail,
                                         bool vector) {
  const Routing& r = p.routing;
  const RailPlan& plan = rail.plan;
  const int lane = threadIdx.x & 31, turns = rail.Turns(), items = turns * plan.chunks;
  Claims claims(&shared.run.control->claimed[static_cast<int>(Work::kRailReceive)], items, false);
  for (int item = claims.First(); item < items; item = claims.Next()) {
    const int chunk = item / turns, to = rail.RankTo(item % turns), slots = to / plan.per_node * plan.per_node;
    if (!rail.Goes(to, r.rank)) continue;
    if (!rail.OnRail(to)) {
      SendOwn<Y, kWire, kSteps>(p, shared, rail, vector, to, chunk);
      continue;
    }
    uint32_t mask = 0;  // of this lane's places together
    bool arrived = true;
    EachOwnRank(lane, plan.per_node, [&](int place) {
      if (!arrived || place >= plan.per_node || !rail.Takes(plan.node * plan.per_node + place)) return;
      arrived = WaitFlag(MaskFlag(shared.run.half[r.rank], plan, slots + place, chunk), shared.run, shared.run.epoch,
                         Step::kMetadata, plan.node * plan.per_node + place);
      if (arrived) mask |= LoadRelaxedSystem(MaskOf(shared.run.data[r.rank], plan, slots + place, chunk));
    });
    if (!__all_sync(0xFFFFFFFFu, arrived)) return;
    const uint32_t tokens = __reduce_or_sync(0xFFFFFFFFu, mask);
    int record = 0;
    for (uint32_t m = tokens; m; m &= m - 1, ++record) {
      const int bit = __ffs(m) - 1, token = chunk * plan.chunk_tokens + bit;
      const RankMask adds =
          RankVotes(lane, plan.per_node, [&](int place) {
            const uint32_t own =
                kWide ? LoadRelaxedSystem(MaskOf(shared.run.data[r.rank], plan, slots + place, chunk)) : mask;
            return own >> bit & 1;
          }).Ballot();
      char* const wire = shared.run.data[r.rank] + rail.SentRecord(to, chunk, record);
      for (int part = 0; part < p.schedule.parts; ++part) {
        if (!AwaitPartials(p, shared, plan, slots, adds, token, part)) return;
        const int begin = min(r.hidden, part * p.schedule.part_elements);
        const int end = min(r.hidden, begin + p.schedule.part_elements);
        for (int base = begin; base < end; base += kSteps * kWarpElements) {
          Octet total[kSteps];
          Clear(total);
          for (RankMask from = adds; Any(from); DropFirst(from)) {
            Octet partial[kSteps];
            const char* const staged = StagedPartial(p, shared, slots + FirstRank(from), token);
            LoadPartial<Y, kWire, kSteps>(p, staged, base, end, vector, partial);
#pragma unroll
            for (int s = 0; s < kSteps; ++s) Add(total[s], partial[s]);
          }
          StoreWire<Y, kWire, kSteps>(p, wire, base, end, vector, total);
        }
      }
    }
    rail.Send(to, chunk, tokens);
  }
}

// partial = the rows of node `node`, whose rank on the rail is out, as its ranks have sent them themselves: added up
// and rounded as that one would have. `came`: lane `r`'s are the tokens that rank r has sent a row for.
template <class Y, WireType kWire, int kSteps, class Link>
__device__ __noinline__ void AddFar(const CombineParams& p, const CombineShared& shared, const Rail<Link>& rail,
                                    bool vector, int node, int chunk, int bit, uint32_t came, int base, int end,
                                    Octet (&partial)[kSteps]) {
  Octet total[kSteps];
  Clear(total);
  for (int rank = node * rail.plan.per_node; rank < (node + 1) * rail.plan.per_node; ++rank) {
    const uint32_t tokens = __shfl_sync(0xFFFFFFFFu, came, rank);
    if (!(tokens >> bit & 1)) continue;
    const int record = __popc(tokens & ((1u << bit) - 1));
    const char* const row = shared.run.data[p.routing.rank] + rail.LandedRecord(rank, chunk, record);
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
                                         bool vector) {
  const Routing& r = p.routing;
  const RailPlan& plan = rail.plan;
  const int lane = threadIdx.x & 31, items = plan.chunks, first = plan.node * plan.per_node;
  Claims claims(&shared.run.control->claimed[static_cast<int>(Work::kPlace)], items, false);
  for (int chunk = claims.First(); chunk < items; chunk = claims.Next()) {
    uint32_t came = 0;  // lane rail.Place(rank): tokens that the rank has sent a row for
    for (int turn = 0; turn < rail.Turns(); ++turn) {
      const int from = rail.RankFrom(turn);
      uint32_t tokens = 0;
      if (!rail.Goes(r.rank, from)) continue;
      if (!rail.Await(from, chunk, &tokens)) return;
      if (lane == rail.Place(from)) came = tokens;
    }
    const int count = TokensOf(plan, chunk, r.tokens);
    for (int bit = 0; bit < count; ++bit) {
      const int token = chunk * plan.chunk_tokens + bit;
      const RankMask near = RanksOf(p.topk_idx, token, r, shared.run.meets);
      const uint32_t far = __ballot_sync(0xFFFFFFFFu, came >> bit & 1);
      const GatheredRows own = GatherRows(p, shared, r.rank, token);
      for (int part = 0; part < p.schedule.parts; ++part) {
        if (!AwaitPartials(p, shared, plan, first, Shifted(near & ~OneRank(r.rank), first), token, part)) return;
        const int begin = min(r.hidden, part * p.schedule.part_elements);
        const int end = min(r.hidden, begin + p.schedule.part_elements);
        for (int base = begin; base < end; base += kSteps * kWarpElements) {
          Octet sum[kSteps], total[kSteps], partial[kSteps];
          Clear(sum);
          for (int node = 0; node < plan.nodes; ++node) {
            if (node == plan.node) {
              Clear(total);
              for (RankMask m = near; Any(m); DropFirst(m)) {
                const int rank = FirstRank(m);
                if (rank == r.rank) {
                  ReduceRows<Y, kSteps>(p, shared, own.count, base, end, vector, partial);
#pragma unroll
                  for (int s = 0; s < kSteps; ++s) partial[s] = RoundToWire<Y, kWire>(partial[s], p.ue8m0);
                } else {
                  LoadPartial<Y, kWire, kSteps>(p, StagedPartial(p, shared, rank, token), base, end, vector, partial);
                }
#pragma unroll
                for (int s = 0; s < kSteps; ++s) Add(total[s], partial[s]);
              }
#pragma unroll
              for (int s = 0; s < kSteps; ++s) partial[s] = RoundToWire<Y, kWire>(total[s], p.ue8m0);
            } else if (plan.masked && !rail.Takes(rail.RankOn(node))) {
              AddFar<Y, kWire, kSteps>(p, shared, rail, vector, node, chunk, bit, came, base, end, partial);
            } else if (const int from = rail.RankOn(node); far >> rail.Place(from) & 1) {
              const uint32_t before = __shfl_sync(0xFFFFFFFFu, came, rail.Place(from)) & ((1u << bit) - 1);
              const char* const row = shared.run.data[r.rank] + rail.LandedRecord(from, chunk, __popc(before));
              LoadPartial<Y, kWire, kSteps>(p, row, base, end, vector, partial);
            } else {
              continue;
            }
#pragma unroll
            for (int s = 0; s < kSteps; ++s) Add(sum[s], partial[s]);
          }
          Y* const out = static_cast<Y*>(p.out) + static_cast<int64_t>(token) * r.hidden;
#pragma unroll
          for (int s = 0; s < kSteps; ++s) {
            StoreOctet(out, base + s * kWarpElements + lane * kOctet, end, vector, Narrow<Y>(sum[s]));
          }
        }
      }
    }
  }
}

template <class Y, WireType kWire, class Link>
__global__ void __launch_bounds__(kThreads, 1)
    NodeCombineKernel(const __grid_constant__ CombineParams p, const __grid_constant__ RailParams rails,
                      const __grid_constant__ Link link) {
  constexpr int kSteps = StepsOf<Y>(true);
  __shared__ CombineShared shared;
  extern __shared__ __align__(128) char rings[];
  char* ring = rings + threadIdx.x / 32 * RowStream<Y, kSteps>::kRingBytes;
  InitSignalBox(shared.signals);
  BeginOperation(shared.run, p.call, Operation::kCombine, p.routing.ranks, p.routing.rank,
                 NodeMask(rails.plan, rails.plan.node), Meeting<Link>(rails, link, shared.run));
  const Rail<Link> rail(rails, link, shared.run, p.staging.data_bytes);
  if (!shared.run.refused) {
    const bool vector = p.routing.hidden % kOctet == 0;
    SendMasks(p, shared, rails.plan);
    PushPartials<Y, kWire, kSteps, true, ByNode>(p, shared, ring, vector, shared.run.epoch);
    SendSums<Y, kWire, kSteps>(p, shared, rail, vector);
    SumNodes<Y, kWire, kSteps>(p, shared, rail, vector);
    rail.Leave(p.call);
  }
  FinishOperation(shared.run, [&](uint32_t index, uint32_t count) {
    if (index == 0 && threadIdx.x == 0) rail.TellFailure();
    FillBytes(p.out, static_cast<uint64_t>(p.routing.tokens) * p.routing.hidden * sizeof(Y), kPoison, index, count);
  });
}

// A cudaError_t. `p.staging` as PlanRail has completed it.
template <class Y, WireType kWire, class Link>
int LaunchNodeCombine(const CombineParams& p, const RailParams& rails, const Link& link, cudaStream_t stream) {
  if (Unfit(p) || UnfitRail(p.call, p.routing, p.schedule, rails.plan) || p.schedule.low_latency ||
      p.routing.ranks > kRanks) {
    return cudaErrorInvalidValue;
  }
  const int rings = kWarps * RingStages() * RowStream<Y, StepsOf<Y>(true)>::kChunkBytes;
  NodeCombineKernel<Y, kWire, Link><<<p.schedule.blocks, kThreads, rings, stream>>>(p, rails, link);
  return cudaGetLastError();
}
// Loads the kernel and lets it use the shared memory of its rings.
template <class Y, WireType kWire, class Link>
int PreloadNodeCombine() {
  const int rings = kWarps * RingStages() * RowStream<Y, StepsOf<Y>(true)>::kChunkBytes;
  cudaFuncAttributes attributes;
  if (int e = cudaFuncGetAttributes(&attributes, NodeCombineKernel<Y, kWire, Link>)) return e;
  return cudaFuncSetAttribute(NodeCombineKernel<Y, kWire, Link>, cudaFuncAttributeMaxDynamicSharedMemorySize, rings);
}

}  // namespace XEN_MOE_KERNELS
