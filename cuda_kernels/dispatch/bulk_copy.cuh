// Rows copied by the copy engine of an SM (cp.async.bulk, compute capability 9.0): one lane of a warp requests a chunk
// of a row into shared memory, and then copies of it to every destination. An SM moves twice as much in this way as
// through registers, so an asynchronous dispatch needs half of the SMs.
//
// Who waits for whom: a chunk's stores wait for its load (mbarrier); the next load into the same place waits until
// those stores have read it (bulk groups complete in order). Memory order: bulk copies use the async proxy. A staged
// row was written by a peer and acquired through its flag by this lane; a proxy fence comes between the flag and the
// load. All stores are complete before the block finishes the operation.
#pragma once

#include "cuda_kernels/core/row_codec.cuh"
#include "cuda_kernels/dispatch/layout.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

constexpr int kBulkChunk = 3584;  // bytes; a multiple of 128
constexpr int kBulkStages = 3;    // chunks of a warp in shared memory
constexpr int kBulkRows = 4;      // rows that a warp resolves together (bulk_place.cuh)

struct alignas(128) BulkRing {
  char chunk[kBulkStages][kBulkChunk];
  alignas(128) uint64_t arrived[kBulkStages];
  uint32_t loads;  // chunks requested so far
  // The current rows: where they and their scales lie, and which entries of the warp's list are their destinations.
  const char* from[kBulkRows];
  const float* scales[kBulkRows];
  int first[kBulkRows], count[kBulkRows];
};
// placed after the shared memory of the layout
constexpr int kBulkSharedBytes = kWarps * static_cast<int>(sizeof(BulkRing));

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void InitArrival(uint64_t* arrived) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(SharedAddress(arrived)) : "memory");
}
__device__ __forceinline__ void FenceAsyncProxy() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ void BulkLoad(void* to, const void* from, uint32_t bytes, uint64_t* arrived) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(arrived)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   SharedAddress(to)),
               "l"(from), "r"(bytes), "r"(SharedAddress(arrived))
               : "memory");
}
__device__ __forceinline__ void AwaitArrival(const uint64_t* arrived, uint32_t parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(SharedAddress(arrived)), "r"(parity)
                 : "memory");
  }
}
__device__ __forceinline__ void BulkStore(void* to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(SharedAddress(from)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void CommitStores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all but the newest `kGroups` groups of stores have read their chunks.
template <int kGroups>
__device__ __forceinline__ void AwaitStoresRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}
__device__ __forceinline__ void AwaitStores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
#endif

// Like CopyCodec<int4>, but placed rows go through shared memory.
struct BulkCodec : CopyCodec<int4> {
  __device__ __forceinline__ static BulkRing& Ring() {
    extern __shared__ __align__(128) int dynamic[];
    return reinterpret_cast<BulkRing*>(reinterpret_cast<char*>(dynamic) + kLayoutSharedBytes)[threadIdx.x / 32];
  }

  // All lanes call it. `from` and `bytes`: of the part of a row; the same part of every row of the list is written.
  __device__ __forceinline__ static void PlaceBytes(const char* from, int bytes, char* to, int64_t stride,
                                                    const Rows& rows) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if ((threadIdx.x & 31) == 0) {
      BulkRing& ring = Ring();
      const uint32_t first = ring.loads;
      const int chunks = (bytes + kBulkChunk - 1) / kBulkChunk;
      FenceAsyncProxy();
      auto load = [&](int i) {
        const uint32_t slot = (first + i) % kBulkStages;
        const int at = i * kBulkChunk;
        AwaitStoresRead<1>();
        BulkLoad(ring.chunk[slot], from + at, static_cast<uint32_t>(min(kBulkChunk, bytes - at)), &ring.arrived[slot]);
      };
      // Loads run two chunks ahead of the stores. The stores of the chunk that a load replaces have all been requested,
      // with at most one group after them.
      constexpr int kAhead = kBulkStages - 1;
      static_assert(kBulkStages == 3, "AwaitStoresRead counts on it");
      for (int i = 0; i < min(kAhead, chunks); ++i) load(i);
      for (int i = 0; i < chunks; ++i) {
        const uint32_t slot = (first + i) % kBulkStages;
        const int at = i * kBulkChunk;
        const uint32_t size = static_cast<uint32_t>(min(kBulkChunk, bytes - at));
        AwaitArrival(&ring.arrived[slot], (first + i) / kBulkStages & 1);
        for (int r = 0; r < rows.count; ++r) BulkStore(to + rows.list[r] * stride + at, ring.chunk[slot], size);
        CommitStores();
        if (i + kAhead < chunks) load(i + kAhead);
      }
      ring.loads = first + chunks;
    }
    __syncwarp();
#endif
  }
  __device__ __forceinline__ static void Place(const DispatchParams& p, const char* values, const float* scales,
                                               Range part, const Rows& rows) {
    const int element = p.element == Element::kF32 ? 4 : p.element == Element::kByte ? 1 : 2;
    const int first = part.begin * element, bytes = (part.end - part.begin) * element;
    const int64_t stride = static_cast<int64_t>(p.routing.hidden) * element;
    PlaceBytes(values + first, bytes, static_cast<char*>(p.rows) + first, stride, rows);
    PlaceScales(p, scales, part, rows);
  }
  __device__ static void PlaceStaged(const DispatchParams& p, const char* wire_row, Range part, const Rows& rows) {
    Place(p, wire_row, reinterpret_cast<const float*>(wire_row + p.staging.scale_offset), part, rows);
  }
  __device__ static void PlaceOwn(const DispatchParams& p, int token, Range part, const Rows& rows) {
    Place(p, reinterpret_cast<const char*>(Row(p, token)),
          p.scales + static_cast<int64_t>(token) * ScaleBlocks(p.routing.hidden), part, rows);
  }
};
__device__ __forceinline__ void BeginRows(BulkCodec*) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  if ((threadIdx.x & 31) == 0) {
    BulkRing& ring = BulkCodec::Ring();
    for (uint64_t& arrived : ring.arrived) InitArrival(&arrived);
    ring.loads = 0;
  }
#endif
}
__device__ __forceinline__ void EndRows(BulkCodec*) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  if ((threadIdx.x & 31) == 0) AwaitStores();
  __syncwarp();
#endif
}

}  // namespace xen_moe::XEN_MOE_VARIANT
