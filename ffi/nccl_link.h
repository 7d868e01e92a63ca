// Puts between processes: the kernels over NCCL, as workspaces see them. Only in a module that was compiled with NCCL's
// headers (XEN_MOE_NCCL_KERNELS).
#pragma once

#include "cuda_kernels/node/nccl_kernels.h"
#include "ffi/symmetric_memory.h"

namespace xen_moe {

// Null where the module has none.
const LinkKernels* NcclLinkKernels();
// 0 where the module has none; else as NcclHeaders.
int NcclLinkHeaders();
// Of the communicator that was started (ffi/nccl_memory.h): how many ranks share NVLink with a rank, itself included. 0
// where the module cannot know. Throws MemoryError.
int NcclRanksPerNode();
inline NcclSite NcclSiteOf(const Member& member) { return {member.connection->data(), &member.rail->windows}; }

}  // namespace xen_moe
