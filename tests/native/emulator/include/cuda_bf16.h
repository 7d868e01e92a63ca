// bfloat16 for the emulator.
#pragma once

#include <cmath>

#include "cuda_runtime.h"

struct __nv_bfloat16 {
  unsigned short bits = 0;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline float __bfloat162float(__nv_bfloat16 b) { return __uint_as_float(static_cast<unsigned>(b.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  if (std::isnan(value)) return {0x7FFF};
  const unsigned bits = __float_as_uint(value);
  return {static_cast<unsigned short>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline float2 __bfloat1622float2(__nv_bfloat162 b) { return {__bfloat162float(b.x), __bfloat162float(b.y)}; }
namespace emulator {
// Rounds once: through a float that keeps what the double has beyond it in its last bit.
inline __nv_bfloat16 ToBf16(double value) {
  float near = static_cast<float>(value);
  if (static_cast<double>(near) != value && std::isfinite(near)) {
    if (std::fabs(near) > std::fabs(value)) near = std::nextafter(near, 0.0f);
    near = __uint_as_float(__float_as_uint(near) | 1u);
  }
  return __float2bfloat16_rn(near);
}
}  // namespace emulator
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  auto one = [](__nv_bfloat16 x, __nv_bfloat16 y, __nv_bfloat16 z) {
    return emulator::ToBf16(static_cast<double>(__bfloat162float(x)) * __bfloat162float(y) + __bfloat162float(z));
  };
  return {one(a.x, b.x, c.x), one(a.y, b.y, c.y)};
}
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) {
  auto one = [](__nv_bfloat16 x, __nv_bfloat16 y) {
    return __float2bfloat16_rn(__bfloat162float(x) * __bfloat162float(y));
  };
  return {one(a.x, b.x), one(a.y, b.y)};
}
