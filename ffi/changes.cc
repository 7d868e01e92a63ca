#include "ffi/changes.h"

#include <algorithm>
#include <chrono>
#include <sstream>

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

Changes::Changes(const Job& job, const Groups& groups, int channel, bool for_flights)
    : job_(job), groups_(groups), channel_(channel), for_flights_(for_flights) {}

std::unique_lock<std::timed_mutex> Changes::Begin(double seconds) {
  std::unique_lock<std::timed_mutex> lock(mutex_, std::chrono::duration<double>(seconds));
  if (!lock.owns_lock()) {
    Refuse("another thread has been changing the symmetric memory on channel " + std::to_string(channel_) +
           " for more than " + std::to_string(static_cast<int>(seconds)) + " s");
  }
  return lock;
}

std::unique_lock<std::timed_mutex> Changes::TryBegin() {
  return std::unique_lock<std::timed_mutex>(mutex_, std::try_to_lock);
}

Votes Changes::Agree(const char* what, const Vote& vote, double seconds, bool without_dead) {
  const Agreed agreed = job_.agree(NextKey(what), vote.Encode(), seconds, without_dead);
  Votes votes;
  votes.ticket = agreed.ticket;
  for (const std::string& text : agreed.said) votes.votes.push_back(Vote::Decode(text));
  votes.gone = agreed.gone;
  return votes;
}

// The key is the same in every process and is used once. Of a device only its process counts, which has one GPU: no
// process knows the ordinals of another one, which may see its own GPU alone.
std::string Changes::NextKey(const char* what) {
  uint64_t hash = 1469598103934665603ull;
  for (DeviceKey key : groups_.devices()) hash = (hash ^ static_cast<uint64_t>(ProcessOf(key))) * 1099511628211ull;
  std::ostringstream out;
  out << std::hex << hash << std::dec << "-" << groups_.ranks() << "-";
  if (groups_.several_nodes()) out << "in-nodes-of-" << groups_.ranks_per_node() << "-";
  out << "channel-" << channel_ << (for_flights_ ? "-flights" : "") << "/" << what << "/" << ++agreements_;
  return out.str();
}

}  // namespace xen_moe
