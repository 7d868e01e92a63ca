// The link that a translation unit of the kernels across nodes is compiled for. The build chooses it: NCCL where
// XEN_MOE_NCCL is defined, else by pointer. Each has a namespace in its variant's, nccl or peer.
#pragma once

#ifdef XEN_MOE_NCCL

#include "cuda_kernels/node/nccl_kernels.h"
#include "cuda_kernels/node/nccl_transport.cuh"

#define XEN_MOE_LINK nccl
namespace xen_moe::XEN_MOE_VARIANT::XEN_MOE_LINK {
using Link = NcclLink;
using Site = NcclSite;
inline Link LinkOf(const Site& site, int) { return NcclLink::Of(site); }
}  // namespace xen_moe::XEN_MOE_VARIANT::XEN_MOE_LINK

#else

#include "cuda_kernels/core/variant.h"
#include "cuda_kernels/kernels.h"
#include "cuda_kernels/node/peer_transport.cuh"

#define XEN_MOE_LINK peer
namespace xen_moe::XEN_MOE_VARIANT::XEN_MOE_LINK {
using Link = PeerLink;
using Site = PeerSite;
inline Link LinkOf(Site site, int rank) { return {site, rank}; }
}  // namespace xen_moe::XEN_MOE_VARIANT::XEN_MOE_LINK

#endif
