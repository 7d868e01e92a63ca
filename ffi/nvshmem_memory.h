// Symmetric memory between processes, from NVSHMEM. These are plain functions, because only nvshmem_memory.cu includes
// NVSHMEM's headers.
#pragma once

#include <cstdint>

#include "ffi/memory_provider.h"

namespace xen_moe {

constexpr int kUniqueIdBytes = 128;
// Both return 0 or NVSHMEM's error code. NvshmemInit starts NVSHMEM on the current CUDA device; all processes call it.
int NvshmemUniqueId(void* out);
int NvshmemInit(int process, int num_processes, const void* unique_id);
// Writes major, minor and patch of the version that this module was built against, then of the version that it runs
// with.
void NvshmemVersions(int out[6]);
const MemoryProvider* NvshmemProvider();

}  // namespace xen_moe
