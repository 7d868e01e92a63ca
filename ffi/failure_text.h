// The text of an error record.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "cuda_kernels/core/workspace.h"

namespace xen_moe {

// Returns text like "dispatch of bfloat16[4096, 7168], top-8 of 256 experts, ..."; "no operation yet" for a zeroed
// descriptor.
std::string OperationText(const Descriptor& descriptor);

// The processes that a group spans. The remedy that an error names depends on it.
enum class Scope {
  kProcess,  // one process
  kJob,      // the processes of a job, whose number is fixed
  kElastic,  // processes that come and go: xen_moe_jax.elastic
};

// Returns the error's whole text, with its remedy. `where(rank)` names the GPU and the process of a rank. `masked`:
// programs of the group have an `active` mask.
std::string FailureText(const ErrorRecord& record, int channel, Scope scope, bool masked,
                        const std::function<std::string(int)>& where);

}  // namespace xen_moe
