// A chunk: a few steps of a quantized row, as a warp holds them in registers between the rounding and the wire.
//
// A step is 256 elements; lane l has octet l of every step, from the first load to the last store. On the wire two
// steps are interleaved: octet l of the first step lies beside octet l of the second, so that lane l stores and loads
// both at once, 16 bytes (8 of MXFP4). The elements of a part after its last two whole steps lie in order. Rows are
// multiples of 8 elements here; all lanes of a warp call every function together.
#pragma once

#include "cuda_kernels/core/octet.cuh"

namespace xen_moe {

// Returns the larger of two magnitudes, given as bits, which compare as integers. With 2-byte elements, each argument
// holds two magnitudes side by side, and so does the result.
template <int kBytes>
__device__ __forceinline__ uint32_t Larger(uint32_t a, uint32_t b) {
  if constexpr (kBytes == 4) {
    return max(a, b);
  } else {
    return __vmaxu2(a, b);
  }
}
// Returns the largest magnitude of an octet as bits; with 2-byte elements, that of the elements with even numbers and
// that of the elements with odd numbers side by side.
template <class T>
__device__ __forceinline__ uint32_t Magnitude(const RawOctet<T>& raw) {
  constexpr uint32_t kMask = sizeof(T) == 4 ? 0x7FFFFFFFu : 0x7FFF7FFFu;
  const uint32_t* words = reinterpret_cast<const uint32_t*>(raw.bits);
  uint32_t most = words[0] & kMask;
#pragma unroll
  for (int i = 1; i < RawOctet<T>::kVectors * 4; ++i) most = Larger<sizeof(T)>(most, words[i] & kMask);
  return most;
}
// Returns the float32 bits of the largest magnitude, as Magnitude<T> returns it. The second argument gives T.
__device__ __forceinline__ uint32_t FloatBits(uint32_t magnitudes, float) { return magnitudes; }
__device__ __forceinline__ uint32_t FloatBits(uint32_t magnitudes, __nv_bfloat16) {
  return max(magnitudes & 0xFFFF0000u, magnitudes << 16);
}
__device__ __forceinline__ uint32_t FloatBits(uint32_t magnitudes, __half) {
  __half_raw larger;
  larger.x = static_cast<unsigned short>(max(magnitudes >> 16, magnitudes & 0xFFFFu));
  return __float_as_uint(__half2float(__half(larger)));
}

// Returns, for the step `lane % kLanes`, the maximum of `most[step]` over kLanes neighbouring lanes. Every lane gives
// the magnitudes `most` of its own octets in kLanes steps. In every round two lanes share out the steps that both still
// handle: this takes kLanes - 1 shuffles, where a reduction of each step takes kLanes * log2(kLanes).
template <int kBytes, int kLanes>
__device__ __forceinline__ uint32_t LargestOfOwn(const uint32_t* most) {
  uint32_t kept[kLanes];
#pragma unroll
  for (int i = 0; i < kLanes; ++i) kept[i] = most[i];
#pragma unroll
  for (int apart = kLanes / 2; apart > 0; apart /= 2) {
    const bool upper = threadIdx.x & apart;
#pragma unroll
    for (int i = 0; i < apart; ++i) {
      const uint32_t given = upper ? kept[i] : kept[i + apart], own = upper ? kept[i + apart] : kept[i];
      kept[i] = Larger<kBytes>(own, __shfl_xor_sync(0xFFFFFFFFu, given, apart));
    }
  }
  return kept[0];
}

// The scales of a chunk. A step has two scales, one for the octets of lanes 0 to 15 and one for those of lanes 16 to 31
// (half 0 and half 1). Lane `16 * half + step` stores or loads the scale of that half of that step.
template <WireType kWire, int kSteps>
struct ChunkScales {
  static constexpr int kOwners = kSteps > 8 ? 16 : kSteps > 4 ? 8 : kSteps > 2 ? 4 : 2;
  BlockScale block;  // of step `lane % kOwners` and this lane's half; after Load, only in the lanes of Own

  __device__ __forceinline__ float Scale(int step) const { return __shfl_sync(0xFFFFFFFFu, block.scale, Owner(step)); }
  __device__ __forceinline__ float Inverse(int step) const {
    return __shfl_sync(0xFFFFFFFFu, block.inverse, Owner(step));
  }
  // Finds the scales. `magnitude(step)`: what Magnitude<T> returns for this lane's octet of a step.
  template <class T, class MagnitudeOf>
  __device__ __forceinline__ void Find(MagnitudeOf magnitude, bool ue8m0) {
    uint32_t most[kOwners];
#pragma unroll
    for (int i = 0; i < kOwners; ++i) most[i] = i < kSteps ? magnitude(i) : 0u;
#pragma unroll
    for (int i = 0; i < kOwners; ++i) {
      if constexpr (kOwners < 16) most[i] = Larger<sizeof(T)>(most[i], __shfl_xor_sync(0xFFFFFFFFu, most[i], 8));
      if constexpr (kOwners < 8) most[i] = Larger<sizeof(T)>(most[i], __shfl_xor_sync(0xFFFFFFFFu, most[i], 4));
      if constexpr (kOwners < 4) most[i] = Larger<sizeof(T)>(most[i], __shfl_xor_sync(0xFFFFFFFFu, most[i], 2));
    }
    block = ScaleOf<kWire>(FloatBits(LargestOfOwn<sizeof(T), kOwners>(most), T()), ue8m0);
  }
  // To and from `scales`, the scales of the row. `base`: the chunk's first element. `end`: the end of the part.
  __device__ __forceinline__ void Store(char* scales, int base, int end) const {
    const int own = Own(base, end);
    if (own >= 0) reinterpret_cast<float*>(scales)[own] = block.scale;
  }
  __device__ __forceinline__ void Load(const char* scales, int base, int end) {
    const int own = Own(base, end);
    block.scale = own >= 0 ? __ldcs(reinterpret_cast<const float*>(scales) + own) : 0.0f;
  }

 private:
  __device__ __forceinline__ static int Owner(int step) { return static_cast<int>(threadIdx.x & 16) | step; }
  // Returns the number, in the row, of the scale that this lane stores or loads; -1 if it has none.
  __device__ __forceinline__ static int Own(int base, int end) {
    const int lane = threadIdx.x & 31, step = lane & 15;
    const int scale = base / kScaleBlock + 2 * step + lane / 16;
    return step < kSteps && scale * kScaleBlock < end ? scale : -1;
  }
};

// On an MXFP4 wire a step has eight exponents, one for the octets of four lanes. Lane l stores or loads a word with the
// four exponents of elements 128 l to 128 l + 127 of the chunk. It has as many bytes, in the same place, as the float
// scale of 128 elements on the other wires.
template <int kSteps>
struct ChunkScales<WireType::kMxfp4, kSteps> {
  uint32_t word;

  __device__ __forceinline__ float Scale(int step) const { return mxfp4::ScaleOf(Exponent(step)); }
  __device__ __forceinline__ float Inverse(int step) const { return mxfp4::InverseOf(Exponent(step)); }
  template <class T, class MagnitudeOf>
  __device__ __forceinline__ void Find(MagnitudeOf magnitude, bool) {
    // Lane l belongs to four lanes that share exponents. In steps l % 4, l % 4 + 4 and so on it finds their exponent,
    // and keeps one byte for each. Then it makes its word, whose elements are half l % 2 of step l / 2: it collects
    // that step's byte from one lane of each four in that half.
    uint32_t own = 0;
#pragma unroll
    for (int first = 0; first < kSteps; first += 4) {
      uint32_t most[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) most[i] = first + i < kSteps ? magnitude(first + i) : 0u;
      const uint32_t bits = FloatBits(LargestOfOwn<sizeof(T), 4>(most), T());
      own |= mxfp4::ExponentFor(bits) << (2 * first);
    }
    const int lane = threadIdx.x & 31, step = lane / 2, from = (lane & 1) * 16 + step % 4;
    uint32_t of[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) of[i] = __shfl_sync(0xFFFFFFFFu, own, from + 4 * i);
    const uint32_t both = static_cast<uint32_t>(step / 4) * 0x11 + 0x40;  // selects byte step / 4 of two words
    word = __byte_perm(__byte_perm(of[0], of[1], both), __byte_perm(of[2], of[3], both), 0x5410);
  }
  __device__ __forceinline__ void Store(char* scales, int base, int end) const {
    if (Has(base, end)) reinterpret_cast<uint32_t*>(scales)[Word(base)] = word;
  }
  __device__ __forceinline__ void Load(const char* scales, int base, int end) {
    word = Has(base, end) ? __ldcs(reinterpret_cast<const uint32_t*>(scales) + Word(base)) : 0u;
  }

 private:
  __device__ __forceinline__ uint32_t Exponent(int step) const {
    const int lane = threadIdx.x & 31;
    const uint32_t four = __shfl_sync(0xFFFFFFFFu, word, 2 * step + lane / 16);
    return four >> (lane / 4 % 4 * 8) & 0xFF;
  }
  __device__ __forceinline__ static int Word(int base) { return base / kScaleBlock + (threadIdx.x & 31); }
  __device__ __forceinline__ static bool Has(int base, int end) {
    return (threadIdx.x & 31) < 2 * kSteps && Word(base) * kScaleBlock < end;
  }
};

template <WireType kWire, int kSteps>
struct WireChunk {
  static_assert(kSteps % 2 == 0 && kSteps <= 16, "pairs of steps, and a lane for each scale");
  static constexpr int kElements = kSteps * kWarpElements;
  using Bits = typename Format<kWire>::Bits;
  using Two = std::conditional_t<sizeof(Bits) == 8, uint4, uint2>;

  Bits bits[kSteps];
  ChunkScales<kWire, kSteps> scales;

  __device__ __forceinline__ static int Element(int base, int step) {
    return base + step * kWarpElements + static_cast<int>(threadIdx.x & 31) * kOctet;
  }
  __device__ __forceinline__ float Scale(int step) const { return scales.Scale(step); }
  // Returns the octet of a step as it arrives. `scale`: what Scale(step) returns.
  __device__ __forceinline__ Octet Rounded(int step, float scale) const {
    return Dequantize<kWire>({bits[step], scale});
  }
  // Returns the same, rounded to T.
  template <class T>
  __device__ __forceinline__ RawOctet<T> RoundedTo(int step, float scale) const {
    return DequantizeTo<T, kWire>({bits[step], scale});
  }

  // Quantizes `octet(step)`, raw bits of T, for every step.
  template <class T, class OctetOf>
  __device__ __forceinline__ void Quantize(OctetOf octet, bool ue8m0) {
    scales.template Find<T>([&](int i) { return Magnitude(octet(i)); }, ue8m0);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) bits[i] = QuantizeBits<kWire, T>(octet(i), scales.Inverse(i));
  }

  // To and from a wire row. `base`: the chunk's first element in the row. `end`: the end of the part.
  __device__ __forceinline__ void Store(char* wire, uint64_t scale_offset, int base, int end) const {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int j = 0; j < kSteps / 2; ++j) {
      if (Interleaved(base, end, j)) {
        Two two;
        reinterpret_cast<Bits*>(&two)[0] = bits[2 * j], reinterpret_cast<Bits*>(&two)[1] = bits[2 * j + 1];
        reinterpret_cast<Two*>(wire + PairPlace(base, j))[lane] = two;
      } else {
#pragma unroll
        for (int i = 2 * j; i < 2 * j + 2; ++i) {
          const int e = Element(base, i);
          if (e < end) *reinterpret_cast<Bits*>(wire + WirePlace<kWire>(e)) = bits[i];
        }
      }
    }
    scales.Store(wire + scale_offset, base, end);
  }
  __device__ __forceinline__ void Load(const char* wire, uint64_t scale_offset, int base, int end) {
    const int lane = threadIdx.x & 31;
    scales.Load(wire + scale_offset, base, end);
#pragma unroll
    for (int j = 0; j < kSteps / 2; ++j) {
      if (Interleaved(base, end, j)) {
        const Two two = __ldcs(reinterpret_cast<const Two*>(wire + PairPlace(base, j)) + lane);
        bits[2 * j] = reinterpret_cast<const Bits*>(&two)[0], bits[2 * j + 1] = reinterpret_cast<const Bits*>(&two)[1];
      } else {
#pragma unroll
        for (int i = 2 * j; i < 2 * j + 2; ++i) {
          const int e = Element(base, i);
          bits[i] = e < end ? __ldcs(reinterpret_cast<const Bits*>(wire + WirePlace<kWire>(e))) : Bits{};
        }
      }
    }
  }

 private:
  // Returns true if steps 2 * pair and 2 * pair + 1 lie interleaved.
  __device__ __forceinline__ static bool Interleaved(int base, int end, int pair) {
    return base + (2 * pair + 2) * kWarpElements <= end;
  }
  // Returns the byte of the wire row at which these two steps begin.
  __device__ __forceinline__ static int PairPlace(int base, int pair) {
    return WirePlace<kWire>(base + 2 * pair * kWarpElements);
  }
};

}  // namespace xen_moe
