// Symmetric memory between processes of one host that come and go (xen_moe_jax.elastic), from CUDA's IPC handles.
//
// Each process allocates alone. The caller sets which blocks of other processes it can reach: ShowIpc returns the
// handle of an own block, and ReachIpc maps the corresponding block of another process, or forgets it. For a process
// that is absent, this process's own block takes the place: kernels store nothing at an inactive rank, and read nothing
// of it.
#pragma once

#include <string>

#include "ffi/memory_provider.h"

namespace xen_moe {

// All functions throw MemoryError.

// Sets this process's number and GPU, once, before anything is allocated.
const MemoryProvider* StartIpc(int process, int num_processes, int ordinal);
// Returns the handle of a block of this process, by which other processes map it.
std::string ShowIpc(void* own);
// Maps the block with this handle as the block of `process` that corresponds to `own`, in place of an earlier one. "":
// the process is absent.
void ReachIpc(void* own, int process, const std::string& handle);

}  // namespace xen_moe
