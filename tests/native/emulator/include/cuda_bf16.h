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
