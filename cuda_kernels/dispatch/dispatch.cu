// Dispatch of rows that travel unchanged. The vector is as wide as the row's byte count allows.
#include "cuda_kernels/dispatch/alone.cuh"
#include "cuda_kernels/dispatch/bulk_place.cuh"
#include "cuda_kernels/dispatch/dispatch.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

#if XEN_MOE_MAX_RANKS == 16

namespace {

constexpr int kBulkDispatchBytes = kLayoutSharedBytes + kBulkSharedBytes;

// Returns whether the current device has bulk copies, and the shared memory for them.
bool HasBulkCopies() {
  int device = 0, major = 0, shared = 0;
  return Taken(cudaGetDevice(&device)) == cudaSuccess &&
         Taken(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) == cudaSuccess &&
         Taken(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) == cudaSuccess &&
         major >= 9 && shared >= kBulkDispatchBytes + 16 * 1024;  // the rest is for the block's static arrays
}

}  // namespace

int LaunchCopyDispatch(const DispatchParams& p, cudaStream_t stream) {
  if (RunsAlone(p, p.scales != nullptr)) return LaunchAloneDispatch(p, stream);
  const int64_t row_bytes = static_cast<int64_t>(p.routing.hidden) * ElementBytes(p.element);
  if (row_bytes % 16 == 0 && p.schedule.bulk && HasBulkCopies()) {
    return LaunchWith<BulkCodec>(p, stream, kBulkDispatchBytes);
  }
  if (row_bytes % 16 == 0) return LaunchWith<CopyCodec<int4>>(p, stream);
  if (row_bytes % 4 == 0) return LaunchWith<CopyCodec<unsigned int>>(p, stream);
  if (row_bytes % 2 == 0) return LaunchWith<CopyCodec<unsigned short>>(p, stream);
  return LaunchWith<CopyCodec<unsigned char>>(p, stream);
}

int PreloadCopyDispatch() {
  if (int e = LoadKernel(AloneDispatchKernel, kLayoutSharedBytes)) return e;
  if (int e = Preload<CopyCodec<int4>>()) return e;
  if (int e = Preload<CopyCodec<unsigned int>>()) return e;
  if (int e = Preload<CopyCodec<unsigned short>>()) return e;
  if (int e = Preload<CopyCodec<unsigned char>>()) return e;
  return HasBulkCopies() ? LoadKernel(DispatchKernel<BulkCodec>, kBulkDispatchBytes) : cudaSuccess;
}

#else

// Large groups copy rows of a multiple of 16 bytes as vectors and all others byte by byte: each further width takes its
// compile time.
int LaunchCopyDispatch(const DispatchParams& p, cudaStream_t stream) {
  const int64_t row_bytes = static_cast<int64_t>(p.routing.hidden) * ElementBytes(p.element);
  if (row_bytes % 16 == 0) return LaunchWith<CopyCodec<int4>>(p, stream);
  return LaunchWith<CopyCodec<unsigned char>>(p, stream);
}
int PreloadCopyDispatch() {
  if (int e = Preload<CopyCodec<int4>>()) return e;
  return Preload<CopyCodec<unsigned char>>();
}

#endif

}  // namespace xen_moe::XEN_MOE_VARIANT
