// What an error record says, in words.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "cuda_kernels/core/workspace.h"

namespace xen_moe {

// "dispatch of bfloat16[4096, 7168], top-8 of 256 experts, ..." ; "no operation yet" where nothing was described.
std::string OperationText(const Descriptor& descriptor);

// The whole error. `where(rank)` names the GPU and process of a rank; `across`: the group spans processes.
std::string FailureText(const ErrorRecord& record, int channel, bool across, bool masked,
                        const std::function<std::string(int)>& where);

}  // namespace xen_moe
