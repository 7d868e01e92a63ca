// The kernel table of a variant: compiled once for each (variants.txt).
#include "cuda_kernels/kernels.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda_kernels/core/variant.h"

namespace xen_moe::XEN_MOE_VARIANT {

int LaunchCopyDispatch(const DispatchParams& p, cudaStream_t stream);  // dispatch/dispatch.cu
int PreloadCopyDispatch();
int LaunchQuantizedDispatch(const DispatchParams& p, cudaStream_t stream);  // dispatch/dispatch_quantized.cu
int PreloadQuantizedDispatch();
template <class Y>
int LaunchCombineOf(const CombineParams& p, cudaStream_t stream);  // combine/combine.cu, once for each element type
template <class Y>
int PreloadCombineOf();
int LaunchRingExchange(const ExchangeParams& p, cudaStream_t stream);  // exchange/exchange.cu
int PreloadRingExchange();
int LaunchRingGather(const ExchangeParams& p, cudaStream_t stream);  // exchange/gather.cu
int LaunchPoison(const Mailbox* mailbox, char* out, uint64_t bytes, uint8_t poison, cudaStream_t stream);
int PreloadRingGather();
int LaunchLowLatencyGather(const ExchangeParams& p, cudaStream_t stream);  // low_latency/gather.cu
int PreloadLowLatencyGather();
int LaunchLowLatencyDispatch(const DispatchParams& p, cudaStream_t stream);  // low_latency/dispatch.cu
int PreloadLowLatencyDispatch();
int LaunchLowLatencyCombine(const CombineParams& p, cudaStream_t stream);  // low_latency/combine.cu
int PreloadLowLatencyCombine();

namespace {

int Dispatch(const DispatchParams& p, cudaStream_t stream) {
#ifndef XEN_MOE_RINGS
  if (p.schedule.low_latency) return LaunchLowLatencyDispatch(p, stream);
#endif
  return p.wire == WireType::kNative ? LaunchCopyDispatch(p, stream) : LaunchQuantizedDispatch(p, stream);
}

int Combine(const CombineParams& p, cudaStream_t stream) {
#ifndef XEN_MOE_RINGS
  if (p.schedule.low_latency) return LaunchLowLatencyCombine(p, stream);
#endif
  switch (p.element) {
    case Element::kBf16:
      return LaunchCombineOf<__nv_bfloat16>(p, stream);
    case Element::kF16:
      return LaunchCombineOf<__half>(p, stream);
    case Element::kF32:
      return LaunchCombineOf<float>(p, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

#ifndef XEN_MOE_RINGS
int Exchange(const ExchangeParams& p, cudaStream_t stream) {
  if (p.low_latency) return LaunchLowLatencyGather(p, stream);
  return p.gather ? LaunchRingGather(p, stream) : LaunchRingExchange(p, stream);
}
#endif

int Preload() {
  if (int e = PreloadCopyDispatch()) return e;
  if (int e = PreloadQuantizedDispatch()) return e;
  if (int e = PreloadCombineOf<__nv_bfloat16>()) return e;
  if (int e = PreloadCombineOf<__half>()) return e;
  if (int e = PreloadCombineOf<float>()) return e;
#ifdef XEN_MOE_RINGS
  return cudaSuccess;
#else
  if (int e = PreloadLowLatencyDispatch()) return e;
  if (int e = PreloadLowLatencyCombine()) return e;
  if (int e = PreloadLowLatencyGather()) return e;
  if (int e = PreloadRingGather()) return e;
  return PreloadRingExchange();
#endif
}

}  // namespace

#ifdef XEN_MOE_RINGS
const KernelTable kKernels = {Dispatch, Combine, nullptr, nullptr, Preload};
#else
const KernelTable kKernels = {Dispatch, Combine, Exchange, LaunchPoison, Preload};
#endif

}  // namespace xen_moe::XEN_MOE_VARIANT
