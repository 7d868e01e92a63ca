// float16 for the emulator.
#pragma once

#include <cmath>

#include "cuda_runtime.h"

namespace emulator {

// Magnitude bits of `value` in a binary format of the given numbers of bits, rounded to nearest even; overflow runs
// into the exponent above. Not for infinity and NaN.
inline uint32_t RoundedBits(float value, int mantissa_bits, int bias) {
  const float magnitude = std::fabs(value);
  if (magnitude == 0.0f) return 0;
  const int exponent = std::max(std::ilogb(magnitude), 1 - bias);
  const float units = std::nearbyintf(std::ldexp(magnitude, mantissa_bits - exponent));
  const uint32_t biased = static_cast<uint32_t>(exponent + bias - 1);  // the leading one of `units` adds 1
  return (biased << mantissa_bits) + static_cast<uint32_t>(units);
}
inline float FloatOf(uint32_t magnitude_bits, int mantissa_bits, int bias) {
  const uint32_t exponent = magnitude_bits >> mantissa_bits, mantissa = magnitude_bits & ((1u << mantissa_bits) - 1);
  const int scale = static_cast<int>(exponent ? exponent : 1) - bias - mantissa_bits;
  return std::ldexp(static_cast<float>(mantissa + (exponent ? 1u << mantissa_bits : 0u)), scale);
}

}  // namespace emulator

struct __half_raw {
  unsigned short x;
};
struct __half {
  unsigned short bits = 0;
  __half() = default;
  __half(__half_raw raw) : bits(raw.x) {}
};
struct __half2_raw {
  unsigned short x, y;
};
struct __half2 {
  __half x, y;
  __half2() = default;
  __half2(__half x, __half y) : x(x), y(y) {}
  __half2(__half2_raw raw) : x(__half_raw{raw.x}), y(__half_raw{raw.y}) {}
};
typedef __half half;
typedef __half2 half2;

inline float __half2float(__half h) {
  const uint32_t magnitude = h.bits & 0x7FFFu;
  const float value = magnitude > 0x7C00u    ? NAN
                      : magnitude == 0x7C00u ? INFINITY
                                             : emulator::FloatOf(magnitude, 10, 15);
  return h.bits & 0x8000u ? -value : value;
}
inline __half __float2half_rn(float value) {
  const unsigned short sign = std::signbit(value) ? 0x8000u : 0u;
  if (std::isnan(value)) return __half_raw{0x7FFF};
  uint32_t bits = std::isinf(value) ? 0x7C00u : emulator::RoundedBits(value, 10, 15);
  if (bits > 0x7C00u) bits = 0x7C00u;
  return __half_raw{static_cast<unsigned short>(sign | bits)};
}
inline float2 __half22float2(__half2 h) { return {__half2float(h.x), __half2float(h.y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
