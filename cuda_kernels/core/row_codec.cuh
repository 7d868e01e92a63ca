// How one part of a row is read, sent and placed: copied unchanged (CopyCodec), or quantized on the way (QuantizeCodec,
// dispatch/quantize_codec.cuh).
//
// A codec has
//   Push(p, token, part, targets)   from x to the wire row at each target (peers' staging areas)
//   PlaceStaged(p, wire_row, ...)   from a wire row to rows of the output
//   PlaceOwn(p, token, ...)         from x to rows of the output: the same result as Push and PlaceStaged, without the
//                                   link
// All lanes of a warp call them together. Other GPUs write staged rows while the kernel runs, so a kernel never reads
// staged rows through the non-coherent cache.
#pragma once

#include "cuda_kernels/core/octet.cuh"
#include "cuda_kernels/core/params.h"
#include "cuda_kernels/core/rank_mask.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

struct Range {
  int begin, end;  // elements
};
__device__ __forceinline__ Range PartOf(int part, const Schedule& s, int hidden) {
  return {min(hidden, part * s.part_elements), min(hidden, (part + 1) * s.part_elements)};
}

// Destinations of a pushed row: staging rows on a set of ranks. Each rank starts with the rank after itself, so that
// the ranks do not all write to the peers in the same order.
struct Targets {
  TurnedRanks ranks;
  char* const* base;  // in shared memory: the data of each rank
  uint64_t offset;    // of the wire row in the data
  template <class F>
  __device__ __forceinline__ void ForEach(F f) const {
    ranks.ForEach([&](int rank) { f(base[rank] + offset); });
  }
};
// Destinations of a placed row: output rows, in shared memory.
struct Rows {
  const int* list;
  int count;
};

// All threads call these before the first and after the last row of a kernel.
template <class Codec>
__device__ __forceinline__ void BeginRows(Codec*) {}
template <class Codec>
__device__ __forceinline__ void EndRows(Codec*) {}

template <class Vec>
struct CopyCodec {
  // Copies `n` vectors to every destination, with up to kInFlight loads per lane in flight.
  template <class ForEach>
  __device__ __forceinline__ static void Copy(const Vec* src, int n, ForEach for_each) {
    constexpr int kInFlight = sizeof(Vec) == 16 ? 14 : 8;
    const int lane = threadIdx.x & 31;
    for (int base = 0; base < n; base += 32 * kInFlight) {
      Vec v[kInFlight];
      const Vec* from = src + base + lane;
      const int left = n - base - lane;
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (i * 32 < left) v[i] = __ldcs(from + i * 32);
      }
      for_each([&](Vec* row) {
        Vec* to = row + base + lane;
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          if (i * 32 < left) to[i * 32] = v[i];
        }
      });
    }
  }
  __device__ __forceinline__ static int Vectors(const DispatchParams& p, int elements) {
    const int bytes = p.element == Element::kF32 ? 4 : p.element == Element::kByte ? 1 : 2;
    return static_cast<int>(static_cast<int64_t>(elements) * bytes / sizeof(Vec));
  }
  __device__ __forceinline__ static int ScaleBlocks(int elements) { return (elements + kScaleBlock - 1) / kScaleBlock; }

  __device__ __forceinline__ static const Vec* Row(const DispatchParams& p, int64_t row) {
    return static_cast<const Vec*>(p.x) + row * Vectors(p, p.routing.hidden);
  }

  __device__ static void Push(const DispatchParams& p, int token, Range part, const Targets& targets) {
    const int first = Vectors(p, part.begin), n = Vectors(p, part.end) - first;
    // scales of a lane that are loaded before the row, so that they have arrived when the row is done
    constexpr int kEarly = 2;
    const float* const scales = p.scales + static_cast<int64_t>(token) * ScaleBlocks(p.routing.hidden);
    const int block = ScaleBlocks(part.begin) + static_cast<int>(threadIdx.x & 31);
    const int end = p.scales ? ScaleBlocks(part.end) : 0;
    float early[kEarly];
#pragma unroll
    for (int i = 0; i < kEarly; ++i) early[i] = block + i * 32 < end ? scales[block + i * 32] : 0.0f;
    Copy(Row(p, token) + first, n,
         [&](auto store) { targets.ForEach([&](char* row) { store(reinterpret_cast<Vec*>(row) + first); }); });
    auto store = [&](int b, float scale) {
      targets.ForEach([&](char* row) { reinterpret_cast<float*>(row + p.staging.scale_offset)[b] = scale; });
    };
#pragma unroll
    for (int i = 0; i < kEarly; ++i) {
      if (block + i * 32 < end) store(block + i * 32, early[i]);
    }
    for (int b = block + kEarly * 32; b < end; b += 32) store(b, scales[b]);
  }

  __device__ __forceinline__ static void Place(const DispatchParams& p, const Vec* values, const float* scales,
                                               Range part, const Rows& rows) {
    const int first = Vectors(p, part.begin), n = Vectors(p, part.end) - first;
    const int64_t stride = Vectors(p, p.routing.hidden);
    Copy(values + first, n, [&](auto store) {
      for (int i = 0; i < rows.count; ++i) store(static_cast<Vec*>(p.rows) + rows.list[i] * stride + first);
    });
    PlaceScales(p, scales, part, rows);
  }
  __device__ __forceinline__ static void PlaceScales(const DispatchParams& p, const float* scales, Range part,
                                                     const Rows& rows) {
    if (p.row_scales) {
      const int lane = threadIdx.x & 31;
      const int blocks = ScaleBlocks(p.routing.hidden);
      for (int b = ScaleBlocks(part.begin) + lane; b < ScaleBlocks(part.end); b += 32) {
        const float scale = __ldcs(scales + b);
        for (int i = 0; i < rows.count; ++i) p.row_scales[static_cast<int64_t>(rows.list[i]) * blocks + b] = scale;
      }
    }
  }
  __device__ static void PlaceStaged(const DispatchParams& p, const char* wire_row, Range part, const Rows& rows) {
    Place(p, reinterpret_cast<const Vec*>(wire_row), reinterpret_cast<const float*>(wire_row + p.staging.scale_offset),
          part, rows);
  }
  __device__ static void PlaceOwn(const DispatchParams& p, int token, Range part, const Rows& rows) {
    Place(p, Row(p, token), p.scales + static_cast<int64_t>(token) * ScaleBlocks(p.routing.hidden), part, rows);
  }
};

}  // namespace xen_moe::XEN_MOE_VARIANT
