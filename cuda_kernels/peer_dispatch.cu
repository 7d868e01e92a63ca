// Dispatch between virtual nodes of one process.
#include "node_dispatch_launch.cuh"
#include "node_launch.h"
#include "peer_transport.cuh"

namespace XEN_MOE_KERNELS {

int LaunchPeerDispatch(const DispatchParams& p, const RailParams& rails, const PeerTable* peers, cudaStream_t stream) {
  if (!kWide && p.routing.ranks > kNarrowRanks) return wide::LaunchPeerDispatch(p, rails, peers, stream);
  return LaunchAnyNodeDispatch(p, rails, PeerLink{peers, p.routing.rank}, stream);
}
int PreloadPeerDispatch() { return PreloadAnyNodeDispatch<PeerLink>(); }

}  // namespace XEN_MOE_KERNELS
