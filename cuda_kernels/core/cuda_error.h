// Errors of the CUDA runtime, which a thread keeps until cudaGetLastError takes them. An error that was dealt with and
// not taken would be reported by the next launch that asks, of this library or of another one.
#pragma once

#include <cuda_runtime_api.h>

namespace xen_moe {

// Returns `e`, what a call returned, and takes it from the thread.
inline cudaError_t Taken(cudaError_t e) {
  if (e != cudaSuccess) cudaGetLastError();
  return e;
}

}  // namespace xen_moe
