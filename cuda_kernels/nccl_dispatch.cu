// Dispatch between processes, over NCCL.
#include "nccl_launch.h"
#include "nccl_transport.cuh"
#include "node_dispatch_launch.cuh"

namespace xen_moe {

int LaunchNcclDispatch(const DispatchParams& p, const RailParams& rails, const NcclSite& site, cudaStream_t stream) {
  return LaunchAnyNodeDispatch(p, rails, NcclLink::Of(site), stream);
}
int PreloadNcclDispatch() { return PreloadAnyNodeDispatch<NcclLink>(); }

}  // namespace xen_moe
