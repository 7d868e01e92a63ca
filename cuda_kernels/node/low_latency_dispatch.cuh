// Dispatch of small batches across nodes. Within a node it is low_latency/dispatch.cu, whose code this file calls.
//
// What moves: to the ranks of this node LL128 lines, as there. To every rank of another node chunks (direct.cuh),
// directly from rank to rank: the number of rows for each of its experts from here, then a record for each token that
// has an expert there: its row, and for every slot its word (routing.cuh) and its weight. Who does it: the blocks that
// send the routing within the node first pack and send the chunks, each block one chunk at a time; the other blocks do
// the same work as there. Who waits for whom: as there, with chunks in place of lines between nodes; chunks are awaited
// only when all shares have been started (ReceiveCounts), so every wait ends with any number of resident blocks. A
// share is done once: a second put would raise a counter twice. Memory order: ll128.cuh, direct.cuh. Inactive ranks are
// sent nothing, and nothing is awaited from them.
#pragma once

#include "cuda_kernels/dispatch/dispatch.cuh"
#include "cuda_kernels/low_latency/rows.cuh"
#include "cuda_kernels/node/direct.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

// The part of a dispatch that concerns other nodes. `far`: the active ranks there.
template <class Link>
struct FarDispatch {
  static constexpr bool kAny = true;
  const Plan& plan;
  const Direct<Link>& direct;
  const RankMask far;

  // Returns the tokens of a chunk that have an expert on `rank`, to all lanes.
  __device__ __forceinline__ uint32_t TokensFor(int rank, int chunk) const {
    const Routing& r = plan.p.routing;
    const int lane = threadIdx.x & 31, first = rank * r.local_experts;
    const int16_t* const experts = plan.In<int16_t>(plan.at.experts);
    bool goes = false;
    if (lane < TokensOf(direct.plan, chunk, r.tokens)) {
      const int token = chunk * direct.plan.chunk_tokens + lane;
#pragma unroll 1
      for (int k = 0; k < r.top_k; ++k) {
        const int local = experts[token * r.top_k + k] - first;
        goes |= local >= 0 && local < r.local_experts;
      }
    }
    return __ballot_sync(0xFFFFFFFFu, goes);
  }

  __device__ __forceinline__ void PackRecord(char* record, int rank, int token) const {
    const DispatchParams& p = plan.p;
    const int lane = threadIdx.x & 31, top_k = p.routing.top_k;
    const int value_bytes = static_cast<int>(p.staging.scale_offset), row_bytes = static_cast<int>(p.staging.row_bytes);
    const WireRow row(p, p.x, p.scales, token);
    constexpr int kInFlight = 8;
#pragma unroll 1
    for (int base = lane * 16; base < row_bytes; base += 32 * 16 * kInFlight) {
      uint4 v[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int at = base + i * 32 * 16;
        if (at < row_bytes) v[i] = __ldcs(reinterpret_cast<const uint4*>(row.At(at, value_bytes)));
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int at = base + i * 32 * 16;
        if (at < row_bytes) *reinterpret_cast<uint4*>(record + at) = v[i];
      }
    }
    uint32_t* const slots = reinterpret_cast<uint32_t*>(record + direct.plan.routing_offset);
    if (lane < top_k) {
      slots[lane] = SlotWord(plan, rank, token, lane);
      slots[top_k + lane] = __float_as_uint(plan.In<float>(plan.at.weights)[token * top_k + lane]);
    }
  }

  // All threads of a block that has numbered the rows: sends the chunks of share `share`.
  __device__ __forceinline__ void Send(int share) const {
    const Routing& r = plan.p.routing;
    const int warp = static_cast<int>(threadIdx.x / 32), local = plan.at.local;
    const int others = direct.Others(), items = others * direct.plan.chunks;
    char* const data = plan.run.data[r.rank];
#pragma unroll 1
    for (int item = share, turn = 0; item < items; item += plan.schedule.routing, ++turn) {
      const int rank = direct.RankAt(item % others), chunk = item / others;
      if (!Holds(far, rank)) continue;
      const uint32_t tokens = TokensFor(rank, chunk);
      if (chunk == 0) {
        int* const counts = reinterpret_cast<int*>(data + direct.SentCounts(rank));
#pragma unroll 1
        for (int l = threadIdx.x; l < local; l += kThreads) counts[l] = plan.In<int>(plan.at.totals)[rank * local + l];
      }
      int record = 0;
#pragma unroll 1
      for (uint32_t m = tokens; m; m &= m - 1, ++record) {
        if (record % kWarps != warp) continue;
        PackRecord(data + direct.SentRecord(rank, chunk, record), rank,
                   chunk * direct.plan.chunk_tokens + __ffs(m) - 1);
      }
      __syncthreads();
      if (warp == turn % kWarps) direct.Send(rank, chunk, tokens);
    }
  }

  // All threads of the block: receives the counts of all ranks of other nodes. Returns false if the group has failed.
  __device__ __forceinline__ bool ReceiveCounts() const {
    const Routing& r = plan.p.routing;
    const int lane = threadIdx.x & 31, local = plan.at.local;
    const uint32_t most = static_cast<uint32_t>(r.tokens * r.top_k);
    bool good = true;
#pragma unroll 1
    for (int turn = static_cast<int>(threadIdx.x / 32); good && turn < direct.Others(); turn += kWarps) {
      const int rank = direct.RankAt(turn);
      uint32_t tokens;
      if (!Holds(far, rank)) continue;
      good = direct.Await(rank, 0, Step::kMetadata, &tokens);
      const uint32_t* const counts =
          reinterpret_cast<const uint32_t*>(plan.run.data[r.rank] + direct.ArrivedCounts(rank));
#pragma unroll 1
      for (int l = lane; good && l < local; l += 32) {
        plan.In<int>(plan.at.counts)[rank * local + l] = static_cast<int>(min(counts[l], most));
      }
    }
    return __syncthreads_and(good);
  }

  // Returns whether the rows of `source` come in chunks. An inactive rank sends none; its entries are handled with
  // those of this node.
  __device__ __forceinline__ bool HasFrom(int source) const { return Holds(far, source); }
  // One warp: places rounds first to end - 1 of a (source, token). Returns false if the group has failed.
  __device__ __forceinline__ bool Place(int source, int token, int first, int end) const {
    const DispatchParams& p = plan.p;
    const int lane = threadIdx.x & 31, top_k = p.routing.top_k;
    const int chunk = token / direct.plan.chunk_tokens, bit = token - chunk * direct.plan.chunk_tokens;
    uint32_t tokens;
    if (!direct.Await(source, chunk, Step::kRows, &tokens)) return false;
    const bool comes = tokens >> bit & 1;
    const char* const record =
        plan.run.data[p.routing.rank] + direct.ArrivedRecord(source, chunk, __popc(tokens & ((1u << bit) - 1)));
    uint32_t word = 0;
    float weight = 0.0f;
    if (comes && lane < top_k) {
      const uint32_t* const slots = reinterpret_cast<const uint32_t*>(record + direct.plan.routing_offset);
      word = slots[lane], weight = __uint_as_float(slots[top_k + lane]);
    }
    const int position = ResolveSlots(plan, source, token, word, weight, first == 0);
    const uint32_t placed = __ballot_sync(0xFFFFFFFFu, position >= 0);
    const int value_bytes = static_cast<int>(p.staging.scale_offset), row_bytes = static_cast<int>(p.staging.row_bytes);
    const int stop = placed ? min(end * kRoundData, row_bytes) : 0;
    constexpr int kInFlight = 8;
#pragma unroll 1
    for (int base = first * kRoundData + lane * 16; base - lane * 16 < stop; base += 32 * 16 * kInFlight) {
      uint4 v[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int at = base + i * 32 * 16;
        if (at < stop) v[i] = __ldcs(reinterpret_cast<const uint4*>(record + at));
      }
#pragma unroll 1
      for (uint32_t m = placed; m; m &= m - 1) {
        const WireRow to(p, p.rows, p.row_scales, __shfl_sync(0xFFFFFFFFu, position, __ffs(m) - 1));
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          const int at = base + i * 32 * 16;
          if (at < stop) *reinterpret_cast<uint4*>(const_cast<char*>(to.At(at, value_bytes))) = v[i];
        }
      }
    }
    return true;
  }
};

// All threads of a block that has numbered: writes share `share` of `topk_idx`, without the entries that do not move.
__device__ __forceinline__ void CleanExperts(const Plan& plan, int* clean, const RankMask& active, int share) {
  const Routing& r = plan.p.routing;
  const int16_t* const experts = plan.In<int16_t>(plan.at.experts);
#pragma unroll 1
  for (int i = share * kThreads + threadIdx.x; i < r.tokens * r.top_k; i += plan.schedule.routing * kThreads) {
    const int expert = experts[i];
    clean[i] = expert >= 0 && Holds(active, plan.schedule.by_local_experts(expert)) ? expert : -1;
  }
}

// A share of the routing. The block has numbered the rows. `p.clean_topk_idx` is null in the plan, because the plan's
// code knows only the ranks of this node.
template <class Link>
__device__ __forceinline__ void SendShare(const FarDispatch<Link>& others, const Piece& piece, int* clean, int share) {
  others.Send(share);
  SendRouting(others.plan, piece, share);
  if (clean) CleanExperts(others.plan, clean, others.far | others.plan.run.active, share);
}

// All threads of the block: does the shares of this operation that no block has started.
template <class Link>
static __device__ __noinline__ void AdoptNodeShares(const DispatchParams& p, const LowLatencySchedule& schedule,
                                                    const Running& run, char* dynamic, const RailParams& rails,
                                                    const Link& link, const RankMask& far, int* clean, bool numbered) {
  const Plan plan(p, schedule, run, dynamic);
  const Piece piece;
  const Direct<Link> direct(rails, link, run, p.staging.data_bytes, dynamic + plan.at.bytes);
  const FarDispatch<Link> others{plan, direct, far};
  for (int next = 0;;) {
    const int share = AdoptShare(run.control, plan.Shares(), run.epoch, &next);
    if (share < 0) return;
    if (share >= schedule.routing) {
      PushShare(plan, piece, share - schedule.routing, [] { return true; });
      continue;
    }
    if (!numbered) {
      if (threadIdx.x >= 32) NumberRows(plan);
      __syncthreads();
      numbered = true;
    }
    SendShare(others, piece, clean, share);
  }
}

template <class Link>
__global__ void __launch_bounds__(kThreads, 1)
    NodeLowLatencyDispatchKernel(const __grid_constant__ DispatchParams p,
                                 const __grid_constant__ LowLatencySchedule schedule,
                                 const __grid_constant__ RailParams rails, const __grid_constant__ Link link,
                                 int* clean) {
  __shared__ Running run;
  __shared__ RankMask far;
  extern __shared__ __align__(16) char bytes[];
  const Plan plan(p, schedule, run, bytes);
  const Piece piece;
  const Direct<Link> direct(rails, link, run, p.staging.data_bytes, bytes + plan.at.bytes);
  const int block = static_cast<int>(blockIdx.x);
  const bool sends = rails.part != Part::kReceive;
  direct.ForgetSeen();
  if (threadIdx.x < 32) {
    BeginDirect(run, &far, p.call, Operation::kDispatch, p.routing, rails, link);
    if (sends && block < plan.Shares()) StartOnce(run, block);
  } else if (sends && block < schedule.routing) {
    NumberRows(plan);
  }
  bool begun = false;
  auto begin = [&] {  // all threads run it once
    if (!begun) __syncthreads();
    begun = true;
    return !run.refused;
  };
  // the first warp knows the epoch already: the other warps need not wait for its first rows
  if (threadIdx.x < 32) begin();
#pragma unroll 1
  for (int share = block; sends && share < plan.Shares(); share += static_cast<int>(gridDim.x)) {
    if (share != block) StartShare(run.control, share, run.epoch);  // a single block does both kinds
    if (share >= schedule.routing)
      PushShare(plan, piece, share - schedule.routing, [&] { return begin() && !run.repeats; });
    if (!begin()) break;
    if (share < schedule.routing && !run.repeats) SendShare(FarDispatch<Link>{plan, direct, far}, piece, clean, share);
  }
  bool good = begin();
  if (rails.part == Part::kSend) return;
  if (good && plan.receiver >= 0) {
    const FarDispatch<Link> others{plan, direct, far};
    auto adopt = [&] {
      AdoptNodeShares(p, schedule, run, bytes, rails, link, far, clean, sends && block < schedule.routing);
    };
    good = ReceiveCounts(plan, piece, adopt, others);
    if (good) {
      LayoutScratch scratch{};
      scratch.columns = plan.at.local;
      scratch.totals = plan.In<int>(plan.at.groups);
      int* starts = plan.In<int>(plan.at.starts);
      StartGroups(p.routing, scratch.columns, starts, [&](int l) { return scratch.totals[l]; });
      auto resolve = [&](int source, int token, bool write, int* position) {
        return ResolveRows(plan, piece, source, token, write, position);
      };
      good = PlaceRows(plan, piece, resolve, others);
      ZeroPadding(p, scratch, starts, plan.receiver, schedule.receivers);
      ClearUnusedRows(p, scratch, plan.receiver, schedule.receivers);
    }
  }
  if (!run.refused) good &= direct.Leave(p.call);
  FinishLowLatency(run, good, [&](uint32_t index, uint32_t count) {
    if (index == 0 && threadIdx.x == 0) direct.PutFailure(run.members & ~run.reachable);
    PoisonDispatch(p, index, count);
    FillBytes(clean, static_cast<uint64_t>(p.routing.tokens) * p.routing.top_k * 4, kPoison, index, count);
  });
}

// Returns a cudaError_t. `p.staging` as PlanRail has completed it.
template <class Link>
int LaunchNodeLowLatencyDispatch(const DispatchParams& p, const RailParams& rails, const Link& link,
                                 cudaStream_t stream) {
  if (Unfit(p) || UnfitRail(p.call, p.routing, p.schedule, rails.plan) || !p.schedule.low_latency ||
      p.routing.ranks > kRanks) {
    return cudaErrorInvalidValue;
  }
  const LowLatencySchedule schedule = ScheduleLowLatency(p.routing, p.schedule, p.staging, false);
  DispatchParams near = p;
  near.clean_topk_idx = nullptr;
  const uint32_t shared = PlanShared(p.routing).bytes + SeenBytes(rails.plan);
  const auto kernel = NodeLowLatencyDispatchKernel<Link>;
  return LaunchDirect(
      p.call, p.routing, Operation::kDispatch, rails, link, p.schedule.blocks, schedule.routing + schedule.push,
      schedule.receivers, stream, [&](const RailParams& part, int blocks) {
        return Launch(kernel, blocks, kThreads, shared, stream, near, schedule, part, link, p.clean_topk_idx);
      });
}
template <class Link>
int PreloadNodeLowLatencyDispatch() {
  if (int e = PreloadDirect<Link>()) return e;
  return LoadKernel(NodeLowLatencyDispatchKernel<Link>, kLowLatencySharedBytes + kMostSeenBytes);
}

}  // namespace xen_moe::XEN_MOE_VARIANT
