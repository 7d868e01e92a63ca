// Where symmetric memory between processes comes from: NVSHMEM, which another module (xen_moe_jax._nvshmem) hands to
// xen_moe_jax._cuda as this table, or NCCL, which ffi/nccl_memory.h loads at run time. Neither is linked or included by
// what uses the table. Memory within one process needs none (ffi/devices.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace xen_moe {

// The name under which one module hands the table to another: modules built from different tables do not understand
// each other.
constexpr const char* kMemoryProviderCapsule = "xen_moe_memory_provider/3";

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
  // For kernels that put to processes whose memory cannot be reached (LinkKernels); both null where there is no such
  // thing. Collective, entered as `join` is: fills `made`, whose size is set, with what `request` asks for. False as
  // for `join`.
  bool (*connect)(const std::string& request, std::string* made, double seconds);
  // What names a joined block in such a put.
  void* (*window)(void* own);
};

struct RailMemory;

// The kernels' half of such puts, for the one provider that they were compiled for. They know its structures; the host
// passes these on as bytes.
struct LinkKernels {
  std::string (*request)(int ranks, int nodes);  // of a group of so many: what `connect` is given
  size_t made_bytes;                             // of what it fills
  // Loads the kernels that a group of `ranks` runs on a GPU. Throws MemoryError.
  void (*prepare)(int ordinal, int ranks);
  // Once nothing runs on the GPU, for the `time`th time since `connect`, by all ranks of the group at once but those of
  // the bit mask `gone` (kGoneWords words), whose processes have ended: returns when no put between the others and this
  // rank is under way any more, and its counters stand at nought. Throws MemoryError after `seconds`, with the rank
  // that it has waited for.
  void (*settle)(int ordinal, const std::string& made, RailMemory* rail, int rank, int ranks, int per_node,
                 const uint64_t* gone, uint64_t time, double seconds);
};

}  // namespace xen_moe
