// The matmuls of cuBLAS, from the library that JAX's CUDA plugin brings along. The library is opened at the first use,
// so that this module neither links nor ships it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace xen_moe {

// Sets where the library lies, for a process that has not loaded it yet; "": the loader finds it by its name.
void SetCublas(std::string path);

struct Matmul {
  const char *rows, *weights;  // [m, k] and [k, n], row-major
  char* out;                   // [m, n]
  int64_t m, n, k;
  xla::ffi::DataType
      dtype;  // of all three: BF16 or F16; products are added up in float32 (cuBLAS may round partial sums)
};

// Runs a matmul with the sizes and dtype of `shape` (its pointers are not used) on GPU `ordinal` for each number of
// multiprocessors in `sms`, and waits for it, so that no kernel is loaded later: a load could wait for a kernel that
// spins. It allocates memory for the operands and `workspace_bytes` meanwhile. Throws MemoryError.
void PrepareCublas(int ordinal, Matmul shape, std::initializer_list<int> sms, uint64_t workspace_bytes);
// Queues `matmul` on `stream` of GPU `ordinal`, which is the current device, for about `sms` multiprocessors. Needs
// PrepareCublas on this GPU before. `workspace`: `workspace_bytes` bytes of the GPU, which are free again when the
// matmul has ended. Throws MemoryError.
void QueueMatmul(int ordinal, cudaStream_t stream, const Matmul& matmul, int sms, void* workspace,
                 uint64_t workspace_bytes);

}  // namespace xen_moe
