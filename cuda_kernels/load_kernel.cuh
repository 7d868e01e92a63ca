// How kernels are loaded before their first launch, which would otherwise wait for kernels that spin.
#pragma once

#include <cuda_runtime.h>

namespace xen_moe {

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

}  // namespace xen_moe
