// Chooses the translation unit that holds a kernel, and loads them all.
#include "params.h"
#include "wide_launch.h"

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
  if (p.routing.ranks > kNarrowRanks) return wide::LaunchCombine(p, stream);
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

int PreloadWideKernels() {
  if (int e = wide::PreloadDispatch()) return e;
  if (int e = wide::PreloadCombine()) return e;
  if (int e = wide::PreloadLowLatencyDispatch()) return e;
  if (int e = wide::PreloadLowLatencyCombine()) return e;
  if (int e = wide::PreloadExchange()) return e;
  if (int e = rings::PreloadDispatch()) return e;
  return rings::PreloadCombine();
}

}  // namespace xen_moe
