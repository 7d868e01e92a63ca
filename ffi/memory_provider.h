// Where symmetric memory between processes comes from. xen_moe_jax._nvshmem hands this table to xen_moe_jax._cuda,
// which therefore neither links nor includes NVSHMEM.
#pragma once

#include <cstdint>

namespace xen_moe {

struct MemoryProvider {
  int num_processes;
  // Collective over all processes, in the same order everywhere. Zeroed; null when there is not enough.
  void* (*allocate)(uint64_t bytes);
  void (*release)(void* own);
  // `own` of process `process` as mapped here; null when it cannot be reached by plain loads and stores.
  void* (*peer)(void* own, int process);
  void (*barrier)();
};

}  // namespace xen_moe
