// Failures of the groups of a workspace: which processes have died, what the error records say, which runs of programs
// still go on, and the reset after which the groups work again.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <mutex>
#include <set>
#include <string>

#include "ffi/staging_memory.h"

namespace xen_moe {

class Recovery {
 public:
  Recovery(const Job& job, const Groups& groups, Changes& changes, PersistentMemory& persistent, StagingMemory& staging,
           int channel);

  // Tells kernels of this workspace that still wait to end.
  void Interrupt(double seconds);
  // Starts again after a failure. Returns, or throws MemoryError, within about `seconds`.
  void Reset(double seconds);
  // For groups whose processes come and go, and which agree on their members by themselves (xen_moe_jax.elastic): ends
  // operations that still wait, and returns once the GPU is idle. Throws MemoryError after `seconds`.
  void Quiet(double seconds);
  // Starts again with other members, after Quiet has returned on all of them. `map` maps their memory, `gone` holds the
  // processes that are absent, and all members begin with the same `epoch` and the same `generation` of the memory.
  void Adopt(const std::set<int>& gone, uint32_t epoch, uint32_t generation, const std::function<void()>& map,
             double seconds);
  // For tests: starts again from this epoch, as after a reset. Nothing may be running.
  void SetEpochForTest(uint32_t epoch);
  // Called when a process has ended: every group that has a rank there fails. `clean`: the process had announced its
  // end; then the failure shows only when an operation needs that rank. After FailOnlyWhenNeeded this holds for every
  // process.
  void MarkDead(int process, bool clean);
  // Called once a program uses an `active` mask. From then on a dead rank fails the group only when an operation
  // actually needs it.
  void FailOnlyWhenNeeded() { masked_.store(true); }

  // Returns the latest epoch, which is the number of an operation, of this process's ranks; 0 if there is no memory.
  uint32_t NewestEpoch() const { return persistent_.made() ? persistent_.NewestEpoch() : 0; }

  // Returns the processes that have died and that a reset has left out: the same set in every process that is left.
  std::set<int> LeftOut();

  bool Failed() const;
  // Returns "", or the failure of one of the groups.
  std::string Failure() const;
  // Returns whether `run` may launch. A run that some device began before the failure continues on all of its devices,
  // with poisoned results: the devices of a run must launch the same operations, XLA's own collectives included.
  // `failed` returns whether there is a failure now.
  bool Admit(int64_t run, const std::function<bool()>& failed);

 private:
  void Restart(uint32_t epoch);
  void WriteFailure(size_t i, uint64_t failure);
  void WriteDead();
  void SettleRails(double seconds);

  static constexpr int64_t kNoRun = std::numeric_limits<int64_t>::min();

  const Job& job_;
  const Groups& groups_;
  Changes& changes_;
  PersistentMemory& persistent_;
  StagingMemory& staging_;
  const int channel_;

  std::mutex dead_mutex_;
  std::set<int> dead_;      // processes
  std::set<int> left_out_;  // processes that a reset has left out
  std::atomic<bool> masked_{false};
  std::atomic<bool> elastic_{false};  // Adopt has been called

  std::mutex runs_mutex_;
  std::array<int64_t, 64> runs_;  // runs that began before any failure, by the run's number modulo 64
};

}  // namespace xen_moe
