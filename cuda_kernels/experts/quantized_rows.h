// Rows of groups times quantized weights, as the host sees it: see quantized_rows.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace xen_moe {

enum class WeightFormat : int { kE4m3, kE5m2, kInt8, kMxfp4 };

constexpr int kMaxWeightGroups = 512;  // a tile finds its group in shared memory
constexpr int kMaxWeightMatrices = 2;

// A weight of every group, `[groups, depth, columns]`, and the product with it, bf16 `[capacity, columns]`.
struct QuantizedMatrix {
  const uint8_t* values;  // a byte an element; kMxfp4: rows 2 n and 2 n + 1 in the halves of a byte, the first one low
  const void* scales;  // float `[groups, scale_rows, scale_columns]`; kMxfp4: uint8_t `[groups, depth / 32, columns]`
  void* out;
};

struct QuantizedRowsParams {
  const void* rows;        // bf16 `[capacity, depth]`, sorted by group; kMxfp4: of 16 elements the even ones come first
  const int* group_sizes;  // `[groups]`
  QuantizedMatrix matrices[kMaxWeightMatrices];
  int num_matrices, groups, capacity, depth, columns;
  WeightFormat format;
  int block_rows, block_columns;  // elements that share a scale: block_rows is a multiple of 64, or depth or more
  int scale_rows, scale_columns;
  // True: each tile has a thread block, which starts on any multiprocessor that is free. False: there is at most one
  // block for each multiprocessor, and beside an operation that keeps some of them the last blocks start late.
  bool claimed;
};

// Queues the kernel on `stream` of the current device, a Hopper GPU; returns a cudaError_t. It neither allocates nor
// synchronizes. `depth` is a positive multiple of 8 (kMxfp4: 32), `columns` of 16. Rows past the last group are not
// written.
int LaunchQuantizedRows(const QuantizedRowsParams& params, cudaStream_t stream);
// Loads the kernels of all formats on the current device if it is a Hopper GPU, so that no first launch waits for
// kernels that spin. Returns a cudaError_t; on other GPUs cudaSuccess.
int PreloadQuantizedRows();

}  // namespace xen_moe
