// Combine of small batches across nodes. Within a node it is low_latency/combine.cuh, whose code this file calls.
//
// What moves: to the ranks of this node partial rows in LL128 lines, as there. To every rank of another node chunks
// (direct.cuh) of partial rows, directly from rank to rank, with a record for each of its tokens that has rows here.
// The token's rank adds them node by node, in ascending order of ranks and then of nodes, and rounds to the wire in
// between: the bits are those of node/combine.cuh. Who does it: the blocks that push rows within the node first make
// and send the chunks, each block one chunk at a time; the other blocks sum. Who waits for whom: as there. Before a
// block sums it makes sure that all shares have been started, so every wait ends with any number of resident blocks. A
// share is done once: a second put would raise a counter twice. Memory order: ll128.cuh, direct.cuh. Inactive ranks
// send nothing and get nothing.
#pragma once

#include "cuda_kernels/core/launch.cuh"
#include "cuda_kernels/low_latency/combine.cuh"
#include "cuda_kernels/node/direct.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

// Loads rounds base to end - 1 of a row in plain format: a lane's pieces of them, rounded.
template <class Y, int kRounds>
__device__ __forceinline__ void StoreSums(char* row, const Piece& piece, int base, int end, int row_bytes,
                                          const Values<Y> (&sums)[kRounds]) {
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int at = (base + i) * kRoundData + piece.offset;
    if (base + i >= end || at >= row_bytes) continue;
    const uint4 raw = sums[i].Round();
    if (piece.flags) {
      *reinterpret_cast<uint2*>(row + at) = make_uint2(raw.x, raw.y);
    } else {
      *reinterpret_cast<uint4*>(row + at) = raw;
    }
  }
}

template <class Y, int kSumRounds, int kRows, class Link>
struct FarCombine {
  const LowLatencyCombine<Y, kSumRounds, kRows>& near;
  const Direct<Link>& direct;
  const RankMask far;  // the active ranks of other nodes

  // Returns the tokens of a chunk of `source` that have rows here, to all lanes.
  __device__ __forceinline__ uint32_t TokensOfSource(int source, int chunk) const {
    const Routing& r = near.p.routing;
    const int lane = threadIdx.x & 31;
    bool belongs = false;
    if (lane < TokensOf(direct.plan, chunk, r.tokens)) {
      const int64_t token = static_cast<int64_t>(source) * r.tokens + chunk * direct.plan.chunk_tokens + lane;
#pragma unroll 1
      for (int slot = 0; slot < r.slots; ++slot) belongs |= near.p.positions[token * r.slots + slot] != -1;
    }
    return __ballot_sync(0xFFFFFFFFu, belongs);
  }

  // All threads of the block: sends the chunks of share `share`.
  __device__ __forceinline__ void Send(int share) const {
    const CombineParams& p = near.p;
    const int warp = static_cast<int>(threadIdx.x / 32), others = direct.Others(), items = others * direct.plan.chunks;
#pragma unroll 1
    for (int item = share, turn = 0; item < items; item += near.schedule.push, ++turn) {
      const int source = direct.RankAt(item % others), chunk = item / others;
      if (!Holds(far, source)) continue;
      const uint32_t tokens = TokensOfSource(source, chunk);
      const int units = __popc(tokens) * near.schedule.push_parts;
#pragma unroll 1
      for (int unit = warp; unit < units; unit += kWarps) {
        const int record = static_cast<int>(near.schedule.by_push_parts(unit));
        uint32_t rest = tokens;
        for (int i = 0; i < record; ++i) rest &= rest - 1;
        const int token = chunk * direct.plan.chunk_tokens + __ffs(rest) - 1;
        const TokenRows rows(p, TokenRows::Load(p, source, token));
        const int base = (unit - record * near.schedule.push_parts) * near.schedule.push_rounds;
        const int end = min(p.staging.row_rounds, base + near.schedule.push_rounds);
        Values<Y> sums[kPushRounds];
        SumRows<kRows>(p, rows, near.piece, base, end, sums);
        StoreSums(near.run.data[p.routing.rank] + direct.SentRecord(source, chunk, record), near.piece, base, end,
                  static_cast<int>(p.staging.row_bytes), sums);
      }
      __syncthreads();
      if (warp == turn % kWarps) direct.Send(source, chunk, tokens);
    }
  }
  // All threads of the block: does the shares of this operation that no block has started.
  __device__ __forceinline__ void AdoptShares() const {
    for (int next = 0;;) {
      const int share = AdoptShare(near.run.control, near.schedule.push, near.run.epoch, &next);
      if (share < 0) return;
      Send(share);
      near.PushShare(share, static_cast<int>(threadIdx.x / 32), kWarps, [] { return true; });
    }
  }
  // All threads of the block: gives the other blocks some time to start their shares, then does those that are left.
  __device__ __forceinline__ void AwaitShares() const {
    for (int poll = 0; poll < kLinePolls; ++poll) {
      bool idle = false;
      for (int i = threadIdx.x; i < near.schedule.push; i += kThreads) {
        idle |= LoadRelaxedGpu(&near.run.control->started[i]) != near.run.epoch;
      }
      if (!__syncthreads_or(idle)) return;
    }
    AdoptShares();
  }

  // total = the partial rows of node `node` for a part of a token. Returns false if the group has failed.
  __device__ __forceinline__ bool AddNode(int node, int token, int base, int end,
                                          Values<Y> (&total)[kSumRounds]) const {
    const CombineParams& p = near.p;
    const int per_node = direct.plan.per_node, row_bytes = static_cast<int>(p.staging.row_bytes);
    const int chunk = token / direct.plan.chunk_tokens, bit = token - chunk * direct.plan.chunk_tokens;
    constexpr int kRanks = 4 / kSumRounds;  // ranks whose rows are loaded together
#pragma unroll
    for (int i = 0; i < kSumRounds; ++i) total[i].Clear();
#pragma unroll 1
    for (RankMask left = far & NodeMask(direct.plan, node); Any(left);) {
      const char* row[kRanks];
      uint4 v[kRanks][kSumRounds];
#pragma unroll
      for (int j = 0; j < kRanks; ++j) {
        row[j] = nullptr;
        if (!Any(left)) continue;
        const int rank = FirstRank(left);
        DropFirst(left);
        uint32_t tokens;
        if (!direct.Await(rank, chunk, Step::kRows, &tokens)) return false;
        if (!(tokens >> bit & 1)) continue;
        const int record = __popc(tokens & ((1u << bit) - 1));
        row[j] = near.run.data[p.routing.rank] + direct.ArrivedRecord(rank, chunk, record);
      }
#pragma unroll
      for (int j = 0; j < kRanks; ++j) {
#pragma unroll
        for (int i = 0; i < kSumRounds; ++i) {
          const int at = (base + i) * kRoundData + near.piece.offset;
          if (row[j] && base + i < end) v[j][i] = LoadRowPiece(row[j], near.piece, at, row_bytes);
        }
      }
#pragma unroll
      for (int j = 0; j < kRanks; ++j) {
#pragma unroll
        for (int i = 0; i < kSumRounds; ++i) {
          if (row[j] && base + i < end) total[i].Add(v[j][i]);
        }
      }
    }
    return true;
  }

  // Sums a part of a token: rounds base to end - 1, kSumRounds at most. Returns false if the group has failed.
  __device__ __forceinline__ bool SumPart(int token, int base, int end) const {
    const CombineParams& p = near.p;
    const Routing& r = p.routing;
    const int lane = threadIdx.x & 31;
    const int expert = lane < r.top_k ? p.topk_idx[token * r.top_k + lane] : -1;
    const bool real = expert >= 0 && expert < r.experts;
    const RankMask named = Union(real ? OneRank(near.schedule.by_local_experts(expert)) : NoRanks(), r.ranks);
    uint4 mine[kSumRounds];
    {
      const TokenRows own(p, TokenRows::Load(p, r.rank, token));
      Values<Y> sums[kSumRounds];
      SumRows<kRows>(p, own, near.piece, base, end, sums);
#pragma unroll
      for (int i = 0; i < kSumRounds; ++i) mine[i] = sums[i].Round();
    }
    Values<Y> sum[kSumRounds];
#pragma unroll
    for (int i = 0; i < kSumRounds; ++i) sum[i].Clear();
#pragma unroll 1
    for (int node = 0; node < direct.plan.nodes; ++node) {
      Values<Y> total[kSumRounds];
      if (node != direct.plan.node) {
        if (!AddNode(node, token, base, end, total)) return false;
      } else {
        const RankMask ranks = named & near.run.active;
        for (int awaited, round; !near.AddRanks(ranks, token, base, end, mine, total, &awaited, &round);) {
          const char* const at = near.Round(r.rank, awaited, token, round);
          const int lines = near.Lines(round);
          auto missing = [&] {
            return __ballot_sync(0xFFFFFFFFu, Missing(near.piece, LoadRound(at), lines, near.run.epoch));
          };
          auto stay = [] { return false; };
          if (!AwaitLines(missing, [&](uint32_t) { return awaited; }, stay, near.run, Step::kRows)) return false;
        }
      }
#pragma unroll
      for (int i = 0; i < kSumRounds; ++i) sum[i].Add(total[i].Round());
    }
    StoreSums(static_cast<char*>(p.out) + static_cast<int64_t>(token) * p.staging.row_bytes, near.piece, base, end,
              static_cast<int>(p.staging.row_bytes), sum);
    return true;
  }
  // All threads of the block. Returns false if the group has failed.
  __device__ __forceinline__ bool Sum() const {
    const LowLatencySchedule& schedule = near.schedule;
    const uint32_t parts = schedule.parts, items = near.p.routing.tokens * parts;
    const int summer = static_cast<int>(blockIdx.x) - (static_cast<int>(gridDim.x) - schedule.receivers);
    if (summer < 0) return true;
    AwaitShares();
#pragma unroll 1
    for (uint32_t item = summer + LateFirstWarp() * schedule.receivers; item < items;
         item += schedule.receivers * kWarps) {
      const uint32_t token = schedule.by_parts(item), first = (item - token * parts) * schedule.rounds;
      if (!SumPart(token, first, min(near.p.staging.row_rounds, static_cast<int>(first) + schedule.rounds)))
        return false;
    }
    return true;
  }
};

template <class Y, int kSumRounds, int kRows, class Link>
__global__ void __launch_bounds__(kThreads, 1)
    NodeLowLatencyCombineKernel(const __grid_constant__ CombineParams p,
                                const __grid_constant__ LowLatencySchedule schedule,
                                const __grid_constant__ RailParams rails, const __grid_constant__ Link link) {
  __shared__ Running run;
  __shared__ RankMask far;
  extern __shared__ __align__(16) char bytes[];
  const LowLatencyCombine<Y, kSumRounds, kRows> near(p, schedule, run);
  const Direct<Link> direct(rails, link, run, p.staging.data_bytes, bytes);
  const int block = static_cast<int>(blockIdx.x);
  const bool sends = rails.part != Part::kReceive;
  direct.ForgetSeen();
  if (threadIdx.x < 32) {
    BeginDirect(run, &far, p.call, Operation::kCombine, p.routing, rails, link);
    if (sends && block < schedule.push) StartOnce(run, block);
  }
  __syncthreads();
  const FarCombine<Y, kSumRounds, kRows, Link> others{near, direct, far};
  bool good = !run.refused;
  if (good && sends && block < schedule.push && !run.repeats) {
    others.Send(block);
    near.PushShare(block, LateFirstWarp(), kWarps, [] { return true; });
  }
  if (rails.part == Part::kSend) return;
  if (good) good = others.Sum();
  if (!run.refused) good &= direct.Leave(p.call);
  FinishLowLatency(run, good, [&](uint32_t index, uint32_t count) {
    if (index == 0 && threadIdx.x == 0) direct.PutFailure(run.members & ~run.reachable);
    FillBytes(p.out, static_cast<uint64_t>(p.routing.tokens) * p.routing.hidden * sizeof(Y), kPoison, index, count);
  });
}

// Returns a cudaError_t. `p.staging` as PlanRail has completed it.
template <class Y, class Link>
int LaunchNodeLowLatencyCombineOf(const CombineParams& p, const RailParams& rails, const Link& link,
                                  cudaStream_t stream) {
  if (Unfit(p) || UnfitRail(p.call, p.routing, p.schedule, rails.plan) || !p.schedule.low_latency ||
      p.routing.ranks > kRanks) {
    return cudaErrorInvalidValue;
  }
  const LowLatencySchedule schedule = ScheduleLowLatency(p.routing, p.schedule, p.staging, true);
  const auto few = NodeLowLatencyCombineKernel<Y, kSumRoundsOfFew, 2, Link>;
  const auto kernel = p.routing.tokens <= kFewTokens ? few : NodeLowLatencyCombineKernel<Y, kSumRounds, 3, Link>;
  return LaunchDirect(p.call, p.routing, Operation::kCombine, rails, link, p.schedule.blocks, schedule.push,
                      schedule.receivers, stream, [&](const RailParams& part, int blocks) {
                        return Launch(kernel, blocks, kThreads, SeenBytes(rails.plan), stream, p, schedule, part, link);
                      });
}
// Returns a cudaError_t.
template <class Link>
int LaunchNodeLowLatencyCombine(const CombineParams& p, const RailParams& rails, const Link& link,
                                cudaStream_t stream) {
  switch (p.element) {
    case Element::kBf16:
      return LaunchNodeLowLatencyCombineOf<__nv_bfloat16>(p, rails, link, stream);
    case Element::kF16:
      return LaunchNodeLowLatencyCombineOf<__half>(p, rails, link, stream);
    case Element::kF32:
      return LaunchNodeLowLatencyCombineOf<float>(p, rails, link, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

template <class Y, class Link>
int PreloadNodeLowLatencyCombineOf() {
  if (int e = LoadKernel(NodeLowLatencyCombineKernel<Y, kSumRoundsOfFew, 2, Link>, kMostSeenBytes)) return e;
  return LoadKernel(NodeLowLatencyCombineKernel<Y, kSumRounds, 3, Link>, kMostSeenBytes);
}
// Loads all of these kernels on the current device. Returns a cudaError_t.
template <class Link>
int PreloadNodeLowLatencyCombine() {
  if (int e = PreloadNodeLowLatencyCombineOf<__nv_bfloat16, Link>()) return e;
  if (int e = PreloadNodeLowLatencyCombineOf<__half, Link>()) return e;
  return PreloadNodeLowLatencyCombineOf<float, Link>();
}

}  // namespace xen_moe::XEN_MOE_VARIANT
