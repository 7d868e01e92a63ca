// Rows that travel as fp8 or int8 and arrive in their own dtype: a codec as row_codec.cuh describes it.
//
// A warp takes a part of a row in chunks of kSteps steps of 256 elements; a lane has the octet `lane` of every step,
// from the first load to the last store. On the wire two steps lie interleaved: lane l's 16 bytes are octet l of the
// one and of the other, so that both ends move 16 bytes a lane. What is left of a part behind the last two whole steps
// lies in element order. The scales of a chunk (two a step: lanes 0 to 15 and 16 to 31) are each computed, sent and
// loaded by one lane, `16 * half + step`. A hidden size that is no multiple of 8 goes element by element.
#pragma once

#include "row_codec.cuh"

namespace xen_moe {

// The largest magnitude of an octet, as bits that compare as integers; two values side by side for 2-byte elements.
__device__ __forceinline__ uint32_t Magnitudes(const RawOctet<float>& raw) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(raw.bits);
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kOctet; ++i) most = max(most, words[i] & 0x7FFFFFFFu);
  return most;
}
template <class X>
__device__ __forceinline__ uint32_t Magnitudes(const RawOctet<X>& raw) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(raw.bits);
  uint32_t most = words[0] & 0x7FFF7FFFu;
#pragma unroll
  for (int i = 1; i < kOctet / 2; ++i) most = __vmaxu2(most, words[i] & 0x7FFF7FFFu);
  return most;
}
template <class X>
__device__ __forceinline__ uint32_t Larger(uint32_t a, uint32_t b) {
  if constexpr (sizeof(X) == 4) {
    return max(a, b);
  } else {
    return __vmaxu2(a, b);
  }
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

template <class X, WireType kWire>
struct QuantizeCodec {
  static constexpr int kSteps = sizeof(X) == 4 ? 6 : 14;  // even; of a chunk, whose loads are in flight together
  static constexpr int kOwners = sizeof(X) == 4 ? 8 : 16;
  static constexpr int kChunk = kSteps * kWarpElements;

  // A chunk as a lane has it.
  struct Chunk {
    uint2 bits[kSteps];
    BlockScale block;  // of step `lane % kOwners` and this lane's half
  };

  __device__ __forceinline__ static bool Whole(const DispatchParams& p) { return p.routing.hidden % kOctet == 0; }
  __device__ __forceinline__ static int Element(int base, int step) {
    return base + step * kWarpElements + static_cast<int>(threadIdx.x & 31) * kOctet;
  }
  __device__ __forceinline__ static int Owner(int step) { return static_cast<int>(threadIdx.x & 16) | step; }
  // Whether steps 2j and 2j + 1 lie interleaved.
  __device__ __forceinline__ static bool Interleaved(int base, int end, int pair) {
    return base + (2 * pair + 2) * kWarpElements <= end;
  }
  // Where the scale lies that this lane owns, or -1.
  __device__ __forceinline__ static int OwnScale(int base, int end) {
    const int lane = threadIdx.x & 31, step = lane & 15;
    const int block = base / kScaleBlock + 2 * step + lane / 16;
    return step < kSteps && block * kScaleBlock < end ? block : -1;
  }

  // Of `most[step]`, which every lane has of its own octets: the maximum of the step that this lane owns over the 16
  // lanes of its half. Every round halves the steps that a lane looks after: 15 shuffles instead of 4 a step.
  template <int kApart>
  __device__ __forceinline__ static uint32_t LargestOfOwn(uint32_t (&most)[kOwners]) {
    const bool upper = threadIdx.x & kApart;
#pragma unroll
    for (int i = 0; i < kApart; ++i) {
      const uint32_t given = upper ? most[i] : most[i + kApart], kept = upper ? most[i + kApart] : most[i];
      most[i] = Larger<X>(kept, __shfl_xor_sync(0xFFFFFFFFu, given, kApart));
    }
    if constexpr (kApart > 1) {
      return LargestOfOwn<kApart / 2>(most);
    } else {
      return most[0];
    }
  }
  __device__ __forceinline__ static Chunk QuantizeChunk(const DispatchParams& p, const X* row, int base, int end) {
    RawOctet<X> raw[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) raw[i] = LoadOctet(row, Element(base, i), end, true);
    uint32_t most[kOwners];
#pragma unroll
    for (int i = 0; i < kOwners; ++i) most[i] = i < kSteps ? Magnitudes(raw[i < kSteps ? i : 0]) : 0u;
    if constexpr (kOwners == 8) {
#pragma unroll
      for (int i = 0; i < 8; ++i) most[i] = Larger<X>(most[i], __shfl_xor_sync(0xFFFFFFFFu, most[i], 8));
    }
    Chunk chunk;
    chunk.block = ScaleOf<kWire>(FloatBits(LargestOfOwn<kOwners / 2>(most), X()), p.ue8m0);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const float inverse = __shfl_sync(0xFFFFFFFFu, chunk.block.inverse, Owner(i));
      chunk.bits[i] = QuantizeBits<kWire>(Widen(raw[i]), inverse);
    }
    return chunk;
  }

  __device__ __forceinline__ static void StoreChunk(const Chunk& chunk, char* wire, uint64_t scale_offset, int base,
                                                    int end) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int j = 0; j < kSteps / 2; ++j) {
      const uint2 a = chunk.bits[2 * j], b = chunk.bits[2 * j + 1];
      if (Interleaved(base, end, j)) {
        *reinterpret_cast<uint4*>(wire + base + j * 2 * kWarpElements + lane * 16) = make_uint4(a.x, a.y, b.x, b.y);
      } else {
        if (Element(base, 2 * j) < end) *reinterpret_cast<uint2*>(wire + Element(base, 2 * j)) = a;
        if (Element(base, 2 * j + 1) < end) *reinterpret_cast<uint2*>(wire + Element(base, 2 * j + 1)) = b;
      }
    }
    const int own = OwnScale(base, end);
    if (own >= 0) reinterpret_cast<float*>(wire + scale_offset)[own] = chunk.block.scale;
  }
  __device__ __forceinline__ static Chunk LoadChunk(const char* wire, uint64_t scale_offset, int base, int end) {
    const int lane = threadIdx.x & 31;
    Chunk chunk;
    const int own = OwnScale(base, end);
    chunk.block.scale = own >= 0 ? __ldcs(reinterpret_cast<const float*>(wire + scale_offset) + own) : 0.0f;
#pragma unroll
    for (int j = 0; j < kSteps / 2; ++j) {
      if (Interleaved(base, end, j)) {
        const uint4 v = __ldcs(reinterpret_cast<const uint4*>(wire + base + j * 2 * kWarpElements + lane * 16));
        chunk.bits[2 * j] = make_uint2(v.x, v.y), chunk.bits[2 * j + 1] = make_uint2(v.z, v.w);
      } else {
#pragma unroll
        for (int i = 2 * j; i < 2 * j + 2; ++i) {
          const int e = Element(base, i);
          chunk.bits[i] = e < end ? __ldcs(reinterpret_cast<const uint2*>(wire + e)) : make_uint2(0, 0);
        }
      }
    }
    return chunk;
  }
  // Widened once, and stored to every row.
  __device__ __forceinline__ static void PlaceChunk(const DispatchParams& p, const Chunk& chunk, int base, int end,
                                                    const Rows& rows) {
    const uint32_t row_bytes = static_cast<uint32_t>(p.routing.hidden) * sizeof(X);
    char* const first = static_cast<char*>(p.rows) + static_cast<int64_t>(Element(base, 0)) * sizeof(X);
    float scales[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) scales[i] = __shfl_sync(0xFFFFFFFFu, chunk.block.scale, Owner(i));
#pragma unroll
    for (int j = 0; j < kSteps / 2; ++j) {
      if (base + 2 * j * kWarpElements >= end) break;
      RawOctet<X> raw[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        raw[i] = Narrow<X>(Dequantize<kWire>({chunk.bits[2 * j + i], scales[2 * j + i]}));
      }
      const bool has_first = Element(base, 2 * j) < end, has_second = Element(base, 2 * j + 1) < end;
      for (int r = 0; r < rows.count; ++r) {
        char* const row = first + static_cast<uint64_t>(row_bytes) * static_cast<uint32_t>(rows.list[r]);
        int4* const to = reinterpret_cast<int4*>(row + 2 * j * kWarpElements * sizeof(X));
#pragma unroll
        for (int v = 0; v < RawOctet<X>::kVectors; ++v) {
          if (has_first) to[v] = raw[0].bits[v];
          if (has_second) to[v + kWarpElements * sizeof(X) / 16] = raw[1].bits[v];
        }
      }
    }
  }

  // One octet of a row of any length, in element order on the wire.
  __device__ __noinline__ static void PushOctets(const DispatchParams& p, const X* row, Range part, Targets targets) {
    for (int base = part.begin; base < part.end; base += kWarpElements) {
      const int e = Element(base, 0);
      const QuantizedOctet q = Quantize<kWire>(Widen(LoadOctet(row, e, part.end, false)), p.ue8m0);
      targets.ForEach([&](char* wire) { StoreQuantized(wire, p.staging.scale_offset, e, part.end, q); });
    }
  }
  // `wire` or, if that is null, `own`.
  __device__ __noinline__ static void PlaceOctets(const DispatchParams& p, const char* wire, const X* own, Range part,
                                                  Rows rows) {
    for (int base = part.begin; base < part.end; base += kWarpElements) {
      const int e = Element(base, 0);
      const QuantizedOctet q = wire ? LoadQuantized(wire, p.staging.scale_offset, e, part.end)
                                    : Quantize<kWire>(Widen(LoadOctet(own, e, part.end, false)), p.ue8m0);
      const RawOctet<X> raw = Narrow<X>(Dequantize<kWire>(q));
      for (int i = 0; i < rows.count; ++i) {
        X* row = static_cast<X*>(p.rows) + static_cast<int64_t>(rows.list[i]) * p.routing.hidden;
        StoreOctet(row, e, part.end, false, raw);
      }
    }
  }

  __device__ __forceinline__ static const X* Row(const DispatchParams& p, int token) {
    return static_cast<const X*>(p.x) + static_cast<int64_t>(token) * p.routing.hidden;
  }
  __device__ static void Push(const DispatchParams& p, int token, Range part, const Targets& targets) {
    if (!Whole(p)) return PushOctets(p, Row(p, token), part, targets);
    for (int base = part.begin; base < part.end; base += kChunk) {
      const Chunk chunk = QuantizeChunk(p, Row(p, token), base, part.end);
      targets.ForEach([&](char* wire) { StoreChunk(chunk, wire, p.staging.scale_offset, base, part.end); });
    }
  }
  __device__ static void PlaceStaged(const DispatchParams& p, const char* wire_row, Range part, const Rows& rows) {
    if (!Whole(p)) return PlaceOctets(p, wire_row, nullptr, part, rows);
    for (int base = part.begin; base < part.end; base += kChunk) {
      PlaceChunk(p, LoadChunk(wire_row, p.staging.scale_offset, base, part.end), base, part.end, rows);
    }
  }
  __device__ static void PlaceOwn(const DispatchParams& p, int token, Range part, const Rows& rows) {
    if (!Whole(p)) return PlaceOctets(p, nullptr, Row(p, token), part, rows);
    for (int base = part.begin; base < part.end; base += kChunk) {
      PlaceChunk(p, QuantizeChunk(p, Row(p, token), base, part.end), base, part.end, rows);
    }
  }
};

}  // namespace xen_moe
