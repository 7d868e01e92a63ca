#include "ffi/changes.h"

#include <chrono>
#include <sstream>

namespace xen_moe {

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
  Votes votes{agreed.ticket, Turn(agreed.ticket), {}, agreed.gone};
  for (const std::string& text : agreed.said) votes.votes.push_back(Vote::Decode(text));
  return votes;
}

// Returns a key that is the same in every process and is used once. Of a device only its process counts, which has one
// GPU: no process knows the ordinals of another one, which may see its own GPU alone.
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
