// Symmetric memory between processes, from NVSHMEM. Plain functions: only nvshmem_memory.cu includes NVSHMEM's headers.
#pragma once

#include <cstdint>

#include "ffi/memory_provider.h"

namespace xen_moe {

constexpr int kUniqueIdBytes = 128;
int NvshmemUniqueId(void* out);                                          // 0 or NVSHMEM's code
int NvshmemInit(int process, int num_processes, const void* unique_id);  // on the current CUDA device; collective
void NvshmemVersions(int out[6]);  // built against (major, minor, patch), running with
const MemoryProvider* NvshmemProvider();

}  // namespace xen_moe
