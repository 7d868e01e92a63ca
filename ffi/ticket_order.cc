#include "ffi/ticket_order.h"

#include <algorithm>
#include <chrono>

#include "ffi/devices.h"

namespace xen_moe {

TicketOrder& TicketOrder::Get() {
  static TicketOrder* order = new TicketOrder;
  return *order;
}

void TicketOrder::Begin(uint64_t ticket, double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return done_ + 1 >= ticket; })) {
    Refuse("the processes' agreement number " + std::to_string(done_ + 1) + " did not end within " +
           std::to_string(static_cast<int>(seconds)) + " s in this process");
  }
}

void TicketOrder::End(uint64_t ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  ended_.insert(ticket);
  while (!ended_.empty() && *ended_.begin() <= done_ + 1) {
    done_ = std::max(done_, *ended_.begin());
    ended_.erase(ended_.begin());
  }
  changed_.notify_all();
}

void TicketOrder::Clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  done_ = 0;
  ended_.clear();
}

void Votes::Check(const std::string& what) const {
  for (size_t process = 0; process < votes.size(); ++process) {
    if (votes[process].ok() || std::count(gone.begin(), gone.end(), static_cast<int>(process))) continue;
    // A process of an elastic.Group agrees alone: its vote is the only one, and 0 is not its number in the group.
    std::string where;
    if (votes.size() > 1) {
      where = " in process " + std::to_string(process) + ", so every process leaves its memory as it was";
    }
    throw MemoryError{true, "xen_moe_jax: " + what + " failed" + where + ": " + votes[process].error};
  }
}

}  // namespace xen_moe
