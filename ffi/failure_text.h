// The text of an error record.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "cuda_kernels/core/workspace.h"

namespace xen_moe {

// Returns "dispatch of bfloat16[4096, 7168], top-8 of 256 experts, ..."; "no operation yet" for a zeroed descriptor.
std::string OperationText(const Descriptor& descriptor);

enum class Scope {  // of a group
  kProcess,         // one process
  kJob,             // processes of a job, which is as large as at its start
  kElastic,         // processes that come and go: xen_moe_jax.elastic
};

// Returns the whole error. `where(rank)` names the GPU and process of a rank. `masked`: programs of the group have an
// `active` mask.
std::string FailureText(const ErrorRecord& record, int channel, Scope scope, bool masked,
                        const std::function<std::string(int)>& where);

}  // namespace xen_moe
