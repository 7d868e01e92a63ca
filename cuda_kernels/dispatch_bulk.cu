// Dispatch of rows that travel as they are and are placed by bulk copies: in flight, on few SMs.
#include "bulk_place.cuh"
#include "load_kernel.cuh"

namespace xen_moe {
namespace {

constexpr int kSharedBytes = kLayoutSharedBytes + kBulkSharedBytes;

// Whether the current device has bulk copies, and the shared memory for them.
bool HasBulkCopies() {
  int device = 0, major = 0, shared = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess &&
         major >= 9 && shared >= kSharedBytes + 16 * 1024;  // and what a block has besides
}

}  // namespace

int LaunchBulkDispatch(const DispatchParams& p, cudaStream_t stream) {
  if (HasBulkCopies()) return LaunchWith<BulkCodec>(p, stream, kSharedBytes);
  return LaunchWith<CopyCodec<int4>>(p, stream);
}

int PreloadBulkDispatch() {
  if (!HasBulkCopies()) return cudaSuccess;
  return LoadKernel(DispatchKernel<BulkCodec>, kSharedBytes);
}

}  // namespace xen_moe
