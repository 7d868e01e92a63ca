// Chooses the dispatch kernel across nodes for a link: any dtype and wire that a dispatch within a node takes. Rows
// that are no multiple of 16 bytes go byte by byte: each further width would take its compile time for every link.
#pragma once

#include "node_dispatch.cuh"
#include "quantize_codec.cuh"

namespace XEN_MOE_KERNELS {

template <WireType kWire, class Link>
int LaunchNodeDispatchWire(const DispatchParams& p, const RailParams& rails, const Link& link, cudaStream_t stream) {
  switch (p.element) {
    case Element::kBf16:
      return LaunchNodeDispatch<QuantizeCodec<__nv_bfloat16, kWire>>(p, rails, link, stream);
    case Element::kF16:
      return LaunchNodeDispatch<QuantizeCodec<__half, kWire>>(p, rails, link, stream);
    case Element::kF32:
      return LaunchNodeDispatch<QuantizeCodec<float, kWire>>(p, rails, link, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

// A cudaError_t.
template <class Link>
int LaunchAnyNodeDispatch(const DispatchParams& p, const RailParams& rails, const Link& link, cudaStream_t stream) {
  if (p.wire == WireType::kFp8) return LaunchNodeDispatchWire<WireType::kFp8>(p, rails, link, stream);
  if (p.wire == WireType::kInt8) return LaunchNodeDispatchWire<WireType::kInt8>(p, rails, link, stream);
  const int64_t row_bytes = static_cast<int64_t>(p.routing.hidden) * ElementBytes(p.element);
  if (row_bytes % 16 == 0) return LaunchNodeDispatch<CopyCodec<int4>>(p, rails, link, stream);
  return LaunchNodeDispatch<CopyCodec<unsigned char>>(p, rails, link, stream);
}

template <WireType kWire, class Link>
int PreloadNodeDispatchWire() {
  if (int e = PreloadNodeDispatch<QuantizeCodec<__nv_bfloat16, kWire>, Link>()) return e;
  if (int e = PreloadNodeDispatch<QuantizeCodec<__half, kWire>, Link>()) return e;
  return PreloadNodeDispatch<QuantizeCodec<float, kWire>, Link>();
}
// Loads all of them on the current device. A cudaError_t.
template <class Link>
int PreloadAnyNodeDispatch() {
  if (int e = PreloadNodeDispatch<CopyCodec<int4>, Link>()) return e;
  if (int e = PreloadNodeDispatch<CopyCodec<unsigned char>, Link>()) return e;
  if (int e = PreloadNodeDispatchWire<WireType::kFp8, Link>()) return e;
  return PreloadNodeDispatchWire<WireType::kInt8, Link>();
}

}  // namespace XEN_MOE_KERNELS
