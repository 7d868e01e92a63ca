// Dispatch between virtual nodes of one process.
#include "node_dispatch_launch.cuh"
#include "node_launch.h"
#include "peer_transport.cuh"

namespace xen_moe {

int LaunchPeerDispatch(const DispatchParams& p, const RailParams& rails, const PeerTable* peers, cudaStream_t stream) {
  return LaunchAnyNodeDispatch(p, rails, PeerLink{peers, p.routing.rank}, stream);
}
int PreloadPeerDispatch() { return PreloadAnyNodeDispatch<PeerLink>(); }

}  // namespace xen_moe
