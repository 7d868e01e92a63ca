// Puts between processes: the kernels over NCCL, as workspaces see them. A module has these kernels if it was compiled
// with NCCL's headers (XEN_MOE_NCCL_KERNELS).
#pragma once

#include "cuda_kernels/node/nccl_kernels.h"
#include "ffi/persistent_memory.h"

namespace xen_moe {

// Returns null where the module has no such kernels.
const LinkKernels* NcclLinkKernels();
// Returns the version of the headers, as NcclHeaders does; 0 where the module has no such kernels.
int NcclLinkHeaders();
// Returns how many ranks of the communicator that was started (ffi/nccl_memory.h) share NVLink with a rank, itself
// included; 0 where the module has no such kernels. Throws MemoryError.
int NcclRanksPerNode();
inline NcclSite NcclSiteOf(const Member& member) { return {member.connection->data(), &member.rail->windows}; }

}  // namespace xen_moe
