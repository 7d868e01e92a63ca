// Changes of the symmetric memory of a workspace: one at a time in this process, and agreed upon between processes.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

#include "ffi/groups.h"
#include "ffi/ticket_order.h"

namespace xen_moe {

class Changes {
 public:
  // `for_flights`: these are the changes of a workspace for asynchronous operations.
  Changes(const Job& job, const Groups& groups, int channel, bool for_flights);
  // Holds off every other change. Throws MemoryError after `seconds`.
  std::unique_lock<std::timed_mutex> Begin(double seconds);
  // As Begin, without waiting: the lock may not be owned.
  std::unique_lock<std::timed_mutex> TryBegin();
  // Every process of the job must call this with the same `what`, in the same order within this workspace, while it
  // holds the lock of Begin. Throws MemoryError, with the processes that did not come, after `seconds`. `without_dead`:
  // processes that have died are not waited for.
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
