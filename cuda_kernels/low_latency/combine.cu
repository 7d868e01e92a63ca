// The element types of a low-latency combine.
#include "cuda_kernels/low_latency/combine.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

int LaunchLowLatencyCombine(const CombineParams& p, cudaStream_t stream) {
  switch (p.element) {
    case Element::kBf16:
      return LaunchLowLatencyCombineOf<__nv_bfloat16>(p, stream);
    case Element::kF16:
      return LaunchLowLatencyCombineOf<__half>(p, stream);
    case Element::kF32:
      return LaunchLowLatencyCombineOf<float>(p, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

int PreloadLowLatencyCombine() {
  if (int e = PreloadLowLatencyCombineOf<__nv_bfloat16>()) return e;
  if (int e = PreloadLowLatencyCombineOf<__half>()) return e;
  return PreloadLowLatencyCombineOf<float>();
}

}  // namespace xen_moe::XEN_MOE_VARIANT
