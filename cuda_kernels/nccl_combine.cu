// Combine between processes, over NCCL.
#include "nccl_launch.h"
#include "nccl_transport.cuh"
#include "node_combine_launch.cuh"
#include "node_low_latency_combine.cuh"

namespace XEN_MOE_KERNELS {

int LaunchNcclCombine(const CombineParams& p, const RailParams& rails, const NcclSite& site, cudaStream_t stream) {
  if (!kWide && p.routing.ranks > kNarrowRanks) return wide::LaunchNcclCombine(p, rails, site, stream);
  if (p.schedule.low_latency) return LaunchNodeLowLatencyCombine(p, rails, NcclLink::Of(site), stream);
  return LaunchAnyNodeCombine(p, rails, NcclLink::Of(site), stream);
}
int PreloadNcclCombine() {
  if (int e = PreloadNodeLowLatencyCombine<NcclLink>()) return e;
  return PreloadAnyNodeCombine<NcclLink>();
}

}  // namespace XEN_MOE_KERNELS
