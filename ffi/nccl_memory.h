// Symmetric memory between processes, from NCCL: a communicator of this library's own, over all processes of the job,
// and a window for each block, through which processes that share NVLink map each other's memory.
//
// A process allocates memory alone; it shows the memory to the others (a window) together with them. Every wait has a
// limit and ends early when a process has died. When a window has failed, a process cannot know which other processes
// believe that it succeeded. So this process makes no further windows; the existing ones stay in use.
#pragma once

#include <string>

#include "ffi/devices.h"
#include "ffi/memory_provider.h"
#include "ffi/nccl_api.h"

namespace xen_moe {

// All functions but NcclProvider and NcclWindowOf throw MemoryError.

// Opens the library. Returns NCCL's version: major * 10000 + minor * 100 + patch.
int LoadNccl(const std::string& path);
// Returns the id that one process makes and gives to all.
std::string NewNcclId();
// Starts NCCL on GPU `ordinal`, which it uses from then on. Collective: all processes call it and return within
// `seconds`. Process p is NCCL's rank p.
void StartNccl(Devices* gpus, int ordinal, int process, int num_processes, const std::string& id, double seconds);
const MemoryProvider* NcclProvider();

// For kernels that put to other nodes (cuda_kernels/node/nccl_transport.cuh). Structures of NCCL are passed as bytes,
// as the headers have them with which these kernels were compiled: this library includes none of those headers. Returns
// the device communicator that `requirements` (ncclDevCommRequirements_t) asks for. Collective: all processes call it
// in the same order, among their windows, and return within `seconds`. After a failure this process makes no further
// windows.
std::string JoinNcclDevices(const std::string& requirements, size_t device_comm_bytes, double seconds);
// Fills `*properties` (ncclCommProperties_t), whose first members the caller has set. Not collective.
void QueryNccl(std::string* properties);
// Returns the window of a block that was joined; null where there is none.
NcclWindow* NcclWindowOf(void* own);

}  // namespace xen_moe
