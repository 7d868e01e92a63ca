// float8_e4m3fn for the emulator.
#pragma once

#include "cuda_fp16.h"

typedef unsigned char __nv_fp8_storage_t;
typedef unsigned short __nv_fp8x2_storage_t;
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3 };

inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float value, __nv_saturation_t, __nv_fp8_interpretation_t) {
  const unsigned sign = std::signbit(value) ? 0x80u : 0u;
  if (std::isnan(value)) return 0x7F;
  const uint32_t bits = std::fabs(value) > 448.0f ? 0x7Eu : emulator::RoundedBits(value, 3, 7);
  return static_cast<__nv_fp8_storage_t>(sign | bits);
}
inline __half_raw __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t byte, __nv_fp8_interpretation_t) {
  const float value = (byte & 0x7F) == 0x7F ? NAN : emulator::FloatOf(byte & 0x7Fu, 3, 7);
  return {__float2half_rn(byte & 0x80 ? -value : value).bits};
}
inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 v, __nv_saturation_t s, __nv_fp8_interpretation_t i) {
  return static_cast<__nv_fp8x2_storage_t>(__nv_cvt_float_to_fp8(v.x, s, i) | __nv_cvt_float_to_fp8(v.y, s, i) << 8);
}
inline __half2_raw __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t both, __nv_fp8_interpretation_t i) {
  return {__nv_cvt_fp8_to_halfraw(both & 0xFF, i).x, __nv_cvt_fp8_to_halfraw(both >> 8, i).x};
}
