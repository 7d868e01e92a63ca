// How kernels are loaded and launched.
//
// A kernel is loaded before its first launch (LoadKernel): a first launch would otherwise wait for kernels that spin.
//
// LaunchEarly uses programmatic dependent launch: the kernel may get its thread blocks while the kernel before it on
// its stream is still ending. It calls AwaitKernelBefore first: until that kernel has ended and its writes are visible,
// it accesses no memory except its parameters. So no other code depends on this, and any kernel may come before it.
//
// No kernel of this library lets the next kernel in before its own blocks end (griddepcontrol.launch_dependents). XLA
// launches its own kernels early too (jax 0.11.2: xla_gpu_enable_pdl, on by default from compute capability 9.0 on).
// They wait in the same way, but read their operands by ld.global.nc, which is defined only for memory that is not
// written while the kernel runs. After a kernel that let them in early, they would run while results are still being
// written or poisoned.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <type_traits>

#include "cuda_kernels/core/cuda_error.h"
#include "cuda_kernels/core/rank_mask.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

// Loads a kernel on the current device, so that a launch of it may use `shared_bytes` of dynamic shared memory. Without
// this call a GPU refuses more than 48 KiB of dynamic and static shared memory together; the static part grows with the
// number of ranks that a kernel is compiled for. Returns a cudaError_t.
template <class... Parameters>
int LoadKernel(void (*kernel)(Parameters...), int shared_bytes = 0) {
  cudaFuncAttributes attributes;
  if (int e = Taken(cudaFuncGetAttributes(&attributes, kernel))) return e;
  if (shared_bytes == 0) return cudaSuccess;
  return Taken(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
}

// Compute capabilities before 9.0 have no early launch: there each kernel waits for the one before it anyway.
__device__ __forceinline__ void AwaitKernelBefore() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Returns whether the code of `kernel` that the current device runs can wait. Code for 8.0, which newer devices run
// too, cannot, whatever the device.
template <class... P>
bool AwaitsKernelBefore(void (*kernel)(P...)) {
  constexpr int kDevices = 64;
  // 0: not asked yet. One entry serves all kernels that are compiled alike
  static std::atomic<signed char> known[kDevices];
  int device = 0;
  if (Taken(cudaGetDevice(&device)) != cudaSuccess || device >= kDevices) return false;
  signed char waits = known[device].load(std::memory_order_relaxed);
  if (waits == 0) {
    cudaFuncAttributes attributes;
    if (Taken(cudaFuncGetAttributes(&attributes, kernel)) != cudaSuccess) return false;
    waits = attributes.ptxVersion >= 90 ? 1 : -1;
    known[device].store(waits, std::memory_order_relaxed);
  }
  return waits > 0;
}

// Returns a cudaError_t. `early`: the kernel may get its thread blocks while the kernel before it is still ending.
template <class... P>
int Enqueue(bool early, void (*kernel)(P...), int blocks, int threads, uint32_t shared_bytes, cudaStream_t stream,
            const std::common_type_t<P>&... parameters) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks), config.blockDim = dim3(threads), config.dynamicSmemBytes = shared_bytes;
  config.stream = stream, config.attrs = &attribute, config.numAttrs = early ? 1 : 0;
  return Taken(cudaLaunchKernelEx(&config, kernel, parameters...));
}
// Returns the cudaError_t of this launch. cudaGetLastError, all that tells of a launch by the triple brackets, would
// return an error that an earlier call has left.
template <class... P>
int Launch(void (*kernel)(P...), int blocks, int threads, uint32_t shared_bytes, cudaStream_t stream,
           const std::common_type_t<P>&... parameters) {
  return Enqueue(false, kernel, blocks, threads, shared_bytes, stream, parameters...);
}
// Returns a cudaError_t. `kernel` must call AwaitKernelBefore first.
template <class... P>
int LaunchEarly(void (*kernel)(P...), int blocks, uint32_t shared_bytes, cudaStream_t stream, const P&... parameters) {
  return Enqueue(AwaitsKernelBefore(kernel), kernel, blocks, kThreads, shared_bytes, stream, parameters...);
}

}  // namespace xen_moe::XEN_MOE_VARIANT
