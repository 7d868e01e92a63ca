// The matmuls of cuBLAS, from the library that JAX's CUDA plugin brings along. It is found when it is first asked for,
// so that this module neither links nor ships it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace xen_moe {

// Where the library lies, for a process that has not loaded it yet; "": found by its name.
void SetCublas(std::string path);

struct Matmul {
  const char *rows, *weights;  // [m, k] and [k, n], row-major
  char* out;                   // [m, n]
  int64_t m, n, k;
  xla::ffi::DataType dtype;  // of all three: BF16 or F16; sums are in float32
};

// Runs matmuls like `shape` on GPU `ordinal`, whose pointers it does not use, once for each number of multiprocessors:
// so that no kernel is loaded later, which could wait for a kernel that spins. Throws MemoryError.
void PrepareCublas(int ordinal, Matmul shape, std::initializer_list<int> sms, uint64_t workspace_bytes);
// Queues `matmul` on `stream` of GPU `ordinal`, for `sms` multiprocessors. Throws MemoryError.
void QueueMatmul(int ordinal, cudaStream_t stream, const Matmul& matmul, int sms, void* workspace,
                 uint64_t workspace_bytes);

}  // namespace xen_moe
