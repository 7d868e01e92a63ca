// Symmetric memory between processes of one host that come and go (xen_moe_jax.elastic), from CUDA's IPC handles.
//
// Each process allocates alone. What it can reach of the others is set from outside: Show gives the handle of a block,
// and Reach maps the corresponding block of another process, or forgets it. A process that is not there is stood in for
// by this process's own block: kernels store nothing at a rank that is inactive, and read nothing of it.
#pragma once

#include <string>

#include "ffi/memory_provider.h"

namespace xen_moe {

// All functions throw MemoryError.

// Sets this process's number and GPU, once, before anything is allocated.
const MemoryProvider* StartIpc(int process, int num_processes, int ordinal);
// Returns the handle of a block of this process, by which other processes map it.
std::string ShowIpc(void* own);
// From now on `process`'s block that corresponds to `own` is the one with this handle; "": the process is not there.
void ReachIpc(void* own, int process, const std::string& handle);

}  // namespace xen_moe
