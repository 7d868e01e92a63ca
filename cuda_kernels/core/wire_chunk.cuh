// A few steps of a quantized row, as a warp holds them between the rounding and the wire.
//
// A step is 256 elements; a lane has the octet with its number in every step, from the first load to the last store. On
// the wire two steps are interleaved: the 16 bytes of lane l are octet l of the first step and octet l of the second,
// so that both ends move 16 bytes a lane. The remainder of a part after its last two whole steps lies in element order.
// A step has two scales (of lanes 0 to 15 and of lanes 16 to 31); one lane, `16 * half + step`, computes, sends and
// loads each of them. Rows are multiples of 8 elements here; all lanes of a warp call every function together.
#pragma once

#include "cuda_kernels/core/octet.cuh"

namespace xen_moe {

// The larger of two magnitudes as bits, which compare as integers; with 2-byte elements, two of each side by side.
template <int kBytes>
__device__ __forceinline__ uint32_t Larger(uint32_t a, uint32_t b) {
  if constexpr (kBytes == 4) {
    return max(a, b);
  } else {
    return __vmaxu2(a, b);
  }
}
template <class T>
__device__ __forceinline__ uint32_t Magnitude(const RawOctet<T>& raw) {
  constexpr uint32_t kMask = sizeof(T) == 4 ? 0x7FFFFFFFu : 0x7FFF7FFFu;
  const uint32_t* words = reinterpret_cast<const uint32_t*>(raw.bits);
  uint32_t most = words[0] & kMask;
#pragma unroll
  for (int i = 1; i < RawOctet<T>::kVectors * 4; ++i) most = Larger<sizeof(T)>(most, words[i] & kMask);
  return most;
}
// The larger of the two, widened to float32.
__device__ __forceinline__ uint32_t FloatBits(uint32_t magnitudes, float) { return magnitudes; }
__device__ __forceinline__ uint32_t FloatBits(uint32_t magnitudes, __nv_bfloat16) {
  return max(magnitudes & 0xFFFF0000u, magnitudes << 16);
}
__device__ __forceinline__ uint32_t FloatBits(uint32_t magnitudes, __half) {
  __half_raw larger;
  larger.x = static_cast<unsigned short>(max(magnitudes >> 16, magnitudes & 0xFFFFu));
  return __float_as_uint(__half2float(__half(larger)));
}

template <WireType kWire, int kSteps>
struct WireChunk {
  static_assert(kSteps % 2 == 0 && kSteps <= 16, "pairs of steps, and a lane for each scale");
  static constexpr int kElements = kSteps * kWarpElements;
  static constexpr int kOwners = kSteps > 8 ? 16 : kSteps > 4 ? 8 : kSteps > 2 ? 4 : 2;

  uint2 bits[kSteps];
  BlockScale block;  // of step `lane % kOwners` and this lane's half

  __device__ __forceinline__ static int Element(int base, int step) {
    return base + step * kWarpElements + static_cast<int>(threadIdx.x & 31) * kOctet;
  }
  __device__ __forceinline__ float Scale(int step) const { return __shfl_sync(0xFFFFFFFFu, block.scale, Owner(step)); }
  // The rounded octet of a step.
  __device__ __forceinline__ Octet Rounded(int step, float scale) const {
    return Dequantize<kWire>({bits[step], scale});
  }

  // `octet(step)` as raw bits of T, for every step.
  template <class T, class OctetOf>
  __device__ __forceinline__ void Quantize(OctetOf octet, bool ue8m0) {
    uint32_t most[kOwners];
#pragma unroll
    for (int i = 0; i < kOwners; ++i) most[i] = i < kSteps ? Magnitude(octet(i < kSteps ? i : 0)) : 0u;
#pragma unroll
    for (int i = 0; i < kOwners; ++i) {
      if constexpr (kOwners < 16) most[i] = Larger<sizeof(T)>(most[i], __shfl_xor_sync(0xFFFFFFFFu, most[i], 8));
      if constexpr (kOwners < 8) most[i] = Larger<sizeof(T)>(most[i], __shfl_xor_sync(0xFFFFFFFFu, most[i], 4));
      if constexpr (kOwners < 4) most[i] = Larger<sizeof(T)>(most[i], __shfl_xor_sync(0xFFFFFFFFu, most[i], 2));
    }
    block = ScaleOf<kWire>(FloatBits(LargestOfOwn<sizeof(T), kOwners / 2>(most), T()), ue8m0);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const float inverse = __shfl_sync(0xFFFFFFFFu, block.inverse, Owner(i));
      bits[i] = QuantizeBits<kWire>(Widen(octet(i)), inverse);
    }
  }

  // To and from the wire row of which `base` is the chunk's first element; `end`: of the part.
  __device__ __forceinline__ void Store(char* wire, uint64_t scale_offset, int base, int end) const {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int j = 0; j < kSteps / 2; ++j) {
      const uint2 a = bits[2 * j], b = bits[2 * j + 1];
      if (Interleaved(base, end, j)) {
        *reinterpret_cast<uint4*>(wire + base + j * 2 * kWarpElements + lane * 16) = make_uint4(a.x, a.y, b.x, b.y);
      } else {
        if (Element(base, 2 * j) < end) *reinterpret_cast<uint2*>(wire + Element(base, 2 * j)) = a;
        if (Element(base, 2 * j + 1) < end) *reinterpret_cast<uint2*>(wire + Element(base, 2 * j + 1)) = b;
      }
    }
    const int own = OwnScale(base, end);
    if (own >= 0) reinterpret_cast<float*>(wire + scale_offset)[own] = block.scale;
  }
  __device__ __forceinline__ void Load(const char* wire, uint64_t scale_offset, int base, int end) {
    const int lane = threadIdx.x & 31, own = OwnScale(base, end);
    block.scale = own >= 0 ? __ldcs(reinterpret_cast<const float*>(wire + scale_offset) + own) : 0.0f;
#pragma unroll
    for (int j = 0; j < kSteps / 2; ++j) {
      if (Interleaved(base, end, j)) {
        const uint4 v = __ldcs(reinterpret_cast<const uint4*>(wire + base + j * 2 * kWarpElements + lane * 16));
        bits[2 * j] = make_uint2(v.x, v.y), bits[2 * j + 1] = make_uint2(v.z, v.w);
      } else {
#pragma unroll
        for (int i = 2 * j; i < 2 * j + 2; ++i) {
          const int e = Element(base, i);
          bits[i] = e < end ? __ldcs(reinterpret_cast<const uint2*>(wire + e)) : make_uint2(0, 0);
        }
      }
    }
  }

 private:
  __device__ __forceinline__ static int Owner(int step) { return static_cast<int>(threadIdx.x & 16) | step; }
  // Returns true if steps 2 * pair and 2 * pair + 1 lie interleaved.
  __device__ __forceinline__ static bool Interleaved(int base, int end, int pair) {
    return base + (2 * pair + 2) * kWarpElements <= end;
  }
  // Returns the number of the row's scale that this lane sends or loads; -1: none.
  __device__ __forceinline__ static int OwnScale(int base, int end) {
    const int lane = threadIdx.x & 31, step = lane & 15;
    const int scale = base / kScaleBlock + 2 * step + lane / 16;
    return step < kSteps && scale * kScaleBlock < end ? scale : -1;
  }
  // Returns the maximum of `most[step]` over the 16 lanes of this half, for the step that this lane owns; every lane
  // gives `most` of its own octets. Every round halves the steps that a lane handles: fewer shuffles than four a step.
  template <int kBytes, int kApart>
  __device__ __forceinline__ static uint32_t LargestOfOwn(uint32_t (&most)[kOwners]) {
    const bool upper = threadIdx.x & kApart;
#pragma unroll
    for (int i = 0; i < kApart; ++i) {
      const uint32_t given = upper ? most[i] : most[i + kApart], kept = upper ? most[i + kApart] : most[i];
      most[i] = Larger<kBytes>(kept, __shfl_xor_sync(0xFFFFFFFFu, given, kApart));
    }
    if constexpr (kApart > 1) {
      return LargestOfOwn<kBytes, kApart / 2>(most);
    } else {
      return most[0];
    }
  }
};

}  // namespace xen_moe
