// The device's side of the network of a test: cuda_kernels/node/transport.cuh defines its calls.
#pragma once

#include <cuda_runtime.h>

#include "cuda_kernels/core/failure.cuh"
#include "tests/native/nodes/network.h"

namespace native {

struct NetworkLink {
  Network* network;
  int rank;

  __device__ static int Context() { return static_cast<int>(blockIdx.x * 64 + threadIdx.x / 32); }
  static constexpr bool kReserves = true;
  __device__ bool Reserve(int) const { return true; }  // its queues have no end
  __device__ void Put(uint32_t generation, int target, uint64_t to, uint64_t from, uint64_t bytes) const {
    if ((threadIdx.x & 31) == 0) network->Put(Context(), generation, rank, target, to, from, bytes, -1);
  }
  __device__ void PutSignal(uint32_t generation, int target, uint64_t to, uint64_t from, uint64_t bytes,
                            uint32_t signal) const {
    if ((threadIdx.x & 31) == 0) {
      network->Put(Context(), generation, rank, target, to, from, bytes, static_cast<int>(signal));
    }
  }
  __device__ uint64_t Count(uint32_t signal) const {
    emulator::Poll();
    return network->Count(rank, static_cast<int>(signal));
  }
  __device__ int Pending() const {
    emulator::Poll();
    return network->Pending(rank, Context());
  }
  __device__ void Fail(int target, uint64_t word) const { network->Fail(rank, target, word); }
  __device__ void Notify(int target, int about, uint64_t word) const { network->Notify(rank, target, about, word); }
};

}  // namespace native
