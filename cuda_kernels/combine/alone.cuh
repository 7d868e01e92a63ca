// Combine on the only rank of a group (core/alone.h), whose rows all lie in `y`.
//
// A thread adds up eight elements of a token. It loads the rows of 16 / sizeof(Y) slots at once, so that enough bytes
// are in flight without a ring in shared memory. The loads are marked as evict-first: the L2 cache then drops rows that
// have been read, and not rows that the matmul has just written and that are still to be read. The sum has the bits of
// the kernels for several ranks: rows are added in slot order in float32, the sum is rounded to the wire and added to
// zero. A slot without a row adds zero, which changes no sum, because no sum is -0.
#pragma once

#include "cuda_kernels/combine/combine.cuh"
#include "cuda_kernels/core/alone.h"

namespace xen_moe::XEN_MOE_VARIANT {

constexpr int kAloneThreads = 2 * kThreads;

template <class Y>
__global__ void __launch_bounds__(kAloneThreads, 1) AloneCombineKernel(const __grid_constant__ CombineParams p) {
  constexpr int kRows = 16 / sizeof(Y);
  const Routing& r = p.routing;
  if (threadIdx.x == 0) ShowBegin(p.call);
  const bool failed = LoadRelaxedSystem(&p.call.mailbox->failure) != 0;
  const bool moves = p.call.active == nullptr || p.call.active[0];
  const uint32_t octets = r.hidden / kOctet, items = r.tokens * octets;
  for (uint32_t item = blockIdx.x * kAloneThreads + threadIdx.x; item < items; item += gridDim.x * kAloneThreads) {
    const uint32_t token = item / octets;
    const int e = static_cast<int>(item - token * octets) * kOctet;
    const int* positions = p.positions + static_cast<int64_t>(token) * r.slots;
    Octet sum{};
#pragma unroll 1
    for (int first = 0; first < r.slots; first += kRows) {
      int rows[kRows];
      if (r.slots % 4 == 0) {
#pragma unroll
        for (int k = 0; k < kRows; k += 4) {
          const bool inside = moves && first + k < r.slots;
          const int4 four =
              inside ? reinterpret_cast<const int4*>(positions + first + k)[0] : make_int4(-1, -1, -1, -1);
          rows[k] = four.x, rows[k + 1] = four.y, rows[k + 2] = four.z, rows[k + 3] = four.w;
        }
      } else {
#pragma unroll
        for (int k = 0; k < kRows; ++k) rows[k] = moves && first + k < r.slots ? positions[first + k] : -1;
      }
      RawOctet<Y> raw[kRows];
      float weights[kRows];
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const bool real = rows[k] >= 0 && rows[k] < r.capacity;
        const int64_t row = real ? rows[k] : 0;
        raw[k] = LoadOctet(static_cast<const Y*>(p.y) + row * r.hidden, e, real ? r.hidden : 0, true);
        weights[k] = real && p.weights ? p.weights[row] : 1.0f;
      }
#pragma unroll
      for (int k = 0; k < kRows; ++k) AddRow(sum, raw[k], weights[k], true);
    }
    Octet total{};
    Add(total, Widen(Narrow<Y>(sum)));
    RawOctet<Y> out = Narrow<Y>(total);
    if (failed) memset(&out, kPoison, sizeof(out));
    StoreOctet(static_cast<Y*>(p.out) + static_cast<int64_t>(token) * r.hidden, e, r.hidden, true, out);
  }
}

template <class Y>
int LaunchAloneCombine(const CombineParams& p, cudaStream_t stream) {
  if (Unfit(p)) return cudaErrorInvalidValue;
  const int64_t items = static_cast<int64_t>(p.routing.tokens) * (p.routing.hidden / kOctet);
  const int64_t wanted = (items + kAloneThreads - 1) / kAloneThreads;
  const int blocks = static_cast<int>(wanted < p.schedule.blocks ? wanted : p.schedule.blocks);
  return Launch(AloneCombineKernel<Y>, blocks, kAloneThreads, 0, stream, p);
}

}  // namespace xen_moe::XEN_MOE_VARIANT
