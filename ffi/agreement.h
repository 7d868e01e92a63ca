// How the processes of a job agree: a call into Python, where jax.distributed's key-value store is.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace xen_moe {

struct Agreed {
  // Agreements are numbered 1, 2, ... over the whole job; who acts in this order acts in the same order as everybody.
  uint64_t ticket = 0;
  std::vector<std::string> said;  // what each process said
  std::vector<int> gone;          // processes that have died and are left out, the same for all who agreed
};
// Every process calls it with the same key, once for each key. Throws MemoryError, with the processes that did not
// come, after `seconds`. `without_dead`: those that have died are not waited for.
using Agree = std::function<Agreed(const std::string& key, const std::string& said, double seconds, bool without_dead)>;

}  // namespace xen_moe
