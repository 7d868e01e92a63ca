// Combine for groups of more than kNarrowRanks ranks (rank_mask.cuh): any dtype and wire, by the kernels that take
// every hidden size and two axes. bf16 rows, and bf16 rows with an fp8 wire, have the quicker ones too.
#include "wide_rank_mask.cuh"

// Behind it:
#include "combine.cuh"
#include "wide_launch.h"

namespace XEN_MOE_KERNELS {
namespace {

template <class Y>
int LaunchWire(const CombineParams& p, cudaStream_t stream) {
  switch (p.wire) {
    case WireType::kNative:
      return LaunchCombineKernel<Y, WireType::kNative, true>(p, stream);
    case WireType::kFp8:
      return LaunchCombineKernel<Y, WireType::kFp8, true>(p, stream);
    default:
      return LaunchCombineKernel<Y, WireType::kInt8, true>(p, stream);
  }
}
template <class Y>
int PreloadWire() {
  if (int e = PreloadCombineKernel<Y, WireType::kNative, true>()) return e;
  if (int e = PreloadCombineKernel<Y, WireType::kFp8, true>()) return e;
  return PreloadCombineKernel<Y, WireType::kInt8, true>();
}

}  // namespace

int LaunchCombine(const CombineParams& p, cudaStream_t stream) {
  if (!kRings && p.schedule.low_latency) return wide::LaunchLowLatencyCombine(p, stream);
  if (!kRings && p.staging.ring_tokens > 0) return rings::LaunchCombine(p, stream);
  const bool general = p.routing.ranks_per_node != p.routing.ranks || p.routing.hidden % kOctet != 0;
  switch (p.element) {
    case Element::kBf16:
      if (!general && p.wire == WireType::kNative) {
        return LaunchCombineKernel<__nv_bfloat16, WireType::kNative, false>(p, stream);
      }
      if (!general && p.wire == WireType::kFp8) {
        return LaunchCombineKernel<__nv_bfloat16, WireType::kFp8, false>(p, stream);
      }
      return LaunchWire<__nv_bfloat16>(p, stream);
    case Element::kF16:
      return LaunchWire<__half>(p, stream);
    case Element::kF32:
      return LaunchWire<float>(p, stream);
    default:
      return cudaErrorInvalidValue;
  }
}
int PreloadCombine() {
  if (int e = PreloadCombineKernel<__nv_bfloat16, WireType::kNative, false>()) return e;
  if (int e = PreloadCombineKernel<__nv_bfloat16, WireType::kFp8, false>()) return e;
  if (int e = PreloadWire<__nv_bfloat16>()) return e;
  if (int e = PreloadWire<__half>()) return e;
  return PreloadWire<float>();
}

}  // namespace XEN_MOE_KERNELS
