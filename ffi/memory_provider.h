// Where symmetric memory between processes comes from: NVSHMEM, which another module (xen_moe_jax._nvshmem) hands to
// xen_moe_jax._cuda as this table, or NCCL, which ffi/nccl_memory.h loads at run time. Neither is linked or included by
// what uses the table. Memory within one process needs none (ffi/devices.h).
#pragma once

#include <cstdint>

namespace xen_moe {

// The name under which one module hands the table to another: modules built from different tables do not understand
// each other.
constexpr const char* kMemoryProviderCapsule = "xen_moe_memory_provider/2";

struct MemoryProvider {
  const char* name;
  int num_processes;
  // Null when there is not enough. Where `join` is null it is collective over all processes, in the same order
  // everywhere, and entered only when all have agreed to (ffi/agreement.h); else it is this process's own affair.
  void* (*allocate)(uint64_t bytes);
  // Collective, entered as above: shows `own` to all processes. Whatever comes of it, `own` may be given to `release`
  // alone from then on. False when it failed, or had not ended after `seconds`.
  bool (*join)(void* own, double seconds);
  // Gives back what was allocated and never joined. Null where `join` is.
  void (*discard)(void* own);
  // By all processes in the same order, once no GPU uses the memory; waits for nobody where `join` is not null.
  void (*release)(void* own);
  // `own` of process `process` as mapped here; null when it cannot be reached by plain loads and stores.
  void* (*peer)(void* own, int process);
  // Why the call of this thread that failed last did, and what to do about it.
  const char* (*reason)();
  // The process has ended: nobody is to wait for it. May be null.
  void (*lost)(int process);
};

}  // namespace xen_moe
