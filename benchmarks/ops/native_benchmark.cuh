// Shared parts of the native benchmarks: checked CUDA calls, device memory, and rows that travel like real data.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#define CHECK(call)                                                                                   \
  do {                                                                                                \
    const cudaError_t status = static_cast<cudaError_t>(call);                                        \
    if (status != cudaSuccess) {                                                                      \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status)); \
      std::exit(1);                                                                                   \
    }                                                                                                 \
  } while (0)

// `n` zeros on the current device.
template <class T>
T* Device(size_t n) {
  T* p;
  CHECK(cudaMalloc(&p, n * sizeof(T)));
  CHECK(cudaMemset(p, 0, n * sizeof(T)));
  return p;
}

// Random bf16 values in (-4, 4): zeros and constants can travel faster than real data.
[[maybe_unused]] static __global__ void FillRandom(uint16_t* p, size_t n) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < n; i += size_t{gridDim.x} * blockDim.x) {
    uint64_t h = (i + 1) * 0x9E3779B97F4A7C15ull;
    h = (h ^ h >> 31) * 0xBF58476D1CE4E5B9ull;
    p[i] = static_cast<uint16_t>((h >> 40 & 0x80FF) | (0x3F00 + (h >> 20 & 0x7F)));
  }
}

// The current device reaches the memory of the `count` first devices.
inline void ReachPeers(int device, int count) {
  for (int peer = 0; peer < count; ++peer) {
    if (peer != device) CHECK(cudaDeviceEnablePeerAccess(peer, 0));
  }
}
