// Where symmetric memory between processes comes from: NVSHMEM, which another module (xen_moe_jax._nvshmem) hands to
// xen_moe_jax._cuda as this table, or NCCL, which ffi/nccl_memory.h loads at run time. The users of the table link and
// include neither of them. Memory within one process comes from ffi/devices.h, without a provider.
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
  // Returns a block, or null when there is not enough memory. Where `join` is null, this is collective over all
  // processes: they call it in the same order, and only after all have agreed to (ffi/agreement.h). Where `join` is not
  // null, each process calls it on its own.
  void* (*allocate)(uint64_t bytes);
  // Collective, called in the same order by all processes after they have agreed to: shows the block `own` to all
  // processes. From then on, also after a failure, only `release` may take the block. Returns false when it failed, or
  // had not ended after `seconds`.
  bool (*join)(void* own, double seconds);
  // Gives back a block that was allocated and never joined. Null where `join` is null.
  void (*discard)(void* own);
  // Gives back a joined block. All processes call it in the same order, once no GPU uses the memory. It waits for no
  // other process where `join` is not null.
  void (*release)(void* own);
  // Returns the block of `process` that corresponds to `own`, as mapped into this process; null when plain loads and
  // stores cannot reach it.
  void* (*peer)(void* own, int process);
  // Returns why the last failed call of this thread failed, and the remedy.
  const char* (*reason)();
  // Tells the provider that a process has ended, so that no call waits for it. May be null.
  void (*lost)(int process);
  // For kernels that put to processes whose memory they cannot reach (LinkKernels). `connect` and `window` are null
  // where the provider has no such puts. Collective, called as `join` is: fills `made`, whose size is set, with the
  // structure that `request` asks for. Returns false in the cases in which `join` does.
  bool (*connect)(const std::string& request, std::string* made, double seconds);
  // Returns the name of a joined block in such a put.
  void* (*window)(void* own);
};

struct RailMemory;

// The kernels' half of such puts, compiled for one provider. The kernels know the provider's structures; the host
// passes these on as bytes.
struct LinkKernels {
  std::string (*request)(int ranks, int nodes);  // returns the `request` of MemoryProvider::connect
  size_t made_bytes;                             // of the structure that MemoryProvider::connect fills
  // Loads the kernels that a group of `ranks` ranks runs on a GPU. Throws MemoryError.
  void (*prepare)(int ordinal, int ranks);
  // Returns when no put from or to this rank is in progress any more and the rank's counters are zero. All ranks of the
  // group call it together, while nothing runs on their GPUs, for the `time`th time since `connect`. Ranks in the bit
  // mask `gone` (kGoneWords words), whose processes have ended, do not call it and are not waited for. Throws
  // MemoryError after `seconds`, with the rank that this rank has waited for.
  void (*settle)(int ordinal, const std::string& made, RailMemory* rail, int rank, int ranks, int per_node,
                 const uint64_t* gone, uint64_t time, double seconds);
};

}  // namespace xen_moe
