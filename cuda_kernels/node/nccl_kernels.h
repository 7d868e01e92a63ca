// The kernels across nodes over NCCL (nccl_transport.cuh), as the host sees them: nothing of NCCL is included, and what
// its headers say passes as bytes. Only a module that was compiled with those headers has what is declared here.
#pragma once

#include <cstddef>
#include <string>

#include "cuda_kernels/kernels.h"

namespace xen_moe {

// What a rank puts with.
struct NcclSite {
  const void* device_comm;  // NcclDeviceCommBytes() bytes, as ncclDevCommCreate has filled them; host memory
  WindowTable* windows;     // device memory
};

using NcclKernelTable = NodeKernelTable<NcclSite>;

// For the start after a failure: waits until no put of this rank or to it is under way; from then on its counters count
// from nought. Every rank of the group but those of the bit mask `gone` (kGoneWords words), whose processes have ended,
// launches it, on an idle GPU, for the `time`th time since the device communicator was made (1 is the first), and waits
// `limit_ns` at most. `*late`: 0, or 1 + a rank that it has waited for in vain. A cudaError_t.
using NcclSettle = int(const NcclSite& site, const RailPlan& plan, const uint64_t* gone, uint64_t time,
                       uint64_t limit_ns, int* late, cudaStream_t stream);

namespace ranks16::nccl {
extern const NcclKernelTable kKernels;
NcclSettle LaunchSettle;
int PreloadSettle();
}  // namespace ranks16::nccl
namespace ranks256::nccl {
extern const NcclKernelTable kKernels;
NcclSettle LaunchSettle;
int PreloadSettle();
}  // namespace ranks256::nccl

inline const NcclKernelTable& NcclKernelsFor(int ranks) {
  return ranks <= kSmallGroup ? ranks16::nccl::kKernels : ranks256::nccl::kKernels;
}
inline NcclSettle* NcclSettleFor(int ranks) {
  return ranks <= kSmallGroup ? ranks16::nccl::LaunchSettle : ranks256::nccl::LaunchSettle;
}
// Loads what groups of so many ranks run on the current device. A cudaError_t.
inline int PreloadNccl(int ranks) {
  if (int e = ranks <= kSmallGroup ? ranks16::nccl::PreloadSettle() : ranks256::nccl::PreloadSettle()) return e;
  return NcclKernelsFor(ranks).preload();
}

// Of the headers: major * 10000 + minor * 100 + patch.
int NcclHeaders();
size_t NcclDeviceCommBytes();
// What a group of `ranks` ranks in `nodes` nodes asks NCCL for: ncclDevCommRequirements_t.
std::string NcclRequest(int ranks, int nodes);
// An ncclCommProperties_t to be filled, and what it then says of the ranks of the communicator.
std::string NcclQuestion();
struct NcclFound {
  int ranks;
  int domains;  // of ranks that share NVLink, of one size; ranks of one domain are consecutive
  bool puts;    // kernels can put to the others
};
NcclFound NcclAnswer(const std::string& properties);

}  // namespace xen_moe
