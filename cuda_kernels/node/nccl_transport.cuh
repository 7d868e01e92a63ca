// transport.cuh over NCCL's device interface (GIN): puts from a kernel into the memory of other nodes, over every
// network that NCCL supports. This is the only file that includes NCCL's device headers (package nvidia-nccl-cu13); a
// library runs kernels that were compiled with the headers of an earlier one.
//
// Memory order: a put follows a fence at system scope, and its signal is a strong one: a rank that sees the signal sees
// this put and all earlier puts of this context to that rank. There is one context, so that this holds for every warp.
// A signal is read with acquire semantics at system scope.
//
// The code that NCCL inlines handles each kind of network, so a kernel holds it once, behind a call.
//
// Who waits for whom: nothing here waits. NCCL makes a put wait, without a limit, if the queue to its rank is full.
// Therefore pending puts are counted for each rank, and Transport first reserves a place, in a wait that has a limit.
#pragma once

#include <nccl.h>
#include <nccl_device.h>

#include <cstring>

#include "cuda_kernels/node/nccl_kernels.h"
#include "cuda_kernels/node/transport.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

// Pending puts to one rank. NCCL's queues have room for 32 at least.
constexpr uint32_t kMostPuts = 32;

struct NcclLink {
  ncclDevComm comm;
  WindowTable* table;  // in device memory

  static NcclLink Of(const NcclSite& site) {
    NcclLink link{};
    std::memcpy(static_cast<void*>(&link.comm), site.device_comm, sizeof(link.comm));
    link.table = site.windows;
    return link;
  }
  static constexpr bool kReserves = true;
  __device__ __forceinline__ bool Reserve(int target) const {
    const uint32_t place = atomicAdd(&table->reserved[target], 1u);
    if (place - Completed(target) < kMostPuts) return true;
    atomicSub(&table->reserved[target], 1u);
    return false;
  }
  __device__ __forceinline__ void Put(uint32_t generation, int target, uint64_t to, uint64_t from,
                                      uint64_t bytes) const {
    Issue(generation, target, to, from, bytes, ncclGin_None{});
  }
  __device__ __forceinline__ void PutSignal(uint32_t generation, int target, uint64_t to, uint64_t from, uint64_t bytes,
                                            uint32_t signal) const {
    const ncclGin_StrongSignalInc raise{kSettleSignals + signal};
    if (bytes) return Issue(generation, target, to, from, bytes, raise);
    // Not every network is known to support a put of zero bytes.
    constexpr uint64_t kAt = offsetof(Mailbox, unread);
    if ((threadIdx.x & 31) == 0) PutInto(target, table->mailbox, kAt, kAt, sizeof(Mailbox::unread), raise);
  }
  __device__ __forceinline__ uint64_t Count(uint32_t signal) const {
    return Read(kSettleSignals + signal) - Base()[signal];
  }
  __device__ __forceinline__ int Pending() const {
    for (int rank = 0; rank < table->ranks; ++rank) {
      if (LoadRelaxedGpu(&table->reserved[rank]) != Completed(rank) && !Gone(rank)) return rank;
    }
    return -1;
  }
  // Returns the value of each counter at the last reset.
  __device__ __forceinline__ uint64_t* Base() const { return kLargeGroups ? LargeGroupBase(table) : table->base; }
  // Returns whether a rank's process had ended by then.
  __device__ __forceinline__ bool Gone(int rank) const {
    return kLargeGroups ? table->gone[rank / 64] >> rank % 64 & 1 : table->gone[0] >> rank & 1;
  }
  // NCCL's counters: first one for each rank, which SettleKernel raises, then those of the kernels.
  static constexpr uint32_t kSettleSignals = kRanks;
  __device__ __noinline__ uint64_t Read(uint32_t raw) const { return ncclGin(comm, 0).readSignal(raw); }
  // Without payload, and not counted: only when no other put is pending. One lane calls it.
  __device__ __forceinline__ void Raise(int target, uint32_t raw) const {
    ncclGin(comm, 0).signal(ncclTeamWorld(comm), table->process[target], ncclGin_StrongSignalInc{raw});
  }
  // Sends the word in this rank's own mailbox, which is `word` or a later one. NCCL has no compare and swap: it
  // overwrites a word that is there.
  __device__ __forceinline__ void Fail(int target, uint64_t) const {
    constexpr uint64_t kAt = offsetof(Mailbox, failure);
    PutInto(target, table->mailbox, kAt, kAt, sizeof(Mailbox::failure), ncclGin_None{});
  }
  __device__ __forceinline__ void Notify(int target, int about, uint64_t) const {
    const uint64_t at = offsetof(Mailbox, told) + about * sizeof(uint64_t);
    PutInto(target, table->mailbox, at, at, sizeof(uint64_t), ncclGin_None{});
  }

 private:
  // Returns a counter for each rank: puts whose source has been read.
  __device__ __noinline__ uint32_t Completed(int target) const {
    return static_cast<uint32_t>(ncclGin(comm, 0).readCounter(target));
  }
  template <class Action>
  __device__ __forceinline__ void Issue(uint32_t generation, int target, uint64_t to, uint64_t from, uint64_t bytes,
                                        Action action) const {
    if ((threadIdx.x & 31) != 0) return;
    PutInto(target, table->staging[generation % kGenerations], to, from, bytes, action);
  }
  template <class Action>
  __device__ __noinline__ void PutInto(int target, void* opaque, uint64_t to, uint64_t from, uint64_t bytes,
                                       Action action) const {
    const ncclWindow_t window = static_cast<ncclWindow_t>(opaque);
    ncclGin(comm, 0).put(ncclTeamWorld(comm), table->process[target], window, to, window, from, bytes, action,
                         ncclGin_WeakCounterInc{static_cast<ncclGinCounter_t>(target)}, ncclCoopThread{},
                         ncclGin_None{}, cuda::thread_scope_thread, cuda::thread_scope_system);
  }
};

}  // namespace xen_moe::XEN_MOE_VARIANT

namespace xen_moe {

// Returns what the host requires of NCCL.
inline ncclDevCommRequirements_t NcclRequirements(int ranks, int nodes) {
  ncclDevCommRequirements_t out = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  out.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
  out.ginContextCount = 1;
  const int most = ranks <= kSmallGroup ? kSmallGroup : kMaxRanks;  // kRanks of the kernels that they run
  const int known = nodes < kMaxNodes ? nodes : kMaxNodes;
  out.ginSignalCount = most + ChunkSignals(SourcesOf(ranks)) + 2 * known * kRailMessages;
  out.ginCounterCount = most;
  return out;
}

}  // namespace xen_moe
