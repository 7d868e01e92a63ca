// Combine between virtual nodes of one process.
#include "node_combine_launch.cuh"
#include "node_launch.h"
#include "peer_transport.cuh"

namespace XEN_MOE_KERNELS {

int LaunchPeerCombine(const CombineParams& p, const RailParams& rails, const PeerTable* peers, cudaStream_t stream) {
  if (!kWide && p.routing.ranks > kNarrowRanks) return wide::LaunchPeerCombine(p, rails, peers, stream);
  return LaunchAnyNodeCombine(p, rails, PeerLink{peers, p.routing.rank}, stream);
}
int PreloadPeerCombine() { return PreloadAnyNodeCombine<PeerLink>(); }

}  // namespace XEN_MOE_KERNELS
