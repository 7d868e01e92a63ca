// Symmetric memory between processes, from NCCL: a communicator of this library's own, over all processes of the job,
// and a window for each block, through which the processes that share NVLink have each other's memory mapped.
//
// Making memory is this process's affair; showing it (a window) is collective. Every wait has a limit and ends early
// when a process has died. After a window that did not come about, nobody can know which of the others believe that it
// did, so this process makes no further ones; the windows that there are go on serving.
#pragma once

#include <string>

#include "ffi/devices.h"
#include "ffi/memory_provider.h"

namespace xen_moe {

// All throw MemoryError.
int LoadNccl(const std::string& path);  // its version: major * 10000 + minor * 100 + patch
std::string NewNcclId();                // in one process, for all
// Collective, within `seconds`; on GPU `ordinal` from now on. Process p is NCCL's rank p.
void StartNccl(Devices* gpus, int ordinal, int process, int num_processes, const std::string& id, double seconds);
const MemoryProvider* NcclProvider();

}  // namespace xen_moe
