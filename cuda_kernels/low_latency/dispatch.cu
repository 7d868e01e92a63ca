// Dispatch of small batches: no barrier between blocks, no fence, and no flag beside the data.
//
// What moves: to every rank, including this one, a message of LL128 lines: the number of rows for each of its experts
// from here, then one line per token that says for every slot which expert of that rank wants it, its number among this
// rank's rows of that expert, and its weight. To every other rank that owns one of its experts, a token's row in lines,
// behind the messages. Who does it: the first `layout_blocks` blocks number all rows, each for itself in shared memory,
// and send shares of the messages; the next `push_blocks` blocks send shares of the rows, for which they need only
// topk_idx; the other blocks receive: each adds up the counts of all sources for itself, and its warps place parts of
// rows as their lines arrive. Who waits for whom: senders wait for no rank. A receiver waits only for lines; before its
// first long wait, and once all counts have arrived, it does the shares that no block of this GPU has started
// (claims.cuh), so every wait ends with any number of resident blocks. Memory order: ll128.cuh; nothing else is shared
// between GPUs. Data from peers are checked before they become addresses. Inactive ranks are sent nothing, and nothing
// is awaited from them.
//
// With few tokens, the receivers number the rows (few.cuh): the same algorithm without the counts.
#include "cuda_kernels/core/launch.cuh"
#include "cuda_kernels/dispatch/dispatch.cuh"
#include "cuda_kernels/low_latency/few.cuh"
#include "cuda_kernels/low_latency/rows.cuh"

namespace xen_moe::XEN_MOE_VARIANT {
namespace {

// All threads of the block: does the shares of this operation that no block has started. It makes its own plan: the
// caller's plan would otherwise have to lie in memory.
template <class Numbered>
__device__ __noinline__ void AdoptShares(const DispatchParams& p, const LowLatencySchedule& schedule,
                                         const Running& run, char* dynamic, bool prepared) {
  const Plan plan(p, schedule, run, dynamic, Numbered::Shared(p.routing));
  const Piece piece;
  auto begin = [] { return true; };
  for (int next = 0;;) {
    const int share = AdoptShare(run.control, plan.Shares(), run.epoch, &next);
    if (share < 0) return;
    if (share >= schedule.routing) {
      PushShare(plan, piece, share - schedule.routing, begin);
      continue;
    }
    if (!prepared) Numbered::PrepareLate(plan);
    prepared = true;
    Numbered::Send(plan, piece, share, begin);
  }
}

template <class Numbered>
__global__ void __launch_bounds__(kThreads, 1)
    LowLatencyDispatchKernel(const __grid_constant__ DispatchParams p,
                             const __grid_constant__ LowLatencySchedule schedule) {
  __shared__ Running run;
  extern __shared__ __align__(16) char dynamic[];
  const Plan plan(p, schedule, run, dynamic, Numbered::Shared(p.routing));
  const Piece piece;
  const int block = static_cast<int>(blockIdx.x);
  AwaitKernelBefore();
  // The other warps load everything that does not depend on the epoch while the first warp finds the epoch.
  if (threadIdx.x < 32) {
    BeginLowLatency(run, p.call, Operation::kDispatch, p.routing.ranks, p.routing.rank);
    if (p.call.active && block < plan.Shares()) StartOnce(run, block);
  } else {
    Numbered::Prepare(plan);
  }
  bool begun = false;
  auto begin = [&] {  // all threads run it once
    if (!begun) {
      __syncthreads();
      begun = true;
      if (!run.refused && block < plan.Shares()) StartShare(run.control, block, run.epoch);
    }
    return !run.refused;
  };
  // the first warp knows the epoch already: the other warps need not wait for its first rows
  if (threadIdx.x < 32) begin();
  auto sends = [&] { return begin() && !run.repeats; };
  // One share for each block; if there is a single block, it does both kinds.
#pragma unroll 1
  for (int share = block; share < plan.Shares(); share += static_cast<int>(gridDim.x)) {
    if (share != block) StartShare(run.control, share, run.epoch);
    if (share >= schedule.routing) {
      PushShare(plan, piece, share - schedule.routing, sends);
    } else {
      Numbered::Send(plan, piece, share, sends);
    }
    if (!begin()) break;
  }
  bool good = begin();
  if (good && plan.receiver >= 0) {
    good = Numbered::Receive(plan, piece,
                             [&] { AdoptShares<Numbered>(p, schedule, run, dynamic, block < schedule.routing); });
    if (good) {
      good = PlaceRows<Numbered::kRounds, Numbered::kFew>(
          plan, piece, [&](int source, int token, bool write, int* position) {
            return Numbered::Resolve(plan, piece, source, token, write, position);
          });
      Numbered::Complete(plan);
    }
  }
  FinishLowLatency(run, good, [&](uint32_t index, uint32_t count) { PoisonDispatch(p, index, count); });
}

}  // namespace

int LaunchLowLatencyDispatch(const DispatchParams& p, cudaStream_t stream) {
  if (Unfit(p) || p.routing.ranks > kRanks) return cudaErrorInvalidValue;
  const LowLatencySchedule schedule = ScheduleLowLatency(p.routing, p.schedule, p.staging, false);
  const bool few = IsFew(p.routing);
  const auto kernel = few ? LowLatencyDispatchKernel<NumberedByReceiver> : LowLatencyDispatchKernel<NumberedBySender>;
  const SharedPlan shared = few ? PlanFewShared(p.routing) : PlanShared(p.routing);
  return LaunchEarly(kernel, p.schedule.blocks, shared.bytes, stream, p, schedule);
}
int PreloadLowLatencyDispatch() {
  if (int e = LoadKernel(LowLatencyDispatchKernel<NumberedByReceiver>, kLowLatencySharedBytes)) return e;
  return LoadKernel(LowLatencyDispatchKernel<NumberedBySender>, kLowLatencySharedBytes);
}

}  // namespace xen_moe::XEN_MOE_VARIANT
