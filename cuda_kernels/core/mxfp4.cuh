// MXFP4 (OCP Microscaling Formats, version 1.0): blocks of 32 E2M1 numbers. Each block has one scale, a power of two,
// and one byte holds its exponent plus 127. docs/design/internals.md, "Quantize", defines the arithmetic.
//
// A word of 32 bits holds the 4-bit codes of eight neighbouring elements. For j from 0 to 3, four bits from bit 4 j on
// are the code of element 2 j, and four bits from bit 16 + 4 j on are the code of element 2 j + 1. So the codes of a
// pair of elements lie in the lower and in the upper half of the word, as the two numbers of a pair of bf16 do.
//
// GPUs before Blackwell have no instruction that converts to E2M1; here an addition rounds. E2M1 numbers in
// [2^n, 2^(n+1)), n >= 0, are 2^(n-1) apart, and those below 1 are as far apart as those in [1, 2). To a magnitude in
// such a range the kernel adds the power of two whose last mantissa bit is worth 2^(n-1). The addition rounds the sum
// to a multiple of 2^(n-1), to nearest, ties to even.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace xen_moe::mxfp4 {

constexpr int kBlock = 32;  // elements that share an exponent

// Returns the exponent, biased by 127, of a block's scale: the least power of two that is not below amax / 6.
// `amax_bits`: the float32 bits of amax, the block's largest magnitude, which counts as 2^-96 if it is smaller. Returns
// 255 if amax is NaN or infinity. As 6 is 1.5 * 2^2, the exponent is that of amax minus 2, plus 1 if the mantissa of
// amax exceeds 1.5.
__device__ __forceinline__ uint32_t ExponentFor(uint32_t amax_bits) {
  const uint32_t bits = max(amax_bits, 0x0F800000u);  // 2^-96
  return bits < 0x7F800000u ? ((bits + 0x3FFFFFu) >> 23) - 2 : 255u;
}
// Returns the scale. For 255 it returns infinity: all codes of such a block are zero, and zero times infinity is NaN.
__device__ __forceinline__ float ScaleOf(uint32_t exponent) { return __uint_as_float(exponent << 23); }
// Returns one over the scale. For 255 it returns minus infinity, by which CodesOf knows such a block.
__device__ __forceinline__ float InverseOf(uint32_t exponent) { return __uint_as_float((254u - exponent) << 23); }

// A pair of bf16 numbers of these bits, and the bits of a pair.
__device__ __forceinline__ __nv_bfloat162 Pair(uint32_t bits) {
  return *reinterpret_cast<const __nv_bfloat162*>(&bits);
}
__device__ __forceinline__ uint32_t Bits(__nv_bfloat162 pair) { return *reinterpret_cast<const uint32_t*>(&pair); }
// Returns a pair of which both numbers are `power`, a power of two that bf16 can hold.
__device__ __forceinline__ __nv_bfloat162 Twice(float power) {
  return Pair(__byte_perm(__float_as_uint(power), 0, 0x3232));
}

// Returns the signs of pair number `j` of a word, each as bit 3 of the number's code.
__device__ __forceinline__ uint32_t SignsOf(uint32_t pair, int j) { return (pair & 0x80008000u) >> (12 - 4 * j); }
// How a rounded sum becomes a code. kMantissa: the mantissa bits of the format of the sum, 23 (float32) or 7 (bf16).
// The sum is 2^n * kUnit + magnitude. Its bits are those of 2^n * kUnit plus d, where d, a number from 0 to 4, is the
// rounded magnitude divided by 2^(n-1). The code, without its sign, is d + 2 n. It is below 8, so sums with a code for
// every four bits have no carries: CodesOf adds up what Code returns and subtracts all offsets at once.
template <int kMantissa>
struct Rounding {
  static constexpr uint32_t kUnit = 1u << (kMantissa - 1);
  static constexpr uint32_t kOffset = (static_cast<uint32_t>(kMantissa - 1) << kMantissa) + 254;
  // Returns the code plus kOffset. `sum`: the bits of the sum. `exponent`: the bits of 2^n, which are 2 * (127 + n)
  // after a shift by kMantissa - 1.
  __device__ __forceinline__ static uint32_t Code(uint32_t sum, uint32_t exponent) {
    return sum - (exponent >> (kMantissa - 1)) * (kUnit - 1);
  }
};

// Returns the codes of eight numbers times `inverse`, as a word; zero if `inverse` is negative (InverseOf).
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
// Does the same for four pairs of bf16 numbers, with half of the instructions and the same codes: a product by a power
// of two is exact unless it is so small that its code is zero, and the sum is rounded once.
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

// Returns the eight E2M1 numbers of a word as four pairs of bf16. A code is a sign, two bits of exponent and one of
// mantissa. A bf16 with these bits in the same fields is 2^-126 times the number (subnormal for 0.5).
__device__ __forceinline__ void NumbersOf(uint32_t codes, uint32_t (&pairs)[4]) {
  const __nv_bfloat162 rest = Twice(8.507059173e37f);  // 2^126
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t magnitude = j < 2 ? codes << (6 - 4 * j) : codes >> (4 * j - 6);
    const uint32_t pair = (codes << (12 - 4 * j) & 0x80008000u) | (magnitude & 0x01C001C0u);
    pairs[j] = Bits(__hmul2(Pair(pair), rest));
  }
}
// Returns the numbers of a word times `scale`, a power of two, rounded to bf16. The rounding is exact unless a product
// overflows, because no scale is below 2^-98.
__device__ __forceinline__ void ScaledPairs(uint32_t codes, float scale, uint32_t (&pairs)[4]) {
  NumbersOf(codes, pairs);
#pragma unroll
  for (int j = 0; j < 4; ++j) pairs[j] = Bits(__hmul2(Pair(pairs[j]), Twice(scale)));
}
// Returns the numbers of a word times `scale` in float32.
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
