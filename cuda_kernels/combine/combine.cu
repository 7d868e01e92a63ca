// Combine of rows of one element type, XEN_MOE_ELEMENT: __nv_bfloat16, __half or float. A translation unit for each, so
// that they compile side by side.
#include <type_traits>

#include "cuda_kernels/combine/alone.cuh"
#include "cuda_kernels/combine/combine.cuh"
#include "cuda_kernels/combine/home.cuh"

namespace xen_moe::XEN_MOE_VARIANT {
namespace {

// True if a faster kernel exists for rows of a multiple of kOctet elements within one node. Large groups have it only
// for bf16 rows on a native, fp8 or MXFP4 wire: each further kernel adds compile time.
template <class Y, WireType kWire>
constexpr bool kHasFast = !kLargeGroups || (std::is_same_v<Y, __nv_bfloat16> && kWire != WireType::kInt8);

template <class Y, bool kGeneral>
int RingBytes() {
  return kWarps * RingStages() * RowStream<Y, StepsOf<Y>(kGeneral)>::kChunkBytes;
}

template <class Y, WireType kWire, bool kGeneral>
int LaunchCombineKernel(const CombineParams& p, cudaStream_t stream) {
  if (Unfit(p) || p.routing.ranks > kRanks || kRings != (p.staging.ring_tokens > 0)) return cudaErrorInvalidValue;
  return LaunchEarly(CombineKernel<Y, kWire, kGeneral>, p.schedule.blocks, RingBytes<Y, kGeneral>(), stream, p);
}
template <class Y, WireType kWire>
int LaunchWire(const CombineParams& p, cudaStream_t stream) {
  if constexpr (kHasFast<Y, kWire>) {
    const bool general = p.routing.ranks_per_node != p.routing.ranks || p.routing.hidden % kOctet != 0;
    if (!general) return LaunchCombineKernel<Y, kWire, false>(p, stream);
  }
  return LaunchCombineKernel<Y, kWire, true>(p, stream);
}
template <class Y, WireType kWire>
int PreloadWire() {
  if constexpr (kHasFast<Y, kWire>) {
    if (int e = LoadKernel(CombineKernel<Y, kWire, false>, RingBytes<Y, false>())) return e;
  }
  return LoadKernel(CombineKernel<Y, kWire, true>, RingBytes<Y, true>());
}

// Small groups alone combine by home.
template <class Y>
int LaunchByHome(const CombineParams& p, cudaStream_t stream) {
  if constexpr (kLargeGroups) {
    return cudaErrorInvalidValue;
  } else {
    if (Unfit(p) || p.routing.ranks > kRanks) return cudaErrorInvalidValue;
    return Launch(HomeCombineKernel<Y>, p.schedule.blocks, kThreads, RingBytes<Y, false>(), stream, p);
  }
}

}  // namespace

template <class Y>
int LaunchCombineOf(const CombineParams& p, cudaStream_t stream) {
  if (p.by_home) return LaunchByHome<Y>(p, stream);
  if constexpr (!kLargeGroups) {
    if (RunsAlone(p)) return LaunchAloneCombine<Y>(p, stream);
  }
  switch (p.wire) {
    case WireType::kNative:
      return LaunchWire<Y, WireType::kNative>(p, stream);
    case WireType::kFp8:
      return LaunchWire<Y, WireType::kFp8>(p, stream);
    case WireType::kInt8:
      return LaunchWire<Y, WireType::kInt8>(p, stream);
    default:
      return LaunchWire<Y, WireType::kMxfp4>(p, stream);
  }
}
template <class Y>
int PreloadCombineOf() {
  if constexpr (!kLargeGroups) {
    if (int e = LoadKernel(HomeCombineKernel<Y>, RingBytes<Y, false>())) return e;
    if (int e = LoadKernel(AloneCombineKernel<Y>)) return e;
  }
  if (int e = PreloadWire<Y, WireType::kNative>()) return e;
  if (int e = PreloadWire<Y, WireType::kFp8>()) return e;
  if (int e = PreloadWire<Y, WireType::kInt8>()) return e;
  return PreloadWire<Y, WireType::kMxfp4>();
}
template int LaunchCombineOf<XEN_MOE_ELEMENT>(const CombineParams& p, cudaStream_t stream);
template int PreloadCombineOf<XEN_MOE_ELEMENT>();

}  // namespace xen_moe::XEN_MOE_VARIANT
