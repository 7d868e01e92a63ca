// Launches of a dispatch of float rows that travel as fp8 or int8, for the element types that do.
#pragma once

#include "dispatch.cuh"
#include "quantize_codec.cuh"

namespace XEN_MOE_KERNELS {
namespace {

template <WireType kWire>
int LaunchWire(const DispatchParams& p, cudaStream_t stream) {
  switch (p.element) {
    case Element::kBf16:
      return LaunchWith<QuantizeCodec<__nv_bfloat16, kWire>>(p, stream);
    case Element::kF16:
      return LaunchWith<QuantizeCodec<__half, kWire>>(p, stream);
    case Element::kF32:
      return LaunchWith<QuantizeCodec<float, kWire>>(p, stream);
    default:
      return cudaErrorInvalidValue;
  }
}
template <WireType kWire>
int PreloadWire() {
  if (int e = Preload<QuantizeCodec<__nv_bfloat16, kWire>>()) return e;
  if (int e = Preload<QuantizeCodec<__half, kWire>>()) return e;
  return Preload<QuantizeCodec<float, kWire>>();
}

}  // namespace
}  // namespace XEN_MOE_KERNELS
