// Combine between processes, over NCCL.
#include "nccl_launch.h"
#include "nccl_transport.cuh"
#include "node_combine_launch.cuh"

namespace xen_moe {

int LaunchNcclCombine(const CombineParams& p, const RailParams& rails, const NcclSite& site, cudaStream_t stream) {
  return LaunchAnyNodeCombine(p, rails, NcclLink::Of(site), stream);
}
int PreloadNcclCombine() { return PreloadAnyNodeCombine<NcclLink>(); }

}  // namespace xen_moe
