#include "ffi/vote.h"

#include <sstream>

#include "ffi/devices.h"

namespace xen_moe {

// "error TEXT", or "ok" and then NAME=VALUE for each field; `retired` once for each ticket.
std::string Vote::Encode() const {
  if (!ok()) return "error " + error;
  std::ostringstream out;
  out << "ok flag_bytes=" << needs.flag_bytes << " data_bytes=" << needs.data_bytes
      << " scratch_bytes=" << needs.scratch_bytes << " undivided=" << undivided << " has_room=" << has_room
      << " epoch=" << epoch;
  for (uint64_t ticket : retired) out << " retired=" << ticket;
  return out.str();
}

Vote Vote::Decode(const std::string& text) {
  Vote vote;
  std::istringstream in(text);
  std::string word;
  in >> word;
  if (word != "ok") {
    vote.error = text.size() > 6 ? text.substr(6) : "it sent nothing";
    return vote;
  }
  while (in >> word) {
    const size_t end = word.find('=');
    if (end == std::string::npos) continue;
    const std::string name = word.substr(0, end);
    const uint64_t value = std::stoull(word.substr(end + 1));
    if (name == "flag_bytes") vote.needs.flag_bytes = value;
    if (name == "data_bytes") vote.needs.data_bytes = value;
    if (name == "scratch_bytes") vote.needs.scratch_bytes = value;
    if (name == "undivided") vote.undivided = value != 0;
    if (name == "has_room") vote.has_room = value != 0;
    if (name == "epoch") vote.epoch = static_cast<uint32_t>(value);
    if (name == "retired") vote.retired.push_back(value);
  }
  return vote;
}

void CheckVotes(const std::vector<Vote>& votes, const std::string& what) {
  for (size_t process = 0; process < votes.size(); ++process) {
    if (votes[process].ok()) continue;
    throw MemoryError{true, "xen_moe_jax: " + what + " failed in process " + std::to_string(process) +
                                ", so every process leaves its memory as it was: " + votes[process].error};
  }
}

}  // namespace xen_moe
