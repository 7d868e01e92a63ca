// The codec (row_codec.cuh) of rows that travel as fp8, int8 or MXFP4 and arrive in the dtype of x. A warp handles a
// part of a row in chunks (wire_chunk.cuh) or, if the hidden size is not a multiple of 8, octet by octet.
#pragma once

#include "cuda_kernels/core/row_codec.cuh"
#include "cuda_kernels/core/wire_chunk.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

template <class X, WireType kWire>
struct QuantizeCodec {
  static constexpr int kSteps = sizeof(X) == 4 ? 6 : 14;  // steps whose loads are in flight together
  using Chunk = WireChunk<kWire, kSteps>;

  // Returns whether rows consist of whole octets.
  __device__ __forceinline__ static bool Whole(const DispatchParams& p) { return p.routing.hidden % kOctet == 0; }

  __device__ __forceinline__ static Chunk QuantizeChunk(const DispatchParams& p, const X* row, int base, int end) {
    RawOctet<X> raw[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) raw[i] = LoadOctet(row, Chunk::Element(base, i), end, true);
    Chunk chunk;
    chunk.template Quantize<X>([&](int i) { return raw[i]; }, p.ue8m0);
    return chunk;
  }
  __device__ __forceinline__ static Chunk LoadChunk(const DispatchParams& p, const char* wire, int base, int end) {
    Chunk chunk;
    chunk.Load(wire, p.staging.scale_offset, base, end);
    return chunk;
  }
  // Dequantizes each octet of a chunk once, and stores it to every one of `rows`.
  __device__ __forceinline__ static void PlaceChunk(const DispatchParams& p, const Chunk& chunk, int base, int end,
                                                    const Rows& rows) {
    const uint32_t row_bytes = static_cast<uint32_t>(p.routing.hidden) * sizeof(X);
    char* const first = static_cast<char*>(p.rows) + static_cast<int64_t>(Chunk::Element(base, 0)) * sizeof(X);
    float scales[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) scales[i] = chunk.Scale(i);
#pragma unroll
    for (int j = 0; j < kSteps / 2; ++j) {
      if (base + 2 * j * kWarpElements >= end) break;
      RawOctet<X> raw[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) raw[i] = chunk.template RoundedTo<X>(2 * j + i, scales[2 * j + i]);
      const bool has_first = Chunk::Element(base, 2 * j) < end, has_second = Chunk::Element(base, 2 * j + 1) < end;
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

  // Push for rows of any length. On the wire their octets lie in the order of their elements.
  __device__ __noinline__ static void PushOctets(const DispatchParams& p, const X* row, Range part, Targets targets) {
    for (int base = part.begin; base < part.end; base += kWarpElements) {
      const int e = Chunk::Element(base, 0);
      const QuantizedOctet<kWire> q = Quantize<kWire>(Widen(LoadOctet(row, e, part.end, false)), p.ue8m0);
      targets.ForEach([&](char* wire) { StoreQuantized<kWire>(wire, p.staging.scale_offset, e, part.end, q); });
    }
  }
  // PlaceStaged of the wire row `wire` or, if that is null, PlaceOwn of the row `own` of x, for rows of any length.
  __device__ __noinline__ static void PlaceOctets(const DispatchParams& p, const char* wire, const X* own, Range part,
                                                  Rows rows) {
    for (int base = part.begin; base < part.end; base += kWarpElements) {
      const int e = Chunk::Element(base, 0);
      const QuantizedOctet<kWire> q = wire ? LoadQuantized<kWire>(wire, p.staging.scale_offset, e, part.end)
                                           : Quantize<kWire>(Widen(LoadOctet(own, e, part.end, false)), p.ue8m0);
      const RawOctet<X> raw = DequantizeTo<X, kWire>(q);
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
    for (int base = part.begin; base < part.end; base += Chunk::kElements) {
      const Chunk chunk = QuantizeChunk(p, Row(p, token), base, part.end);
      targets.ForEach([&](char* wire) { chunk.Store(wire, p.staging.scale_offset, base, part.end); });
    }
  }
  __device__ static void PlaceStaged(const DispatchParams& p, const char* wire_row, Range part, const Rows& rows) {
    if (!Whole(p)) return PlaceOctets(p, wire_row, nullptr, part, rows);
    for (int base = part.begin; base < part.end; base += Chunk::kElements) {
      PlaceChunk(p, LoadChunk(p, wire_row, base, part.end), base, part.end, rows);
    }
  }
  __device__ static void PlaceOwn(const DispatchParams& p, int token, Range part, const Rows& rows) {
    if (!Whole(p)) return PlaceOctets(p, nullptr, Row(p, token), part, rows);
    for (int base = part.begin; base < part.end; base += Chunk::kElements) {
      PlaceChunk(p, QuantizeChunk(p, Row(p, token), base, part.end), base, part.end, rows);
    }
  }
};

}  // namespace xen_moe::XEN_MOE_VARIANT
