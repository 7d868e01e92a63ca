// Records when each block reached which phase, for benchmarks/ops/decode_variants.cu alone, which is compiled with
// XEN_MOE_PHASES. Otherwise this file compiles to nothing.
#pragma once

#include "cuda_kernels/core/memory_order.cuh"
#include "cuda_kernels/core/workspace.h"

namespace xen_moe {

constexpr int kPhases = 8;

#ifdef XEN_MOE_PHASES
// [block][phase]: the multiprocessor's clock; [block][kPhases + phase]: the GPU's timer in ns, which is coarser.
static __device__ uint64_t phase_stamps[kMaxBlocks][2 * kPhases];
__device__ __forceinline__ void Phase(int phase) {
  if (threadIdx.x != 0) return;
  phase_stamps[blockIdx.x][phase] = clock64();
  phase_stamps[blockIdx.x][kPhases + phase] = NowNs();
}
inline int ReadPhases(uint64_t* to) { return cudaMemcpyFromSymbol(to, phase_stamps, sizeof(phase_stamps)); }
#else
__device__ __forceinline__ void Phase(int) {}
#endif

}  // namespace xen_moe
