// The element types of a low-latency combine.
#include "low_latency_combine.cuh"

namespace XEN_MOE_KERNELS {

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

}  // namespace XEN_MOE_KERNELS

#ifdef XEN_MOE_PHASES
namespace XEN_MOE_KERNELS {
int ReadCombinePhases(uint64_t* to) { return ReadPhases(to); }
}  // namespace XEN_MOE_KERNELS
#endif
