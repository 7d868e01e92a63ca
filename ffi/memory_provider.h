// Where symmetric memory between processes comes from. Another module (xen_moe_jax._nvshmem) hands this table to
// xen_moe_jax._cuda, which therefore neither links nor includes what is behind it. Memory within one process needs none
// (ffi/devices.h).
#pragma once

#include <cstdint>

namespace xen_moe {

struct MemoryProvider {
  int num_processes;
  // Collective over all processes, in the same order everywhere: entered only when all have agreed to
  // (ffi/agreement.h). Null when there is not enough.
  void* (*allocate)(uint64_t bytes);
  // Collective likewise.
  void (*release)(void* own);
  // `own` of process `process` as mapped here; null when it cannot be reached by plain loads and stores.
  void* (*peer)(void* own, int process);
};

}  // namespace xen_moe
