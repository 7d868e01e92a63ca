// Dispatch of float rows that travel as fp8, int8 or MXFP4 and arrive in their own dtype.
#include "cuda_kernels/dispatch/dispatch.cuh"
#include "cuda_kernels/dispatch/quantize_codec.cuh"

namespace xen_moe::XEN_MOE_VARIANT {
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

int LaunchQuantizedDispatch(const DispatchParams& p, cudaStream_t stream) {
  switch (p.wire) {
    case WireType::kFp8:
      return LaunchWire<WireType::kFp8>(p, stream);
    case WireType::kInt8:
      return LaunchWire<WireType::kInt8>(p, stream);
    default:
      return LaunchWire<WireType::kMxfp4>(p, stream);
  }
}
int PreloadQuantizedDispatch() {
  if (int e = PreloadWire<WireType::kFp8>()) return e;
  if (int e = PreloadWire<WireType::kInt8>()) return e;
  return PreloadWire<WireType::kMxfp4>();
}

}  // namespace xen_moe::XEN_MOE_VARIANT
