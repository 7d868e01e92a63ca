// The order in which the processes of a job change memory together.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

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

// The place of one agreement in that order. A ticket that never ended would hold up every later agreement of this
// process for ever, so the destructor ends it, after an exception too.
class Turn {
 public:
  explicit Turn(uint64_t ticket) : ticket_(ticket) {}
  Turn(Turn&& other) noexcept : ticket_(std::exchange(other.ticket_, 0)) {}
  Turn& operator=(Turn&&) = delete;
  ~Turn() { End(); }
  // Calls TicketOrder::Begin.
  void Begin(double seconds) { TicketOrder::Get().Begin(ticket_, seconds); }
  void End() {
    if (ticket_ != 0) TicketOrder::Get().End(std::exchange(ticket_, 0));
  }

 private:
  uint64_t ticket_;  // 0: ended
};

// The result of an agreement of all processes.
struct Votes {
  uint64_t ticket;
  Turn turn;
  std::vector<Vote> votes;  // by process
  std::vector<int> gone;    // processes that have died and are left out

  // Throws MemoryError with the first process whose vote is an error, unless the process is left out. `what`: the
  // change, for the text.
  void Check(const std::string& what) const;
};

}  // namespace xen_moe
