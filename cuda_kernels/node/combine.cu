// Combine across nodes over one link (link.cuh): any dtype and wire that a combine within a node takes.
#include "cuda_kernels/node/combine.cuh"
#include "cuda_kernels/node/link.cuh"

namespace xen_moe::XEN_MOE_VARIANT::XEN_MOE_LINK {
namespace {

template <class Y>
int LaunchOf(const CombineParams& p, const RailParams& rails, const Link& link, cudaStream_t stream) {
  switch (p.wire) {
    case WireType::kNative:
      return LaunchNodeCombine<Y, WireType::kNative>(p, rails, link, stream);
    case WireType::kFp8:
      return LaunchNodeCombine<Y, WireType::kFp8>(p, rails, link, stream);
    case WireType::kInt8:
      return LaunchNodeCombine<Y, WireType::kInt8>(p, rails, link, stream);
    default:
      return LaunchNodeCombine<Y, WireType::kMxfp4>(p, rails, link, stream);
  }
}
template <class Y>
int PreloadOf() {
  if (int e = PreloadNodeCombine<Y, WireType::kNative, Link>()) return e;
  if (int e = PreloadNodeCombine<Y, WireType::kFp8, Link>()) return e;
  if (int e = PreloadNodeCombine<Y, WireType::kInt8, Link>()) return e;
  return PreloadNodeCombine<Y, WireType::kMxfp4, Link>();
}

}  // namespace

int LaunchCombine(const CombineParams& p, const RailParams& rails, const Site& site, cudaStream_t stream) {
  const Link link = LinkOf(site, p.routing.rank);
  switch (p.element) {
    case Element::kBf16:
      return LaunchOf<__nv_bfloat16>(p, rails, link, stream);
    case Element::kF16:
      return LaunchOf<__half>(p, rails, link, stream);
    case Element::kF32:
      return LaunchOf<float>(p, rails, link, stream);
    default:
      return cudaErrorInvalidValue;
  }
}
int PreloadCombine() {
  if (int e = PreloadOf<__nv_bfloat16>()) return e;
  if (int e = PreloadOf<__half>()) return e;
  return PreloadOf<float>();
}

}  // namespace xen_moe::XEN_MOE_VARIANT::XEN_MOE_LINK
