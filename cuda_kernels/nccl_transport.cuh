// transport.cuh by NCCL's device interface (GIN): puts from a kernel into the memory of other nodes, over whatever
// network NCCL has. The only file that includes NCCL's device headers (package nvidia-nccl-cu13); one library serves
// kernels that were compiled with the headers of an earlier one.
//
// Memory order: a put follows a fence at system scope, and its signal is a strong one: who sees it sees this put and
// all earlier ones of this context to that rank. There is one context, so that this holds for every warp. A signal is
// read with acquire semantics at system scope.
//
// What waits: nothing here. NCCL makes a put wait, without a limit, where the queue to its rank is full. So puts that
// have not completed are counted for each rank, and a place is reserved first (Transport), in a wait that has a limit.
#pragma once

#include <nccl.h>
#include <nccl_device.h>

#include "rail_plan.h"
#include "transport.cuh"

namespace xen_moe {

// Puts under way to one rank. NCCL's queues have room for 32 at least.
constexpr uint32_t kMostPuts = 32;

// In device memory, written before the first operation; `reserved` is the kernels'. Rank r is NCCL's rank r.
struct NcclTable {
  ncclWindow_t staging[kGenerations];  // generation g: entry g % kGenerations
  uint64_t staging_at[kGenerations];   // where the staging area lies in its window
  ncclWindow_t mailbox;
  uint64_t mailbox_at;
  uint32_t reserved[kMaxRanks];  // puts to each rank so far
};

struct NcclLink {
  ncclDevComm comm;
  NcclTable* table;

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
    Issue(generation, target, to, from, bytes, ncclGin_StrongSignalInc{signal});
  }
  __device__ __forceinline__ uint64_t Count(uint32_t signal) const { return ncclGin(comm, 0).readSignal(signal); }
  __device__ __forceinline__ int Pending() const {
    for (int rank = 0; rank < comm.nRanks; ++rank) {
      if (LoadRelaxedGpu(&table->reserved[rank]) != Completed(rank)) return rank;
    }
    return -1;
  }
  // What goes is the word in the own mailbox, which is `word` or a later one. NCCL has no compare and swap: a word that
  // is there gives way to it.
  __device__ __forceinline__ void Fail(int target, uint64_t) const {
    const uint64_t at = table->mailbox_at + offsetof(Mailbox, failure);
    PutInto(target, table->mailbox, at, at, sizeof(Mailbox::failure), ncclGin_None{});
  }

 private:
  // A counter for each rank: puts whose source has been read.
  __device__ __forceinline__ uint32_t Completed(int target) const {
    return static_cast<uint32_t>(ncclGin(comm, 0).readCounter(target));
  }
  template <class Signal>
  __device__ __forceinline__ void Issue(uint32_t generation, int target, uint64_t to, uint64_t from, uint64_t bytes,
                                        Signal signal) const {
    if ((threadIdx.x & 31) != 0) return;
    const uint32_t entry = generation % kGenerations;
    const uint64_t at = table->staging_at[entry];
    PutInto(target, table->staging[entry], at + to, at + from, bytes, signal);
  }
  template <class Signal>
  __device__ __forceinline__ void PutInto(int target, ncclWindow_t window, uint64_t to, uint64_t from, uint64_t bytes,
                                          Signal signal) const {
    ncclGin(comm, 0).put(ncclTeamWorld(comm), target, window, to, window, from, bytes, signal,
                         ncclGin_WeakCounterInc{static_cast<ncclGinCounter_t>(target)}, ncclCoopThread{},
                         ncclGin_None{}, cuda::thread_scope_thread, cuda::thread_scope_system);
  }
};

// What the host asks NCCL for.
inline ncclDevCommRequirements_t NcclRequirements(int nodes) {
  ncclDevCommRequirements_t out = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  out.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
  out.ginContextCount = 1;
  out.ginSignalCount = nodes * kMaxChunks;
  out.ginCounterCount = kRanks;
  return out;
}

}  // namespace xen_moe
