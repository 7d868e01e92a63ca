// How kernels are loaded and launched.
//
// A kernel is loaded before its first launch (LoadKernel), which would otherwise wait for kernels that spin.
//
// LaunchEarly launches a kernel under the end of the kernel before it on its stream (programmatic dependent launch).
// A kernel that is launched by LaunchEarly may get its thread blocks while the one before it on its stream still ends.
// It calls AwaitKernelBefore first: until that kernel has ended, and what it wrote is visible, it touches no memory but
// its parameters. So nothing else needs to know of it, and any kernel may come before it.
//
// No kernel of ours lets the next one in before its blocks end (griddepcontrol.launch_dependents). XLA launches its own
// kernels early too (jax 0.11.2: xla_gpu_enable_pdl, on by default from compute capability 9.0 on). They wait as ours
// do, but read their operands by ld.global.nc, which is defined only for memory that nobody writes while the kernel
// runs. Behind a kernel that let them in they would run while results are still written or poisoned.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "cuda_kernels/core/rank_mask.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

// Loads a kernel on the current device. A launch of it may use `shared_bytes` of dynamic shared memory then; without
// being asked, a GPU refuses more than 48 KiB together with what is static, which grows with the ranks that a kernel is
// compiled for. A cudaError_t.
template <class... Parameters>
int LoadKernel(void (*kernel)(Parameters...), int shared_bytes = 0) {
  cudaFuncAttributes attributes;
  if (int e = cudaFuncGetAttributes(&attributes, kernel)) return e;
  if (shared_bytes == 0) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
}

// Before compute capability 9.0 there is no such thing: kernels wait for one another by themselves.
__device__ __forceinline__ void AwaitKernelBefore() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Whether the code of `kernel` that the current device runs knows how to wait. Code for 8.0, which newer devices run
// too, does not, whatever the device.
template <class... P>
bool AwaitsKernelBefore(void (*kernel)(P...)) {
  constexpr int kDevices = 64;
  static std::atomic<signed char> known[kDevices];  // 0: not asked yet. Of all kernels that are compiled alike
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return false;
  signed char waits = known[device].load(std::memory_order_relaxed);
  if (waits == 0) {
    cudaFuncAttributes attributes;
    if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) return false;
    waits = attributes.ptxVersion >= 90 ? 1 : -1;
    known[device].store(waits, std::memory_order_relaxed);
  }
  return waits > 0;
}

// A cudaError_t. `kernel` calls AwaitKernelBefore first.
template <class... P>
int LaunchEarly(void (*kernel)(P...), int blocks, uint32_t shared_bytes, cudaStream_t stream, const P&... parameters) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks), config.blockDim = dim3(kThreads), config.dynamicSmemBytes = shared_bytes;
  config.stream = stream, config.attrs = &attribute, config.numAttrs = AwaitsKernelBefore(kernel) ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, parameters...);
}

}  // namespace xen_moe::XEN_MOE_VARIANT
