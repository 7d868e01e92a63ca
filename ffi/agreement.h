// How the processes of a job agree: a call into Python, where jax.distributed's key-value store is.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace xen_moe {

struct Agreed {
  // Agreements are numbered 1, 2, ... over the whole job: processes that act in the order of their tickets act in the
  // same order.
  uint64_t ticket = 0;
  std::vector<std::string> said;  // the message of each process
  std::vector<int> gone;          // processes that have died and are left out: the same list in every other process
};
// Every process calls it with the same key, once for each key; `said` is its message. Throws MemoryError, which names
// the processes that did not call it, after `seconds`. `without_dead`: processes that have died are not waited for.
using Agree = std::function<Agreed(const std::string& key, const std::string& said, double seconds, bool without_dead)>;

}  // namespace xen_moe
