// Chooses the combine kernel across nodes for a link: any dtype and wire that a combine within a node takes.
#pragma once

#include "node_combine.cuh"

namespace XEN_MOE_KERNELS {

template <class Y, class Link>
int LaunchNodeCombineOf(const CombineParams& p, const RailParams& rails, const Link& link, cudaStream_t stream) {
  switch (p.wire) {
    case WireType::kNative:
      return LaunchNodeCombine<Y, WireType::kNative>(p, rails, link, stream);
    case WireType::kFp8:
      return LaunchNodeCombine<Y, WireType::kFp8>(p, rails, link, stream);
    default:
      return LaunchNodeCombine<Y, WireType::kInt8>(p, rails, link, stream);
  }
}
// A cudaError_t.
template <class Link>
int LaunchAnyNodeCombine(const CombineParams& p, const RailParams& rails, const Link& link, cudaStream_t stream) {
  switch (p.element) {
    case Element::kBf16:
      return LaunchNodeCombineOf<__nv_bfloat16>(p, rails, link, stream);
    case Element::kF16:
      return LaunchNodeCombineOf<__half>(p, rails, link, stream);
    case Element::kF32:
      return LaunchNodeCombineOf<float>(p, rails, link, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

template <class Y, class Link>
int PreloadNodeCombineOf() {
  if (int e = PreloadNodeCombine<Y, WireType::kNative, Link>()) return e;
  if (int e = PreloadNodeCombine<Y, WireType::kFp8, Link>()) return e;
  return PreloadNodeCombine<Y, WireType::kInt8, Link>();
}
// Loads all of them on the current device. A cudaError_t.
template <class Link>
int PreloadAnyNodeCombine() {
  if (int e = PreloadNodeCombineOf<__nv_bfloat16, Link>()) return e;
  if (int e = PreloadNodeCombineOf<__half, Link>()) return e;
  return PreloadNodeCombineOf<float, Link>();
}

}  // namespace XEN_MOE_KERNELS
