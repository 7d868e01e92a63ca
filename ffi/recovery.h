// Failures of the groups of a workspace: who has died, what the error records say, which runs of programs still go on,
// and the reset after which the groups work again.
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

  // Tells the kernels of this workspace that still wait to end.
  void Interrupt(double seconds);
  // Starts again after a failure. Returns, or throws MemoryError, within about `seconds`.
  void Reset(double seconds);
  // For tests: goes on from this number, as after a reset. Nothing may be running.
  void SetEpochForTest(uint32_t epoch);
  // The process has ended: every group that has a rank there fails. `clean`: the process had announced its end; then
  // the failure shows when an operation needs that rank. So it does in any case after FailOnlyWhenNeeded.
  void MarkDead(int process, bool clean);
  // Once a program uses an `active` mask: a dead rank fails the group only when an operation actually needs it.
  void FailOnlyWhenNeeded() { masked_.store(true); }

  // Processes that have died and that all others have agreed to go on without, in a reset.
  std::set<int> LeftOut();

  bool Failed() const;
  // Empty, or the failure of one of the groups.
  std::string Failure() const;
  // Whether `run` may launch. A run that some device began before any failure goes on on all of its devices, poisoned:
  // they must agree on what they launch, XLA's own collectives included. `failed` tells whether there is a failure now.
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
  std::set<int> left_out_;  // by an agreement of all others
  std::atomic<bool> masked_{false};

  std::mutex runs_mutex_;
  std::array<int64_t, 64> runs_;  // runs that began before any failure, by the run's number modulo 64
};

}  // namespace xen_moe
