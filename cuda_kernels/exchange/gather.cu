// all_gather of large operands: this rank's rows to every other rank, through rings in the staging areas. With
// ExchangeParams::round, one round of it. low_latency/gather.cu gathers small operands.
//
// What moves: the operand is divided into chunks; lane j of `lanes` carries chunks j, j + lanes, ... to rank p. Who
// does it: a block has kBlockLanes lanes, with a warp that sends and a warp that receives for each. The sender copies
// chunks into ring slots at rank p and raises their flags; the receiver copies the chunks that p has sent on the same
// lane to the output and returns credits. While a warp waits for a fence or a flag, the block's other warps copy. Who
// waits for whom: a receiver waits for chunks, a sender for the credit of the chunk that used the slot before. In round
// k, rank r is paired with rank (k - r) mod R; blocks claim (round, lanes) in ascending order. So every wait ends, with
// any number of resident blocks: the smallest unfinished pair has been claimed by a running block on both its ranks,
// and each warp of the block waits only for the other rank's warp of the same lane. Memory order: as in dispatch.cuh;
// lane 0 of a warp acquires and releases for all of them, with __syncwarp between; a credit is released after the warp
// has read the slot. After a failed wait nothing more is stored at a peer.
#include "cuda_kernels/core/claims.cuh"
#include "cuda_kernels/core/launch.cuh"
#include "cuda_kernels/core/operation.cuh"

namespace xen_moe::XEN_MOE_VARIANT {
namespace {

constexpr int kBlockThreads = 2 * kBlockLanes * 32;  // the first half of the warps sends, the second receives

__device__ __forceinline__ bool Leads() { return (threadIdx.x & 31) == 0; }
// Evaluates `wait()` in lane 0, and returns its result to all lanes, which may then read the data that lane 0 has
// acquired.
template <class Wait>
__device__ __forceinline__ bool LeaderWaits(Wait wait) {
  bool good = true;
  if (Leads()) good = wait();
  __syncwarp();  // orders the other lanes' reads behind the flag
  return __shfl_sync(0xFFFFFFFFu, good, 0);
}

// All lanes of a warp call it: copies vectors of type Vec, and the bytes after the last whole vector one by one.
template <class Vec>
__device__ __forceinline__ void CopyVectors(char* to, const char* from, uint64_t bytes) {
  constexpr int kInFlight = 8;
  const Vec* src = reinterpret_cast<const Vec*>(from);
  Vec* dst = reinterpret_cast<Vec*>(to);
  const uint64_t n = bytes / sizeof(Vec);
  for (uint64_t base = threadIdx.x & 31; base < n; base += kInFlight * 32) {
    Vec v[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (base + i * 32 < n) v[i] = __ldcs(src + base + i * 32);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (base + i * 32 < n) dst[base + i * 32] = v[i];
    }
  }
  for (uint64_t b = n * sizeof(Vec) + (threadIdx.x & 31); b < bytes; b += 32) to[b] = from[b];
}
// All lanes of a warp call it: copies by the widest vectors that the alignment of both addresses allows.
__device__ __noinline__ void CopyBytes(char* to, const char* from, uint64_t bytes) {
  const uint64_t both = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from);
  if (both % 16 == 0) {
    CopyVectors<int4>(to, from, bytes);
  } else if (both % 4 == 0) {
    CopyVectors<unsigned int>(to, from, bytes);
  } else {
    CopyVectors<unsigned char>(to, from, bytes);
  }
}

struct Lane {
  uint32_t* chunk_flags;   // at the receiver, one for each chunk
  uint32_t* credit_flags;  // at the sender, one for each chunk
  char* ring;              // at the receiver, `ring_chunks` slots
};
// Returns lane `lane` from `source` to `target`; both ranks compute the same.
__device__ __forceinline__ Lane LaneOf(const ExchangeParams& p, const Running& run, int source, int target, int lane) {
  const uint64_t in = static_cast<uint64_t>(source) * p.lanes + lane,
                 out = static_cast<uint64_t>(target) * p.lanes + lane;
  return {reinterpret_cast<uint32_t*>(run.half[target] + p.chunk_flags) + in * p.max_chunks,
          reinterpret_cast<uint32_t*>(run.half[source] + p.credit_flags) + out * p.max_chunks,
          run.data[target] + p.ring + in * p.ring_chunks * p.chunk_bytes};
}

// One warp: sends one lane to `target`. Returns false if the group has failed.
__device__ __forceinline__ bool Send(const ExchangeParams& p, const Running& run, int target, int lane) {
  const uint32_t epoch = run.epoch;
  const Lane way = LaneOf(p, run, p.rank, target, lane);
  const uint64_t bytes = p.operand_units * p.unit_bytes;
  for (uint64_t n = 0; n < p.max_chunks; ++n) {
    const uint64_t begin = (n * p.lanes + lane) * p.chunk_bytes;
    if (begin >= bytes) break;
    if (n >= static_cast<uint64_t>(p.ring_chunks)) {
      const uint32_t* const credit = way.credit_flags + n - p.ring_chunks;
      if (!LeaderWaits([&] { return WaitFlag(credit, run, epoch, Step::kCredit, target); })) return false;
    }
    CopyBytes(way.ring + n % p.ring_chunks * p.chunk_bytes, p.operand + begin, min(p.chunk_bytes, bytes - begin));
    __syncwarp();
    if (Leads()) {
      FenceSystem();
      StoreRelaxedSystem(way.chunk_flags + n, epoch);
    }
  }
  return true;
}

// One warp: receives one lane from `source`. Returns false if the group has failed.
__device__ __forceinline__ bool Receive(const ExchangeParams& p, const Running& run, int source, int lane) {
  const uint32_t epoch = run.epoch;
  const Lane way = LaneOf(p, run, source, p.rank, lane);
  const uint64_t bytes = p.operand_units * p.unit_bytes;
  char* const to = p.output + static_cast<uint64_t>(source) * bytes;
  for (uint64_t n = 0; n < p.max_chunks; ++n) {
    const uint64_t begin = (n * p.lanes + lane) * p.chunk_bytes;
    if (begin >= bytes) break;
    if (!LeaderWaits([&] { return WaitFlag(way.chunk_flags + n, run, epoch, Step::kRows, source); })) return false;
    CopyBytes(to + begin, way.ring + n % p.ring_chunks * p.chunk_bytes, min(p.chunk_bytes, bytes - begin));
    __syncwarp();
    // Only credits that the sender awaits: any other might arrive when the sender is two operations ahead
    // (workspace.h).
    if (Leads() && begin + p.ring_chunks * p.lanes * p.chunk_bytes < bytes) {
      FenceSystem();
      StoreRelaxedSystem(way.credit_flags + n, epoch);
    }
  }
  return true;
}

// One warp: copies the chunks that one lane has of this rank's own rows to the output.
__device__ __forceinline__ void CopyOwn(const ExchangeParams& p, int lane) {
  const uint64_t bytes = p.operand_units * p.unit_bytes;
  char* const to = p.output + static_cast<uint64_t>(p.rank) * bytes;
  for (uint64_t begin = lane * p.chunk_bytes; begin < bytes; begin += p.lanes * p.chunk_bytes) {
    CopyBytes(to + begin, p.operand + begin, min(p.chunk_bytes, bytes - begin));
  }
}

__global__ void __launch_bounds__(kBlockThreads, 1) GatherKernel(const __grid_constant__ ExchangeParams p) {
  __shared__ Running run;
  BeginOperation(run, p.call, Operation::kExchange, p.ranks, p.rank);
  if (!run.refused) {
    const int per_round = p.lanes / kBlockLanes, warp = static_cast<int>(threadIdx.x / 32);
    const int first = max(p.round, 0) * per_round, end = p.round < 0 ? p.ranks * per_round : first + per_round;
    for (;;) {
      const int claimed = first + BlockClaim(&run.control->claimed[static_cast<int>(Work::kPush)], 1);
      if (claimed >= end) break;
      const int round = claimed / per_round, lane = claimed % per_round * kBlockLanes + warp % kBlockLanes;
      const int peer = (round - p.rank + p.ranks) % p.ranks;
      const bool sending = warp < kBlockLanes;
      bool going = true;
      if (peer == p.rank) {
        if (!sending && p.round < 0) CopyOwn(p, lane);
      } else if (sending) {
        going = Send(p, run, peer, lane);
      } else {
        going = Receive(p, run, peer, lane);
      }
      if (!__syncthreads_and(going)) break;
    }
  }
  FinishOperation(run, [&](uint32_t index, uint32_t count) {
    FillBytes(p.output, p.output_units * p.unit_bytes, p.poison, index, count);
  });
}

// Fills `out`, a result that kernels without poisoning have computed, if the group of `mailbox` has failed.
__global__ void __launch_bounds__(kThreads)
    PoisonKernel(const Mailbox* mailbox, char* out, uint64_t bytes, uint8_t poison) {
  if (LoadRelaxedSystem(&mailbox->failure)) FillBytes(out, bytes, poison, blockIdx.x, gridDim.x);
}

}  // namespace

int LaunchPoison(const Mailbox* mailbox, char* out, uint64_t bytes, uint8_t poison, cudaStream_t stream) {
  PoisonKernel<<<64, kThreads, 0, stream>>>(mailbox, out, bytes, poison);
  return cudaGetLastError();
}
int LaunchRingGather(const ExchangeParams& p, cudaStream_t stream) {
  if (Unfit(p) || p.ranks > kRanks) return cudaErrorInvalidValue;
  GatherKernel<<<ExchangeBlocks(p), kBlockThreads, 0, stream>>>(p);
  return cudaGetLastError();
}
int PreloadRingGather() {
  if (int e = LoadKernel(PoisonKernel)) return e;
  return LoadKernel(GatherKernel);
}

}  // namespace xen_moe::XEN_MOE_VARIANT
