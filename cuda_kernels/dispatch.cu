// Dispatch of rows that travel as they are. The vector is as wide as the row's byte count allows.
#include "dispatch.cuh"
#include "wide_launch.h"

namespace xen_moe {

int LaunchLowLatencyDispatch(const DispatchParams& p, cudaStream_t stream);  // low_latency_dispatch.cu

int LaunchDispatch(const DispatchParams& p, cudaStream_t stream) {
  if (p.routing.ranks > kNarrowRanks) return wide::LaunchDispatch(p, stream);
  if (p.schedule.low_latency) return LaunchLowLatencyDispatch(p, stream);
  if (p.wire != WireType::kNative) return LaunchQuantizedDispatch(p, stream);
  const int64_t row_bytes = static_cast<int64_t>(p.routing.hidden) * ElementBytes(p.element);
  if (row_bytes % 16 == 0 && p.schedule.bulk) return LaunchBulkDispatch(p, stream);
  if (row_bytes % 16 == 0) return LaunchWith<CopyCodec<int4>>(p, stream);
  if (row_bytes % 4 == 0) return LaunchWith<CopyCodec<unsigned int>>(p, stream);
  if (row_bytes % 2 == 0) return LaunchWith<CopyCodec<unsigned short>>(p, stream);
  return LaunchWith<CopyCodec<unsigned char>>(p, stream);
}

int PreloadDispatch() {
  if (int e = Preload<CopyCodec<int4>>()) return e;
  if (int e = Preload<CopyCodec<unsigned int>>()) return e;
  if (int e = Preload<CopyCodec<unsigned short>>()) return e;
  if (int e = Preload<CopyCodec<unsigned char>>()) return e;
  if (int e = PreloadBulkDispatch()) return e;
  return PreloadQuantizedDispatch();
}

uint64_t DispatchScratchBytes(const Routing& routing, const Schedule& schedule) {
  const LayoutScratch scratch = MakeScratch(nullptr, routing, schedule);
  return reinterpret_cast<uint64_t>(scratch.totals + scratch.columns);
}

uint64_t SoloLayoutBytes(const Routing& routing, const Schedule& schedule) {
  const LayoutScratch scratch = MakeScratch(nullptr, routing, schedule);
  return reinterpret_cast<uint64_t>(scratch.totals + (2 + kWarps) * static_cast<int64_t>(scratch.columns));
}
uint64_t SoloLayoutLimit() { return kLayoutSharedBytes; }

}  // namespace xen_moe
