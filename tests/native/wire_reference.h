// Expected rows behind a quantized wire, computed in the plainest way: docs/design/internals.md, "Quantize".
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cuda_kernels/core/params.h"

namespace native {

// The nearest value of float8_e4m3fn, ties to even, at most 448.
inline float RoundedToE4m3(float value) {
  const float magnitude = std::fabs(value);
  if (magnitude == 0.0f) return value;
  const int exponent = std::max(std::ilogb(magnitude), -6);
  const float unit = std::ldexp(1.0f, exponent - 3);
  return std::copysign(std::min(448.0f, std::nearbyintf(magnitude / unit) * unit), value);
}

// The nearest value of float4_e2m1fn, ties to even, at most 6.
inline float RoundedToE2m1(float value) {
  const float magnitude = std::fabs(value);
  const float unit = std::ldexp(1.0f, std::max(magnitude == 0.0f ? 0 : std::ilogb(magnitude), 0) - 1);
  return std::copysign(std::min(6.0f, std::nearbyintf(magnitude / unit) * unit), value);
}

// `count` floats as they arrive. No infinity and no NaN.
inline void ThroughWire(float* row, int count, xen_moe::WireType wire, bool ue8m0) {
  if (wire == xen_moe::WireType::kNative) return;
  const bool fp4 = wire == xen_moe::WireType::kMxfp4;
  const float most = fp4 ? 6.0f : wire == xen_moe::WireType::kInt8 ? 127.0f : 448.0f;
  const int block = fp4 ? 32 : xen_moe::kScaleBlock;
  for (int begin = 0; begin < count; begin += block) {
    const int end = std::min(count, begin + block);
    float largest = std::ldexp(1.0f, -96);
    for (int i = begin; i < end; ++i) largest = std::max(largest, std::fabs(row[i]));
    volatile float scale = largest / most;
    volatile float inverse = most / largest;
    if (ue8m0 || fp4) {
      int exponent;
      const float mantissa = std::frexp(scale, &exponent);  // in [0.5, 1)
      scale = std::ldexp(1.0f, mantissa == 0.5f ? exponent - 1 : exponent);
      inverse = 1.0f / scale;
    }
    for (int i = begin; i < end; ++i) {
      const volatile float scaled = row[i] * inverse;
      const float value =
          fp4 ? RoundedToE2m1(scaled)
          : wire == xen_moe::WireType::kInt8
              ? static_cast<float>(std::max(-127, std::min(127, static_cast<int>(std::nearbyintf(scaled)))))
              : RoundedToE4m3(scaled);
      const volatile float back = value * scale;
      row[i] = back;
    }
  }
}

}  // namespace native
