// Waits until the network is quiet after a failure, over NCCL.
#include "cuda_kernels/core/launch.cuh"
#include "cuda_kernels/node/nccl_kernels.h"
#include "cuda_kernels/node/nccl_transport.cuh"

namespace xen_moe::XEN_MOE_VARIANT::nccl {
namespace {

constexpr int kWords = (kRanks + 63) / 64;
struct Gone {  // processes that have ended: a bit for each rank
  uint64_t word[kWords];
  __device__ __forceinline__ bool Has(int rank) const {
    return kLargeGroups ? word[rank / 64] >> rank % 64 & 1 : word[0] >> rank & 1;
  }
};

template <class Condition>
__device__ bool Within(uint64_t start, uint64_t limit_ns, Condition condition) {
  while (!condition()) {
    if (NowNs() - start > limit_ns) return false;
  }
  return true;
}

// One block. A strong signal arrives after everything that was put before it, so when the signals of all ranks of other
// nodes have arrived, no put to this rank is pending. The signals go between all ranks because direct chunks and
// failure words do too.
__global__ void SettleKernel(NcclLink link, RailPlan plan, uint32_t signals, Gone gone, uint64_t time,
                             uint64_t limit_ns, int* late) {
  const uint64_t start = NowNs();
  const int rank = plan.node * plan.per_node + plan.index, ranks = plan.nodes * plan.per_node;
  auto elsewhere = [&](int other) { return other / plan.per_node != plan.node && !gone.Has(other); };
  if (threadIdx.x == 0) {
    int missed = 0;
    for (int i = 0; i < kWords; ++i) link.table->gone[i] = gone.word[i];
    if (!Within(start, limit_ns, [&] { return link.Pending() < 0; })) missed = 1 + link.Pending();
    for (int other = 0; other < ranks; ++other) {
      if (elsewhere(other)) link.Raise(other, rank);
    }
    for (int other = 0; missed == 0 && other < ranks; ++other) {
      if (elsewhere(other) && !Within(start, limit_ns, [&] { return link.Read(other) >= time; })) missed = 1 + other;
    }
    *late = missed;
  }
  __syncthreads();
  for (uint32_t signal = threadIdx.x; signal < signals; signal += blockDim.x) {
    link.Base()[signal] = link.Read(NcclLink::kSettleSignals + signal);
  }
}

}  // namespace

int LaunchSettle(const NcclSite& site, const RailPlan& plan, const uint64_t* gone, uint64_t time, uint64_t limit_ns,
                 int* late, cudaStream_t stream) {
  const int ranks = plan.nodes * plan.per_node;
  Gone out;
  for (int i = 0; i < kWords; ++i) out.word[i] = gone[i];
  const uint32_t signals = NcclRequirements(ranks, plan.nodes).ginSignalCount - NcclLink::kSettleSignals;
  return Launch(SettleKernel, 1, 256, 0, stream, NcclLink::Of(site), plan, signals, out, time, limit_ns, late);
}
int PreloadSettle() { return LoadKernel(SettleKernel); }

}  // namespace xen_moe::XEN_MOE_VARIANT::nccl
