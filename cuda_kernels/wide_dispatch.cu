// Dispatch for groups of more than kNarrowRanks ranks (rank_mask.cuh): any dtype, layout and wire. Rows that are no
// multiple of 16 bytes go byte by byte: each further width would take its compile time.
#include "wide_rank_mask.cuh"

// Behind it:
#include "quantized_launch.cuh"
#include "wide_launch.h"

namespace XEN_MOE_KERNELS {

int LaunchDispatch(const DispatchParams& p, cudaStream_t stream) {
  if (!kRings && p.schedule.low_latency) return wide::LaunchLowLatencyDispatch(p, stream);
  if (!kRings && p.staging.ring_tokens > 0) return rings::LaunchDispatch(p, stream);
  if (p.wire == WireType::kFp8) return LaunchWire<WireType::kFp8>(p, stream);
  if (p.wire == WireType::kInt8) return LaunchWire<WireType::kInt8>(p, stream);
  const int64_t row_bytes = static_cast<int64_t>(p.routing.hidden) * ElementBytes(p.element);
  if (row_bytes % 16 == 0) return LaunchWith<CopyCodec<int4>>(p, stream);
  return LaunchWith<CopyCodec<unsigned char>>(p, stream);
}
int PreloadDispatch() {
  if (int e = Preload<CopyCodec<int4>>()) return e;
  if (int e = Preload<CopyCodec<unsigned char>>()) return e;
  if (int e = PreloadWire<WireType::kFp8>()) return e;
  return PreloadWire<WireType::kInt8>();
}

}  // namespace XEN_MOE_KERNELS
