// Dispatch between processes, over NCCL.
#include "nccl_launch.h"
#include "nccl_transport.cuh"
#include "node_dispatch_launch.cuh"
#include "node_low_latency_dispatch.cuh"

namespace XEN_MOE_KERNELS {

int LaunchNcclDispatch(const DispatchParams& p, const RailParams& rails, const NcclSite& site, cudaStream_t stream) {
  if (!kWide && p.routing.ranks > kNarrowRanks) return wide::LaunchNcclDispatch(p, rails, site, stream);
  if (p.schedule.low_latency) return LaunchNodeLowLatencyDispatch(p, rails, NcclLink::Of(site), stream);
  return LaunchAnyNodeDispatch(p, rails, NcclLink::Of(site), stream);
}
int PreloadNcclDispatch() {
  if (int e = PreloadNodeLowLatencyDispatch<NcclLink>()) return e;
  return PreloadAnyNodeDispatch<NcclLink>();
}

}  // namespace XEN_MOE_KERNELS
