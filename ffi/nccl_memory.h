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
#include "ffi/nccl_api.h"

namespace xen_moe {

// All throw MemoryError.
int LoadNccl(const std::string& path);  // its version: major * 10000 + minor * 100 + patch
std::string NewNcclId();                // in one process, for all
// Collective, within `seconds`; on GPU `ordinal` from now on. Process p is NCCL's rank p.
void StartNccl(Devices* gpus, int ordinal, int process, int num_processes, const std::string& id, double seconds);
const MemoryProvider* NcclProvider();

// For kernels that put to other nodes (cuda_kernels/node/nccl_transport.cuh). The structures are those of the headers
// that these kernels were compiled with, given and taken as bytes: this library includes none of them. Collective,
// entered in the same order by all processes as windows are, within `seconds`: the device communicator that
// `requirements` (ncclDevCommRequirements_t) asks for. When it fails, there are no further windows either.
std::string JoinNcclDevices(const std::string& requirements, size_t device_comm_bytes, double seconds);
// This process's affair: fills `*properties` (ncclCommProperties_t), whose first members are set.
void QueryNccl(std::string* properties);
// The window of a block that was joined; null when there is none.
NcclWindow* NcclWindowOf(void* own);

}  // namespace xen_moe
