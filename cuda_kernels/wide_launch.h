// Launchers of the kernels for more than kNarrowRanks ranks (rank_mask.cuh). No template and no CUDA device code.
#pragma once

#include "params.h"

namespace xen_moe {
namespace wide {

// As those of the same names for fewer ranks.
int LaunchDispatch(const DispatchParams& params, cudaStream_t stream);            // wide_dispatch.cu
int LaunchCombine(const CombineParams& params, cudaStream_t stream);              // wide_combine.cu
int LaunchExchange(const ExchangeParams& params, cudaStream_t stream);            // wide_exchange.cu
int LaunchLowLatencyDispatch(const DispatchParams& params, cudaStream_t stream);  // wide_low_latency.cu
int LaunchLowLatencyCombine(const CombineParams& params, cudaStream_t stream);
int PreloadDispatch();
int PreloadCombine();
int PreloadExchange();
int PreloadLowLatencyDispatch();
int PreloadLowLatencyCombine();

}  // namespace wide

// The same for rows that go through rings.
namespace rings {

int LaunchDispatch(const DispatchParams& params, cudaStream_t stream);  // rings_dispatch.cu
int LaunchCombine(const CombineParams& params, cudaStream_t stream);    // rings_combine.cu
int PreloadDispatch();
int PreloadCombine();

}  // namespace rings
}  // namespace xen_moe
