// Changes of the symmetric memory of a workspace: one at a time in this process, and agreed upon between processes.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "ffi/groups.h"
#include "ffi/vote.h"

namespace xen_moe {

// Lets threads act in the order of the tickets of their agreements, which is the same in every process. A collective of
// a memory provider must be entered in that order.
class TicketOrder {
 public:
  static TicketOrder& Get();
  // Waits until every ticket before this one has ended. Throws MemoryError after `seconds`.
  void Begin(uint64_t ticket, double seconds);
  void End(uint64_t ticket);
  // For tests.
  void Clear();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t done_ = 0;         // all tickets up to this one have ended
  std::set<uint64_t> ended_;  // tickets above `done_` that have ended
};

// The result of an agreement of all processes.
struct Votes {
  uint64_t ticket = 0;
  std::vector<Vote> votes;  // by process
  std::vector<int> gone;    // processes that have died and are left out
};

class Changes {
 public:
  // `for_flights`: of the workspace for operations in flight.
  Changes(const Job& job, const Groups& groups, int channel, bool for_flights);
  // Holds off every other change. Throws MemoryError after `seconds`.
  std::unique_lock<std::timed_mutex> Begin(double seconds);
  // As Begin, without waiting: the lock may not be owned.
  std::unique_lock<std::timed_mutex> TryBegin();
  // Every process of the job must call this with the same `what`, in the same order within this workspace, while it
  // holds the lock of Begin. The ticket must be given to TicketOrder::End. Throws MemoryError, with the processes that
  // did not come, after `seconds`. `without_dead`: processes that have died are not waited for.
  Votes Agree(const char* what, const Vote& vote, double seconds, bool without_dead = false);

 private:
  std::string NextKey(const char* what);

  const Job& job_;
  const Groups& groups_;
  const int channel_;
  const bool for_flights_;
  std::timed_mutex mutex_;
  uint64_t agreements_ = 0;
};

}  // namespace xen_moe
