// A workspace: the symmetric memory of the groups of one mesh axis on one channel, as cuda_kernels/core/workspace.h
// describes it, as far as this process has ranks in these groups.
//
// Its parts: Groups (which ranks), Changes (one change at a time, agreed upon), PersistentMemory (memory that never
// moves), StagingMemory (memory that grows), Recovery (failures and reset). Within one process `Devices` gives memory
// that all GPUs of a group reach; between processes (one per GPU) `MemoryProvider` does, and the processes agree first.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "ffi/recovery.h"

namespace xen_moe {

class Workspace {
 public:
  // `devices`, `ranks`, `ranks_per_node`: see Groups. `flights_of`: the workspace whose asynchronous operations this
  // one serves, and which makes and owns it; null: this workspace makes such a one for itself.
  Workspace(Job job, std::vector<DeviceKey> devices, int ranks, int ranks_per_node, int channel,
            Workspace* flights_of = nullptr);
  // No kernel may use its memory any more: Registry::Leave waits for that.
  ~Workspace();
  Workspace(const Workspace&) = delete;

  // See StagingMemory.
  void EnsureCapacity(const Needs& needs, double seconds) { staging_.EnsureCapacity(needs, seconds); }
  bool HasCapacity(const Needs& needs) const { return staging_.HasCapacity(needs); }
  void Reserve(uint64_t staging_bytes, double seconds) { staging_.Reserve(staging_bytes, seconds); }
  void Release(double seconds) { staging_.Release(seconds); }
  void ReclaimIfStale() { staging_.ReclaimIfStale(); }
  bool stale() const { return staging_.stale(); }
  std::shared_lock<std::shared_mutex> Launch(const Needs& needs) { return staging_.Launch(needs); }
  uint64_t staging_bytes() const { return staging_.staging_bytes(); }
  uint64_t scratch_bytes() const { return staging_.scratch_bytes(); }
  int generation() const { return staging_.newest(); }
  int held() const { return staging_.held(); }

  // See Recovery.
  void Interrupt(double seconds) { recovery_.Interrupt(seconds); }
  void Reset(double seconds) { recovery_.Reset(seconds); }
  void SetEpochForTest(uint32_t epoch) { recovery_.SetEpochForTest(epoch); }
  void MarkDead(int process, bool clean) { recovery_.MarkDead(process, clean); }
  void FailOnlyWhenNeeded() { recovery_.FailOnlyWhenNeeded(); }
  uint32_t NewestEpoch() const { return recovery_.NewestEpoch(); }
  std::set<int> LeftOut() { return recovery_.LeftOut(); }
  void Quiet(double seconds) { recovery_.Quiet(seconds); }
  void Adopt(const std::set<int>& gone, uint32_t epoch, uint32_t generation, const std::function<void()>& map,
             double seconds) {
    recovery_.Adopt(gone, epoch, generation, map, seconds);
  }
  // Between processes: returns the two blocks of this process that the others map, the mailbox and the newest staging
  // memory, and sets `needs` to the sizes of the latter. Null where there is no such block.
  std::pair<void*, void*> Shown(Needs* needs) const;
  // These include the workspace of asynchronous operations.
  bool Failed() const;
  std::string Failure() const;
  // Returns "", or why this run of a program must stop before it launches anything.
  std::string Admit(int64_t run);

  // Returns whether everything that was queued on its GPUs ended within `seconds`.
  bool WaitIdle(double seconds) const { return persistent_.WaitIdle(seconds); }
  // Returns the member that runs on this GPU, or null.
  const Member* Find(int ordinal) const;
  const std::vector<Member>& members() const { return persistent_.members(); }
  const std::vector<DeviceKey>& devices() const { return groups_.devices(); }
  int ranks() const { return groups_.ranks(); }
  int ranks_per_node() const { return groups_.ranks_per_node(); }
  bool across() const { return groups_.across(); }
  int channel() const { return channel_; }
  // The source of its memory.
  const char* memory() const { return across() ? job_.provider->name : "peer access"; }
  // The workspace of asynchronous operations, which run beside the operations that use this one. Null in such a
  // workspace itself.
  Workspace* flights() const { return flights_.get(); }
  bool for_flights() const { return flights_of_ != nullptr; }
  // Launches by the host, and how many of them were captured into a graph. The replay of a graph counts as neither.
  std::atomic<uint64_t> launches{0}, captured{0};

 private:
  const Job job_;
  const Groups groups_;
  const int channel_;
  Workspace* const flights_of_;
  Changes changes_;
  PersistentMemory persistent_;
  StagingMemory staging_;
  Recovery recovery_;
  std::unique_ptr<Workspace> flights_;
};

}  // namespace xen_moe
