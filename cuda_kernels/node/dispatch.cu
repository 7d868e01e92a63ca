// Dispatch across nodes over one link (link.cuh): any dtype and wire that a dispatch within a node takes. Rows that are
// no multiple of 16 bytes go byte by byte: each further width would take its compile time for every link.
#include "cuda_kernels/dispatch/quantize_codec.cuh"
#include "cuda_kernels/node/dispatch.cuh"
#include "cuda_kernels/node/link.cuh"

namespace xen_moe::XEN_MOE_VARIANT::XEN_MOE_LINK {
namespace {

template <WireType kWire>
int LaunchWire(const DispatchParams& p, const RailParams& rails, const Link& link, cudaStream_t stream) {
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

template <WireType kWire>
int PreloadWire() {
  if (int e = PreloadNodeDispatch<QuantizeCodec<__nv_bfloat16, kWire>, Link>()) return e;
  if (int e = PreloadNodeDispatch<QuantizeCodec<__half, kWire>, Link>()) return e;
  return PreloadNodeDispatch<QuantizeCodec<float, kWire>, Link>();
}

}  // namespace

int LaunchDispatch(const DispatchParams& p, const RailParams& rails, const Site& site, cudaStream_t stream) {
  const Link link = LinkOf(site, p.routing.rank);
  if (p.wire == WireType::kFp8) return LaunchWire<WireType::kFp8>(p, rails, link, stream);
  if (p.wire == WireType::kInt8) return LaunchWire<WireType::kInt8>(p, rails, link, stream);
  if (p.wire == WireType::kMxfp4) return LaunchWire<WireType::kMxfp4>(p, rails, link, stream);
  const int64_t row_bytes = static_cast<int64_t>(p.routing.hidden) * ElementBytes(p.element);
  if (row_bytes % 16 == 0) return LaunchNodeDispatch<CopyCodec<int4>>(p, rails, link, stream);
  return LaunchNodeDispatch<CopyCodec<unsigned char>>(p, rails, link, stream);
}
int PreloadDispatch() {
  if (int e = PreloadNodeDispatch<CopyCodec<int4>, Link>()) return e;
  if (int e = PreloadNodeDispatch<CopyCodec<unsigned char>, Link>()) return e;
  if (int e = PreloadWire<WireType::kFp8>()) return e;
  if (int e = PreloadWire<WireType::kInt8>()) return e;
  return PreloadWire<WireType::kMxfp4>();
}

}  // namespace xen_moe::XEN_MOE_VARIANT::XEN_MOE_LINK
