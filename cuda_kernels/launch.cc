// Chooses the translation unit that holds a kernel, and loads them all.
#include "params.h"

namespace xen_moe {

int LaunchCombineBf16(const CombineParams&, cudaStream_t);
int LaunchCombineF16(const CombineParams&, cudaStream_t);
int LaunchCombineF32(const CombineParams&, cudaStream_t);
int PreloadCombineBf16();
int PreloadCombineF16();
int PreloadCombineF32();
int PreloadDispatch();
int PreloadExchange();
int LaunchLowLatencyCombine(const CombineParams&, cudaStream_t);
int PreloadLowLatencyCombine();
int PreloadLowLatencyDispatch();

int LaunchCombine(const CombineParams& p, cudaStream_t stream) {
  if (p.schedule.low_latency) return LaunchLowLatencyCombine(p, stream);
  switch (p.element) {
    case Element::kBf16:
      return LaunchCombineBf16(p, stream);
    case Element::kF16:
      return LaunchCombineF16(p, stream);
    case Element::kF32:
      return LaunchCombineF32(p, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

int PreloadKernels() {
  if (int e = PreloadDispatch()) return e;
  if (int e = PreloadCombineBf16()) return e;
  if (int e = PreloadCombineF16()) return e;
  if (int e = PreloadCombineF32()) return e;
  if (int e = PreloadLowLatencyDispatch()) return e;
  if (int e = PreloadLowLatencyCombine()) return e;
  return PreloadExchange();
}

}  // namespace xen_moe
