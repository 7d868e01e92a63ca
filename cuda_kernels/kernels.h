// The kernels as the host sees them: a table of launchers for each variant (core/variant.h), and the functions that
// choose one. No template of a kernel and no CUDA device code.
#pragma once

#include "cuda_kernels/core/params.h"
#include "cuda_kernels/node/rail_plan.h"

namespace xen_moe {

// Launchers return a cudaError_t. They neither allocate nor synchronize: safe to capture into a CUDA graph.
// Schedule::low_latency says which kernels run.
struct KernelTable {
  int (*dispatch)(const DispatchParams& params, cudaStream_t stream);
  int (*combine)(const CombineParams& params, cudaStream_t stream);
  int (*exchange)(const ExchangeParams& params, cudaStream_t stream);  // null in ranks256_ring, as the next one
  // Fills `out` with `poison` if the group of `mailbox` has failed.
  int (*poison)(const Mailbox* mailbox, char* out, uint64_t bytes, uint8_t poison, cudaStream_t stream);
  // Loads all of these kernels on the current device: a first launch could otherwise wait for a kernel that spins.
  int (*preload)();
};
namespace ranks16 {
extern const KernelTable kKernels;
}
namespace ranks256 {
extern const KernelTable kKernels;
}
namespace ranks256_ring {
extern const KernelTable kKernels;
}

// `ring`: staged rows lie in rings, Staging::ring_tokens > 0 of an operation that is not low-latency.
inline const KernelTable& KernelsFor(int ranks, bool ring) {
  if (ranks <= kSmallGroup) return ranks16::kKernels;
  return ring ? ranks256_ring::kKernels : ranks256::kKernels;
}
inline int LaunchDispatch(const DispatchParams& p, cudaStream_t stream) {
  return KernelsFor(p.routing.ranks, HasRing(p.schedule, p.staging)).dispatch(p, stream);
}
inline int LaunchCombine(const CombineParams& p, cudaStream_t stream) {
  return KernelsFor(p.routing.ranks, HasRing(p.schedule, p.staging)).combine(p, stream);
}
inline int LaunchExchange(const ExchangeParams& p, cudaStream_t stream) {
  return KernelsFor(p.ranks, false).exchange(p, stream);
}
inline int LaunchPoison(const Mailbox* mailbox, char* out, uint64_t bytes, uint8_t poison, int ranks,
                        cudaStream_t stream) {
  return KernelsFor(ranks, false).poison(mailbox, out, bytes, poison, stream);
}
// Loads all kernels that groups of `ranks` ranks run within a node.
inline int PreloadKernels(int ranks) {
  if (int e = KernelsFor(ranks, false).preload()) return e;
  return ranks > kSmallGroup ? KernelsFor(ranks, true).preload() : 0;
}

// The kernels across nodes. `Site`: what a rank reaches the other nodes with. `params.staging` is as PlanRail has
// completed it. Rows never lie in rings there.
template <class Site>
struct NodeKernelTable {
  int (*dispatch)(const DispatchParams& params, const RailParams& rails, const Site& site, cudaStream_t stream);
  int (*combine)(const CombineParams& params, const RailParams& rails, const Site& site, cudaStream_t stream);
  int (*preload)();
};

// By pointer (node/peer_transport.cuh), between virtual nodes of one process: this rank's table, in device memory.
using PeerSite = const PeerTable*;
using PeerKernelTable = NodeKernelTable<PeerSite>;
namespace ranks16::peer {
extern const PeerKernelTable kKernels;
}
namespace ranks256::peer {
extern const PeerKernelTable kKernels;
}
inline const PeerKernelTable& PeerKernelsFor(int ranks) {
  return ranks <= kSmallGroup ? ranks16::peer::kKernels : ranks256::peer::kKernels;
}

}  // namespace xen_moe
