// The kernels across nodes over NCCL (nccl_transport.cuh), as the host sees them. This file includes no header of NCCL:
// structures of NCCL pass as bytes. Only a module that was compiled with NCCL's headers has the functions declared
// here.
#pragma once

#include <cstddef>
#include <string>

#include "cuda_kernels/kernels.h"

namespace xen_moe {

// The NCCL objects that a rank puts with.
struct NcclSite {
  const void* device_comm;  // NcclDeviceCommBytes() bytes, as ncclDevCommCreate has filled them; host memory
  WindowTable* windows;     // device memory
};

using NcclKernelTable = NodeKernelTable<NcclSite>;

// For the start after a failure: waits until no put from or to this rank is pending, and sets the zero point of its
// counters. Every rank of the group launches it on an idle GPU, except the ranks of the mask `gone` (kGoneWords words),
// whose processes have ended. `time`: how often it has been launched since the device communicator was made, this
// launch included. It waits `limit_ns` at most. `*late`: 0, or 1 + a rank that did not arrive. Returns a cudaError_t.
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
// Loads the kernels that groups of `ranks` ranks run on the current device. Returns a cudaError_t.
inline int PreloadNccl(int ranks) {
  if (int e = ranks <= kSmallGroup ? ranks16::nccl::PreloadSettle() : ranks256::nccl::PreloadSettle()) return e;
  return NcclKernelsFor(ranks).preload();
}

// Returns the version of the headers: major * 10000 + minor * 100 + patch.
int NcclHeaders();
size_t NcclDeviceCommBytes();
// Returns what a group of `ranks` ranks in `nodes` nodes requires of NCCL: an ncclDevCommRequirements_t.
std::string NcclRequest(int ranks, int nodes);
// NcclQuestion returns an ncclCommProperties_t to be filled; NcclAnswer returns what the filled one says about the
// ranks of the communicator.
std::string NcclQuestion();
struct NcclFound {
  int ranks;
  int domains;  // groups of ranks that share NVLink, all of one size; the ranks of a domain are consecutive
  bool puts;    // kernels can put to the other ranks
};
NcclFound NcclAnswer(const std::string& properties);

}  // namespace xen_moe
