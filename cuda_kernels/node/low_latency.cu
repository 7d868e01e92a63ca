// Dispatch and combine of small batches across nodes over one link (link.cuh), and the link's kernel table.
#include "cuda_kernels/node/link.cuh"
#include "cuda_kernels/node/low_latency_combine.cuh"
#include "cuda_kernels/node/low_latency_dispatch.cuh"

namespace xen_moe::XEN_MOE_VARIANT::XEN_MOE_LINK {

int LaunchDispatch(const DispatchParams& p, const RailParams& rails, const Site& site, cudaStream_t stream);
int PreloadDispatch();  // dispatch.cu
int LaunchCombine(const CombineParams& p, const RailParams& rails, const Site& site, cudaStream_t stream);
int PreloadCombine();  // combine.cu

namespace {

int AnyDispatch(const DispatchParams& p, const RailParams& rails, const Site& site, cudaStream_t stream) {
  if (!p.schedule.low_latency) return LaunchDispatch(p, rails, site, stream);
  return LaunchNodeLowLatencyDispatch(p, rails, LinkOf(site, p.routing.rank), stream);
}
int AnyCombine(const CombineParams& p, const RailParams& rails, const Site& site, cudaStream_t stream) {
  if (!p.schedule.low_latency) return LaunchCombine(p, rails, site, stream);
  return LaunchNodeLowLatencyCombine(p, rails, LinkOf(site, p.routing.rank), stream);
}
int Preload() {
  if (int e = PreloadDispatch()) return e;
  if (int e = PreloadCombine()) return e;
  if (int e = PreloadNodeLowLatencyDispatch<Link>()) return e;
  return PreloadNodeLowLatencyCombine<Link>();
}

}  // namespace

const NodeKernelTable<Site> kKernels = {AnyDispatch, AnyCombine, Preload};

}  // namespace xen_moe::XEN_MOE_VARIANT::XEN_MOE_LINK
