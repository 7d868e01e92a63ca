// Memory of other processes as it is mapped into this one, through the job's memory provider.
#pragma once

#include "ffi/groups.h"

namespace xen_moe {

class PeerMapping {
 public:
  PeerMapping(const Job& job, const Groups& groups) : job_(job), groups_(groups) {}
  // Shows the block `own` to all processes, unless `*joined` says that this has been done. Afterwards `*joined` is
  // true, also after an error. Collective where the provider has `join`. Throws MemoryError.
  void Show(void* own, bool* joined, double seconds) const;
  // Returns the block of `rank` that corresponds to `own`. Throws MemoryError where it cannot be reached by pointers.
  char* Peer(void* own, int rank) const;

 private:
  const Job& job_;
  const Groups& groups_;
};

}  // namespace xen_moe
