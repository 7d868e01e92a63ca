// Launchers of the kernels across nodes: a pair for each link that carries what crosses. No template and no CUDA device
// code: what the host includes. Each goes on to the kernels in `wide` for more than kNarrowRanks ranks
// (wide_peer_*.cu).
#pragma once

#include "rail_plan.h"

namespace xen_moe {

// By pointer (peer_transport.cuh), between virtual nodes of one process. A cudaError_t, as LaunchDispatch and
// LaunchCombine. `params.staging` as PlanRail has completed it; `peers`: this rank's, in device memory.
int LaunchPeerDispatch(const DispatchParams& params, const RailParams& rails, const PeerTable* peers,
                       cudaStream_t stream);
int LaunchPeerCombine(const CombineParams& params, const RailParams& rails, const PeerTable* peers,
                      cudaStream_t stream);
// The same where schedule.low_latency.
int LaunchPeerLowLatencyDispatch(const DispatchParams& params, const RailParams& rails, const PeerTable* peers,
                                 cudaStream_t stream);
int LaunchPeerLowLatencyCombine(const CombineParams& params, const RailParams& rails, const PeerTable* peers,
                                cudaStream_t stream);
// Loads their kernels on the current device. A cudaError_t.
int PreloadPeerDispatch();
int PreloadPeerCombine();
int PreloadPeerLowLatency();

namespace wide {
int LaunchPeerDispatch(const DispatchParams& params, const RailParams& rails, const PeerTable* peers,
                       cudaStream_t stream);
int LaunchPeerCombine(const CombineParams& params, const RailParams& rails, const PeerTable* peers,
                      cudaStream_t stream);
int LaunchPeerLowLatencyDispatch(const DispatchParams& params, const RailParams& rails, const PeerTable* peers,
                                 cudaStream_t stream);
int LaunchPeerLowLatencyCombine(const CombineParams& params, const RailParams& rails, const PeerTable* peers,
                                cudaStream_t stream);
// Loaded by groups of so many ranks alone.
int PreloadPeerDispatch();
int PreloadPeerCombine();
int PreloadPeerLowLatency();
}  // namespace wide

}  // namespace xen_moe
