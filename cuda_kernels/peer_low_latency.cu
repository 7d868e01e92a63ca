// Dispatch and combine of small batches between virtual nodes of one process.
#include "node_launch.h"
#include "node_low_latency_combine.cuh"
#include "node_low_latency_dispatch.cuh"
#include "peer_transport.cuh"

namespace XEN_MOE_KERNELS {

int LaunchPeerLowLatencyDispatch(const DispatchParams& p, const RailParams& rails, const PeerTable* peers,
                                 cudaStream_t stream) {
  if (!kWide && p.routing.ranks > kNarrowRanks) return wide::LaunchPeerLowLatencyDispatch(p, rails, peers, stream);
  return LaunchNodeLowLatencyDispatch(p, rails, PeerLink{peers, p.routing.rank}, stream);
}
int LaunchPeerLowLatencyCombine(const CombineParams& p, const RailParams& rails, const PeerTable* peers,
                                cudaStream_t stream) {
  if (!kWide && p.routing.ranks > kNarrowRanks) return wide::LaunchPeerLowLatencyCombine(p, rails, peers, stream);
  return LaunchNodeLowLatencyCombine(p, rails, PeerLink{peers, p.routing.rank}, stream);
}
int PreloadPeerLowLatency() {
  if (int e = PreloadNodeLowLatencyDispatch<PeerLink>()) return e;
  return PreloadNodeLowLatencyCombine<PeerLink>();
}

}  // namespace XEN_MOE_KERNELS
