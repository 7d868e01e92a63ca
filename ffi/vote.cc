#include "ffi/vote.h"

#include <algorithm>
#include <sstream>

namespace xen_moe {
namespace {

constexpr const char* kForeign =
    "its vote cannot be read: every process of a job must run the same version of xen_moe_jax";

}  // namespace

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
  if (word == "error") {
    vote.error = text.substr(std::min(text.size(), word.size() + 1));
    return vote;
  }
  if (word != "ok") {
    vote.error = text.empty() ? "it sent nothing" : kForeign;
    return vote;
  }
  int sizes = 0;
  while (in >> word) {
    const size_t end = word.find('=');
    const std::string name = word.substr(0, end);
    uint64_t value = 0;
    std::istringstream digits(end == std::string::npos ? "" : word.substr(end + 1));
    bool known = static_cast<bool>(digits >> value);
    if (name == "flag_bytes") {
      vote.needs.flag_bytes = value, ++sizes;
    } else if (name == "data_bytes") {
      vote.needs.data_bytes = value, ++sizes;
    } else if (name == "scratch_bytes") {
      vote.needs.scratch_bytes = value, ++sizes;
    } else if (name == "undivided") {
      vote.undivided = value != 0;
    } else if (name == "has_room") {
      vote.has_room = value != 0;
    } else if (name == "epoch") {
      vote.epoch = static_cast<uint32_t>(value);
    } else if (name == "retired") {
      vote.retired.push_back(value);
    } else {
      known = false;
    }
    if (!known) vote.error = kForeign;
  }
  if (sizes != 3) vote.error = kForeign;
  return vote;
}

}  // namespace xen_moe
