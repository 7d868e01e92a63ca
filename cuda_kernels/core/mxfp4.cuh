// MXFP4: E2M1 numbers, eight in a word, with one power of two for 32 of them, of which a byte has the exponent, biased
// by 127 (OCP Microscaling Formats, version 1.0). The arithmetic of docs/design/internals.md, "Quantize".
//
// In a word the code of element 2 j is the j-th of the low four, and that of element 2 j + 1 the j-th of the high four:
// the two codes of a pair stand where a pair of bf16 has its halves. GPUs before Blackwell have no instruction for
// E2M1. A number is rounded by an addition: to a magnitude in [2^n, 2^(n+1)), n >= 0, is added the power of two whose
// last bit is worth 2^(n-1), the distance of neighbours there, and the sum is rounded to nearest, ties to even.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace xen_moe::mxfp4 {

constexpr int kBlock = 32;  // elements that share an exponent

// The exponent for numbers of which the largest magnitude has these bits; 255 for NaN and infinity. The exponent is
// that of the power of two at or above amax / 6, and 6 is 1.5 times a power of two.
__device__ __forceinline__ uint32_t ExponentFor(uint32_t amax_bits) {
  const uint32_t bits = max(amax_bits, 0x0F800000u);  // 2^-96
  return bits < 0x7F800000u ? ((bits + 0x3FFFFFu) >> 23) - 2 : 255u;
}
// The scale, and infinity for 255: the codes of such a block are zero, so its numbers become NaN.
__device__ __forceinline__ float ScaleOf(uint32_t exponent) { return __uint_as_float(exponent << 23); }
// One over the scale; negative for 255.
__device__ __forceinline__ float InverseOf(uint32_t exponent) { return __uint_as_float((254u - exponent) << 23); }

__device__ __forceinline__ __nv_bfloat162 Pair(uint32_t bits) {
  return *reinterpret_cast<const __nv_bfloat162*>(&bits);
}
__device__ __forceinline__ uint32_t Bits(__nv_bfloat162 pair) { return *reinterpret_cast<const uint32_t*>(&pair); }
// A power of two, which bf16 holds, twice.
__device__ __forceinline__ __nv_bfloat162 Twice(float power) {
  return Pair(__byte_perm(__float_as_uint(power), 0, 0x3232));
}

// The signs of a pair as bit 3 of its codes, which are the j-th.
__device__ __forceinline__ uint32_t SignsOf(uint32_t pair, int j) { return (pair & 0x80008000u) >> (12 - 4 * j); }
// A sum's bits are those of its power of two and, in the last three, how many distances the magnitude has. The code is
// that number, and 2 more for each n. Codes are numbers below 8, so that those of a word are computed in one integer.
template <int kMantissa>
struct Rounding {
  static constexpr uint32_t kUnit = 1u << (kMantissa - 1);  // exponent >> (kMantissa - 1): twice the biased exponent
  static constexpr uint32_t kOffset = (static_cast<uint32_t>(kMantissa - 1) << kMantissa) + 254;
  // The code and kOffset; `exponent`: the bits of 2^n.
  __device__ __forceinline__ static uint32_t Code(uint32_t sum, uint32_t exponent) {
    return sum - (exponent >> (kMantissa - 1)) * (kUnit - 1);
  }
};

// The codes of eight floats, multiplied by `inverse`; zero if that is negative.
__device__ __forceinline__ uint32_t CodesOf(const float (&x)[8], float inverse) {
  using Round = Rounding<23>;
  uint32_t even = 0, odd = 0, signs = 0;
#pragma unroll
  for (int j = 3; j >= 0; --j) {
    auto code = [&](float value) {
      const float magnitude = fabsf(__fmul_rn(value, inverse));
      const uint32_t exponent = __float_as_uint(fmaxf(magnitude, 1.0f)) & 0x7F800000u;
      return Round::Code(__float_as_uint(__fmaf_rn(__uint_as_float(exponent), Round::kUnit, magnitude)), exponent);
    };
    even = even * 16 + code(x[2 * j]), odd = odd * 16 + code(x[2 * j + 1]);
    signs |= SignsOf(__byte_perm(__float_as_uint(x[2 * j]), __float_as_uint(x[2 * j + 1]), 0x7632), j);
  }
  const uint32_t codes = even + (odd << 16) - Round::kOffset * 0x1111u - (Round::kOffset * 0x1111u << 16);
  return inverse > 0.0f ? codes | signs : 0u;
}
// The codes of four pairs of bf16, for half of the instructions: products by a power of two are exact, and so is all
// that decides how the sum is rounded.
__device__ __forceinline__ uint32_t CodesOf(const uint32_t (&pairs)[4], float inverse) {
  using Round = Rounding<7>;
  const __nv_bfloat162 factor = Twice(inverse), unit = Twice(Round::kUnit);
  uint32_t codes = 0, signs = 0;
#pragma unroll
  for (int j = 3; j >= 0; --j) {
    const uint32_t magnitude = Bits(__hmul2(Pair(pairs[j]), factor)) & 0x7FFF7FFFu;
    const uint32_t exponent = __vmaxu2(magnitude, 0x3F803F80u) & 0x7F807F80u;
    codes = codes * 16 + Round::Code(Bits(__hfma2(Pair(exponent), unit, Pair(magnitude))), exponent);
    signs |= SignsOf(pairs[j], j);
  }
  codes -= Round::kOffset * 0x1111u * 0x10001u;
  return inverse > 0.0f ? codes | signs : 0u;
}

// The numbers of a word as four pairs of bf16. A sign, two bits of exponent and one of mantissa, put where bf16 has
// them, are 2^-126 times the number.
__device__ __forceinline__ void NumbersOf(uint32_t codes, uint32_t (&pairs)[4]) {
  const __nv_bfloat162 rest = Twice(8.507059173e37f);  // 2^126
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t magnitude = j < 2 ? codes << (6 - 4 * j) : codes >> (4 * j - 6);
    const uint32_t pair = (codes << (12 - 4 * j) & 0x80008000u) | (magnitude & 0x01C001C0u);
    pairs[j] = Bits(__hmul2(Pair(pair), rest));
  }
}
// The numbers of a word times a power of two, rounded to bf16: exact but for an overflow.
__device__ __forceinline__ void ScaledPairs(uint32_t codes, float scale, uint32_t (&pairs)[4]) {
  NumbersOf(codes, pairs);
#pragma unroll
  for (int j = 0; j < 4; ++j) pairs[j] = Bits(__hmul2(Pair(pairs[j]), Twice(scale)));
}
__device__ __forceinline__ void ScaledFloats(uint32_t codes, float scale, float (&values)[8]) {
  uint32_t pairs[4];
  NumbersOf(codes, pairs);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    values[2 * j] = __fmul_rn(__uint_as_float(pairs[j] << 16), scale);
    values[2 * j + 1] = __fmul_rn(__uint_as_float(pairs[j] & 0xFFFF0000u), scale);
  }
}

}  // namespace xen_moe::mxfp4
