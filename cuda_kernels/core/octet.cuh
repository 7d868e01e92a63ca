// Octets: eight consecutive elements of a row for each lane, in float32. A warp step is the 256 elements of 32 lanes.
// 16 lanes hold a scale block of 128 elements; 4 lanes hold a block of 32, as MXFP4 has them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "cuda_kernels/core/mxfp4.cuh"
#include "cuda_kernels/core/params.h"

namespace xen_moe {

constexpr int kOctet = 8;
constexpr int kWarpElements = 32 * kOctet;

struct Octet {
  float v[kOctet];
};

__device__ __forceinline__ float ToFloat(float x) { return x; }
__device__ __forceinline__ float ToFloat(__half x) { return __half2float(x); }
__device__ __forceinline__ float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T>
__device__ __forceinline__ T FromFloat(float x);
template <>
__device__ __forceinline__ float FromFloat<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half FromFloat<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 FromFloat<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// The bits of an octet as loaded. They are kept apart from the conversion so that several loads can be in flight.
template <class T>
struct RawOctet {
  static constexpr int kVectors = kOctet * sizeof(T) / 16;
  int4 bits[kVectors];
};

// `row` is the row's first element, `e` the lane's first element; elements at or past `end` read as zero. `vector`:
// rows are 16-byte aligned and `end` is a multiple of 8.
template <class T>
__device__ __forceinline__ RawOctet<T> LoadOctet(const T* row, int e, int end, bool vector) {
  RawOctet<T> raw;
  if (vector) {
#pragma unroll
    for (int i = 0; i < RawOctet<T>::kVectors; ++i) {
      raw.bits[i] = e < end ? __ldcs(reinterpret_cast<const int4*>(row + e) + i) : make_int4(0, 0, 0, 0);
    }
  } else {
    T* values = reinterpret_cast<T*>(raw.bits);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) values[i] = e + i < end ? row[e + i] : FromFloat<T>(0.0f);
  }
  return raw;
}
template <class T>
__device__ __forceinline__ Octet Widen(const RawOctet<T>& raw) {
  const T* values = reinterpret_cast<const T*>(raw.bits);
  Octet o;
#pragma unroll
  for (int i = 0; i < kOctet; ++i) o.v[i] = ToFloat(values[i]);
  return o;
}
// A word holds two values, and the upper value is the word's upper bits: one instruction for each value, where ToFloat
// takes three for both.
template <>
__device__ __forceinline__ Octet Widen(const RawOctet<__nv_bfloat16>& raw) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(raw.bits);
  Octet o;
#pragma unroll
  for (int i = 0; i < kOctet / 2; ++i) {
    o.v[2 * i] = __uint_as_float(words[i] << 16);
    o.v[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  }
  return o;
}
// One instruction rounds two values where the GPU has such an instruction.
__device__ __forceinline__ void RoundPair(float* to, float x, float y) { to[0] = x, to[1] = y; }
__device__ __forceinline__ void RoundPair(__half* to, float x, float y) {
  *reinterpret_cast<__half2*>(to) = __floats2half2_rn(x, y);
}
__device__ __forceinline__ void RoundPair(__nv_bfloat16* to, float x, float y) {
  *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(x, y);
}
template <class T>
__device__ __forceinline__ RawOctet<T> Narrow(const Octet& o) {
  RawOctet<T> raw;
  T* values = reinterpret_cast<T*>(raw.bits);
#pragma unroll
  for (int i = 0; i < kOctet; i += 2) RoundPair(values + i, o.v[i], o.v[i + 1]);
  return raw;
}
template <class T>
__device__ __forceinline__ void StoreOctet(T* row, int e, int end, bool vector, const RawOctet<T>& raw) {
  if (vector) {
    if (e < end) {
#pragma unroll
      for (int i = 0; i < RawOctet<T>::kVectors; ++i) reinterpret_cast<int4*>(row + e)[i] = raw.bits[i];
    }
  } else {
    const T* values = reinterpret_cast<const T*>(raw.bits);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      if (e + i < end) row[e + i] = values[i];
    }
  }
}

// How many elements share a scale on a quantized wire, and the bytes of an octet there.
template <WireType kWire>
struct Format {
  static constexpr int kBlock = kScaleBlock;  // elements that share a scale
  static constexpr int kOctetBytes = kOctet;
  using Bits = uint2;
};
template <>
struct Format<WireType::kMxfp4> {
  static constexpr int kBlock = mxfp4::kBlock;
  static constexpr int kOctetBytes = kOctet / 2;
  using Bits = uint32_t;
};
// Returns the byte of a wire row at which the octet of element `e`, a multiple of 8, begins if octets lie in the order
// of their elements.
template <WireType kWire>
__device__ __forceinline__ int WirePlace(int e) {
  return e / kOctet * Format<kWire>::kOctetBytes;
}

// The wire values of an octet, and the scale of its block.
template <WireType kWire>
struct QuantizedOctet {
  typename Format<kWire>::Bits bits;
  float scale;
};

// The scale of a block, and `inverse`, the factor by which its elements are multiplied before they are rounded. If an
// element is not finite, the scale is NaN (on an MXFP4 wire infinity), `inverse` is negative, and the block's wire
// values are zero.
struct BlockScale {
  float scale, inverse;
};
// Returns the scale of a block (docs/design/internals.md, "Quantize"). `bits`: the float32 bits of its largest
// magnitude. Bits of magnitudes compare as integers: NaN > infinity > every finite value.
template <WireType kWire>
__device__ __forceinline__ BlockScale ScaleOf(uint32_t bits, bool ue8m0) {
  constexpr float kQmax = kWire == WireType::kInt8 ? 127.0f : 448.0f;
  const bool finite = bits < 0x7F800000u;
  const float amax = fmaxf(__uint_as_float(bits), 1.262177448e-29f);  // 2^-96
  float scale = __fdiv_rn(amax, kQmax);
  float inverse;
  if (ue8m0) {
    const uint32_t s = __float_as_uint(scale);
    scale = __uint_as_float(((s >> 23) + ((s & 0x7FFFFFu) ? 1u : 0u)) << 23);
    inverse = __fdiv_rn(1.0f, scale);
  } else {
    inverse = __fdiv_rn(kQmax, amax);
  }
  return finite ? BlockScale{scale, inverse} : BlockScale{__uint_as_float(0x7FC00000u), -1.0f};
}
template <>
__device__ __forceinline__ BlockScale ScaleOf<WireType::kMxfp4>(uint32_t bits, bool) {
  const uint32_t exponent = mxfp4::ExponentFor(bits);
  return {mxfp4::ScaleOf(exponent), mxfp4::InverseOf(exponent)};
}
// Returns the wire values of an octet: its elements times `inverse`, rounded; zeros if `inverse` is negative.
template <WireType kWire>
__device__ __forceinline__ typename Format<kWire>::Bits QuantizeBits(const Octet& o, float inverse) {
  if constexpr (kWire == WireType::kMxfp4) {
    return mxfp4::CodesOf(o.v, inverse);
  } else {
    uint32_t words[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kOctet; i += 2) {
      const float x = __fmul_rn(o.v[i], inverse), y = __fmul_rn(o.v[i + 1], inverse);
      uint32_t pair;
      if constexpr (kWire == WireType::kInt8) {
        pair = (max(-127, min(127, __float2int_rn(x))) & 0xFF) | (max(-127, min(127, __float2int_rn(y))) & 0xFF) << 8;
      } else {
        pair = __nv_cvt_float2_to_fp8x2(make_float2(x, y), __NV_SATFINITE, __NV_E4M3);
      }
      words[i / 4] |= pair << (8 * (i & 3));
    }
    const uint32_t finite = inverse > 0.0f ? 0xFFFFFFFFu : 0u;
    return make_uint2(words[0] & finite, words[1] & finite);
  }
}
template <WireType kWire, class T>
__device__ __forceinline__ typename Format<kWire>::Bits QuantizeBits(const RawOctet<T>& raw, float inverse) {
  if constexpr (kWire == WireType::kMxfp4 && std::is_same_v<T, __nv_bfloat16>) {
    return mxfp4::CodesOf(reinterpret_cast<const uint32_t (&)[4]>(raw.bits), inverse);
  } else {
    return QuantizeBits<kWire>(Widen(raw), inverse);
  }
}
// Quantizes the octet of each lane. All 32 lanes call it: the lanes of a block find its largest magnitude together.
template <WireType kWire>
__device__ __forceinline__ QuantizedOctet<kWire> Quantize(const Octet& o, bool ue8m0) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kOctet; ++i) bits = max(bits, __float_as_uint(o.v[i]) & 0x7FFFFFFFu);
#pragma unroll
  for (int m = Format<kWire>::kBlock / kOctet / 2; m > 0; m >>= 1)
    bits = max(bits, __shfl_xor_sync(0xFFFFFFFFu, bits, m));
  const BlockScale block = ScaleOf<kWire>(bits, ue8m0);
  return {QuantizeBits<kWire>(o, block.inverse), block.scale};
}

// Returns float32(value) * scale for the wire values of an octet.
template <WireType kWire>
__device__ __forceinline__ Octet Dequantize(const QuantizedOctet<kWire>& q) {
  Octet o;
  if constexpr (kWire == WireType::kMxfp4) {
    mxfp4::ScaledFloats(q.bits, q.scale, o.v);
    return o;
  } else {
#pragma unroll
    for (int i = 0; i < kOctet; i += 2) {
      const uint32_t pair = (i < 4 ? q.bits.x : q.bits.y) >> (8 * (i & 3)) & 0xFFFF;
      float2 values;
      if constexpr (kWire == WireType::kInt8) {
        values.x = static_cast<float>(static_cast<int8_t>(pair));
        values.y = static_cast<float>(static_cast<int8_t>(pair >> 8));
      } else {
        values =
            __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3)));
      }
      o.v[i] = __fmul_rn(values.x, q.scale);
      o.v[i + 1] = __fmul_rn(values.y, q.scale);
    }
    return o;
  }
}
// Does the same and rounds to T.
template <class T, WireType kWire>
__device__ __forceinline__ RawOctet<T> DequantizeTo(const QuantizedOctet<kWire>& q) {
  if constexpr (kWire == WireType::kMxfp4 && std::is_same_v<T, __nv_bfloat16>) {
    RawOctet<T> raw;
    mxfp4::ScaledPairs(q.bits, q.scale, reinterpret_cast<uint32_t (&)[4]>(raw.bits));
    return raw;
  } else {
    return Narrow<T>(Dequantize<kWire>(q));
  }
}

// Store and load the octet of element `e` where octets lie in the order of their elements. The lane with the first
// octet of a block stores its scale. A wire row has room for ceil(H/8) octets: the last octet may hold zeros past H.
template <WireType kWire>
__device__ __forceinline__ void StoreQuantized(char* wire_row, uint64_t scale_offset, int e, int end,
                                               const QuantizedOctet<kWire>& q) {
  using F = Format<kWire>;
  if (e >= end) return;
  *reinterpret_cast<typename F::Bits*>(wire_row + WirePlace<kWire>(e)) = q.bits;
  if ((e & (F::kBlock - 1)) != 0) return;
  char* const scales = wire_row + scale_offset;
  if constexpr (kWire == WireType::kMxfp4) {
    reinterpret_cast<uint8_t*>(scales)[e / F::kBlock] = static_cast<uint8_t>(__float_as_uint(q.scale) >> 23);
  } else {
    reinterpret_cast<float*>(scales)[e / F::kBlock] = q.scale;
  }
}
template <WireType kWire>
__device__ __forceinline__ QuantizedOctet<kWire> LoadQuantized(const char* wire_row, uint64_t scale_offset, int e,
                                                               int end) {
  using F = Format<kWire>;
  QuantizedOctet<kWire> q{};
  if (e >= end) return q;
  q.bits = __ldcs(reinterpret_cast<const typename F::Bits*>(wire_row + WirePlace<kWire>(e)));
  const char* const scales = wire_row + scale_offset;
  if constexpr (kWire == WireType::kMxfp4) {
    q.scale = mxfp4::ScaleOf(__ldcs(reinterpret_cast<const uint8_t*>(scales) + e / F::kBlock));
  } else {
    q.scale = __ldcs(reinterpret_cast<const float*>(scales) + e / F::kBlock);
  }
  return q;
}

}  // namespace xen_moe
