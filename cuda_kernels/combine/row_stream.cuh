// Several rows read side by side, a few warp steps at a time, through a ring in shared memory: cp.async keeps kStages
// chunks of a warp in flight without holding them in registers (PTX ISA, cp.async; sm_80 and later).
//
// A chunk is `kSteps` warp steps of one row. Every lane copies and reads back only its own bytes, so a lane's wait for
// its own copies is the only synchronization.
#pragma once

#include "cuda_kernels/core/cuda_error.h"
#include "cuda_kernels/core/octet.cuh"

namespace xen_moe {

// 6 stages of 16 warps need 192 KiB of shared memory; an A100 has 163. The host allocates RingStages(), at least as
// many.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr int kRingStages = 6;
#else
constexpr int kRingStages = 4;
#endif

inline int RingStages() {
  int device = 0, bytes = 0;
  Taken(cudaGetDevice(&device));
  Taken(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return bytes >= 220 * 1024 ? 6 : 4;
}

template <class Y, int kSteps>
struct RowStream {
  static constexpr int kStages = kRingStages;
  static constexpr int kStepBytes = kWarpElements * sizeof(Y);
  static constexpr int kChunkBytes = kSteps * kStepBytes;
  static constexpr int kRingBytes = kStages * kChunkBytes;
  static constexpr int kVectors = RawOctet<Y>::kVectors;

  // For each batch of kSteps steps in [begin, end): begin_batch(base); for each row i of `rows`: add(i, octets), once
  // for each step, then after_row(i); then end_batch(base). row_of(i) is the row's address; rows are 16-byte aligned,
  // `end` is a multiple of 8. All lanes call it.
  //
  // Where few SMs add rows, the instructions of these loops are the limit. Therefore a chunk inside the row is loaded
  // by one address with constant offsets.
  template <class RowOf, class BeginBatch, class Add, class AfterRow, class EndBatch>
  __device__ __forceinline__ static void Run(char* ring, int rows, int begin, int end, RowOf row_of,
                                             BeginBatch begin_batch, Add add, AfterRow after_row, EndBatch end_batch) {
    constexpr int kBatch = kSteps * kWarpElements;
    const int lane = threadIdx.x & 31;
    int ahead_row = 0, ahead_base = begin, ahead_slot = 0;
    auto issue = [&] {
      if (rows > 0 && ahead_base < end) {
        const Y* row = row_of(ahead_row);
        const Y* from = row + ahead_base + lane * kOctet;
        char* to = ring + ahead_slot * kChunkBytes + lane * 16;
        if (ahead_base + kBatch <= end) {
#pragma unroll
          for (int i = 0; i < kSteps * kVectors; ++i) {
            const int s = i / kVectors, v = i % kVectors;
            CopyAsync(to + s * kStepBytes + v * 512, reinterpret_cast<const int4*>(from + s * kWarpElements) + v);
          }
        } else {
          IssueRest(to, from, row, end - ahead_base - lane * kOctet);
        }
        if (++ahead_row == rows) {
          ahead_row = 0;
          ahead_base += kBatch;
        }
        if (++ahead_slot == kStages) ahead_slot = 0;
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
    };
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) issue();
    int slot = 0;
#pragma unroll 1
    for (int base = begin; base < end; base += kBatch) {
      begin_batch(base);
#pragma unroll 1
      for (int i = 0; i < rows; ++i) {
        asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
        const char* from = ring + slot * kChunkBytes + lane * 16;
        RawOctet<Y> raw[kSteps];
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            raw[s].bits[v] = *reinterpret_cast<const int4*>(from + s * kStepBytes + v * 512);
          }
        }
        add(i, raw);
        after_row(i);
        if (++slot == kStages) slot = 0;
        issue();
      }
      end_batch(base);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

 private:
  // Loads the last chunk of a row that has `left` elements from this lane's first element on, with zeros after them.
  __device__ __forceinline__ static void IssueRest(char* to, const Y* from, const Y* row, int left) {
#pragma unroll 1
    for (int s = 0; s < kSteps; ++s, left -= kWarpElements) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        CopyAsync(to + s * kStepBytes + v * 512, reinterpret_cast<const int4*>(from + s * kWarpElements) + v, left > 0,
                  row);
      }
    }
  }
  __device__ __forceinline__ static void CopyAsync(char* to, const int4* from) {
    const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
  }
  // Copies 16 bytes, or zeros if not `inside` (then nothing is read, but the address must be valid).
  __device__ __forceinline__ static void CopyAsync(char* to, const int4* from, bool inside, const void* valid) {
    const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    const void* address = inside ? static_cast<const void*>(from) : valid;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(address), "r"(inside ? 16 : 0)
                 : "memory");
  }
};

}  // namespace xen_moe
