#include "ffi/peer_mapping.h"

namespace xen_moe {

void PeerMapping::Show(void* own, bool* joined, double seconds) const {
  if (*joined) return;
  *joined = true;
  if (job_.provider->join != nullptr && !job_.provider->join(own, seconds)) Refuse(job_.provider->reason());
}

char* PeerMapping::Peer(void* own, int rank) const {
  const int process = ProcessOf(groups_.DevicesOf(0)[rank]);
  char* const theirs = static_cast<char*>(job_.provider->peer(own, process));
  if (theirs == nullptr) {
    Refuse("the memory of process " + std::to_string(process) + " is not mapped into process " +
           std::to_string(job_.process) +
           ": the ranks of one axis must be on one NVLink domain, or be cut into nodes that are: pass "
           "KernelConfig.ranks_per_node, number ranks node by node, or use KernelConfig(backend='reference')");
  }
  return theirs;
}

}  // namespace xen_moe
