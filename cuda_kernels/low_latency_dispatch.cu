// Dispatch of small batches: no barrier between blocks, no fence, no flag beside the data.
//
// What moves: to every rank, this one too, a message of lines: how many rows each of its experts gets from here, then
// per token a line that says for every slot which expert of that rank wants it, its number among this rank's rows of
// that expert, and its weight. To every other rank that owns one of its experts, a token's row in lines, behind the
// messages. Who does it: the first `layout_blocks` blocks number all rows, each for itself in shared memory, and send
// shares of the messages; the next `push_blocks` send shares of the rows, and need to know nothing but topk_idx; the
// others receive: each adds up the counts of all sources for itself, and its warps place parts of rows as their lines
// come in. Who waits for whom: senders wait for nobody. A receiver waits for lines alone; before its first long wait,
// and once all counts have come, it does what no block of this GPU has started (claims.cuh), so every wait ends with
// any number of resident blocks. Memory order: lines.cuh; nothing else is shared between GPUs. What peers sent is
// checked before it becomes an address. Ranks that are out are sent nothing, and nothing is awaited from them.
#include "dispatch.cuh"
#include "low_latency_rows.cuh"

namespace xen_moe {
namespace {

// All threads of the block: whatever of this operation nobody has started. It makes a plan of its own: the caller's
// would have to lie in memory for it.
__device__ __noinline__ void AdoptShares(const DispatchParams& p, const Running& run, char* dynamic, bool numbered) {
  const Plan plan(p, run, dynamic);
  const Piece piece;
  for (int next = 0;;) {
    const int share = AdoptShare(plan.run.control, plan.Shares(), plan.run.epoch, &next);
    if (share < 0) return;
    if (share >= plan.routing_shares) {
      PushShare(plan, piece, share - plan.routing_shares);
      continue;
    }
    if (!numbered) {
      LoadRouting(plan);
      __syncthreads();
      Number(plan);
      __syncthreads();
      numbered = true;
    }
    SendRouting(plan, piece, share);
  }
}

__global__ void __launch_bounds__(kThreads, 1) LowLatencyDispatchKernel(const __grid_constant__ DispatchParams p) {
  __shared__ Running run;
  extern __shared__ __align__(16) char dynamic[];
  Plan plan(p, run, dynamic);
  const Piece piece;
  const int block = static_cast<int>(blockIdx.x);
  const int push = block - plan.routing_shares;  // this block's first share of the rows, if it is one
  const bool pushes = push >= 0 && push < plan.push_shares, routes = block < plan.routing_shares;
  // What does not depend on the operation's number is loaded before it is known.
  Batch batch;
  int begin = 0, end = 0;
  if (pushes) {
    ShareOf(p, push, plan.push_shares, &begin, &end);
    begin += static_cast<int>(threadIdx.x / 32);
    if (begin < end) batch.Load(p, piece, begin, end);
  }
  if (routes) LoadRouting(plan);
  Phase(0);
  if (threadIdx.x < 32) BeginLowLatency(run, p.call, Operation::kDispatch, p.routing.ranks, p.routing.rank);
  __syncthreads();
  Phase(1);
  bool good = true;
  if (!run.refused) {
    const uint32_t epoch = run.epoch;
    for (int share = block; share < plan.Shares(); share += static_cast<int>(gridDim.x)) {
      StartShare(run.control, share, epoch);
      if (share < plan.routing_shares) {
        Number(plan);
        __syncthreads();
        SendRouting(plan, piece, share);
      } else if (share == block) {
        if (begin < end) batch.Store(plan, piece, begin, end);
        for (int item = begin + kAhead * kWarps; item < end; item += kAhead * kWarps) {
          batch.Load(p, piece, item, end);
          batch.Store(plan, piece, item, end);
        }
      } else {
        PushShare(plan, piece, share - plan.routing_shares);
      }
    }
    Phase(2);
    if (plan.receiver >= 0) {
      good = ReceiveCounts(plan, piece, [&] { AdoptShares(p, run, dynamic, routes); });
      if (good) {
        LayoutScratch scratch{};
        scratch.columns = plan.at.local;
        scratch.totals = plan.In<int>(plan.at.groups);
        int* starts = plan.In<int>(plan.at.starts);
        ComputeStarts(p, scratch, starts);
        Phase(4);
        good = PlaceRows(plan, piece);
        ZeroPadding(p, scratch, starts, plan.receiver, plan.receivers);
        ClearUnusedRows(p, scratch, plan.receiver, plan.receivers);
      }
      good = __syncthreads_and(good);
    }
  }
  Phase(5);
  FinishLowLatency(run, !good, [&](uint32_t index, uint32_t count) { PoisonDispatch(p, index, count); });
  Phase(6);
}

}  // namespace

int LaunchLowLatencyDispatch(const DispatchParams& p, cudaStream_t stream) {
  if (Unfit(p)) return cudaErrorInvalidValue;
  LowLatencyDispatchKernel<<<p.schedule.blocks, kThreads, PlanShared(p.routing).bytes, stream>>>(p);
  return cudaGetLastError();
}
int PreloadLowLatencyDispatch() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, LowLatencyDispatchKernel);
}

}  // namespace xen_moe

#ifdef XEN_MOE_PHASES
namespace xen_moe {
int ReadDispatchPhases(uint64_t* to) { return ReadPhases(to); }
}  // namespace xen_moe
#endif
