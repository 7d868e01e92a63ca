// Rings in the staging areas, through which ranks send messages to one another. exchange.cu and gather.cu use them.
//
// What moves: the message to rank p is divided into chunks; lane j of `lanes` carries chunks j, j + lanes, ... A lane
// has a ring of `ring_chunks` slots at its receiver, so that staged data do not grow with the message. Who does it: a
// crew of threads (Crew) carries one lane in one direction. The crews of the first half of a block send: they copy
// chunks into ring slots at rank p and raise the chunks' flags. The crews of the second half receive: they copy the
// chunks that p has sent on the same lane to the output, and return a credit for each slot that its sender uses again.
// Who waits for whom: a receiver waits for a chunk, and a sender for the credit of the chunk that was in the slot
// before. In round k, rank r is paired with rank (k - r) mod R; blocks claim (round, lanes) in ascending order. So
// every wait ends, with any number of resident blocks: on both ranks of the smallest unfinished pair a running block
// has claimed it, and each crew of that block waits only for the other rank's crew of the same lane. Memory order: as
// in dispatch.cuh. The leader of a crew acquires and releases flags for the whole crew, and barriers of the crew order
// the other threads' accesses. A credit is released after the crew has read the slot. After a failed wait nothing more
// is stored at a peer.
#pragma once
#include "cuda_kernels/core/claims.cuh"
#include "cuda_kernels/core/launch.cuh"
#include "cuda_kernels/core/operation.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

// A crew is kThreads neighbouring threads that carry one lane: a warp, or half a block. Each half of a block has
// kPerHalf crews. kInFlight: the vectors that a thread loads before it stores the first of them.
template <int kThreadsEach, int kLanesOfBlock, int kVectorsInFlight>
struct Crew {
  static constexpr int kThreads = kThreadsEach, kPerHalf = kLanesOfBlock, kInFlight = kVectorsInFlight;
  static constexpr int kBlockThreads = 2 * kPerHalf * kThreads;
  static_assert(kThreads == 32 || kPerHalf == 1);

  static __device__ __forceinline__ int Number() { return static_cast<int>(threadIdx.x) / kThreads; }
  static __device__ __forceinline__ bool Sends() { return Number() < kPerHalf; }
  static __device__ __forceinline__ bool Leads() { return threadIdx.x % kThreads == 0; }
  static __device__ __forceinline__ void Sync() {
    if constexpr (kThreads == 32) {
      __syncwarp();
    } else if (Sends()) {
      asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
    } else {
      asm volatile("bar.sync 2, %0;" ::"n"(kThreads) : "memory");
    }
  }
  // Calls `wait()` in the leader and returns its result to all threads of the crew. After that they may read data that
  // the leader has acquired or written in `wait()`.
  template <class Wait>
  static __device__ __forceinline__ bool LeaderWaits(Wait wait) {
    if constexpr (kThreads == 32) {
      bool good = true;
      if (Leads()) good = wait();
      __syncwarp();  // orders the other lanes' reads behind the flag
      return __shfl_sync(0xFFFFFFFFu, good, 0);
    } else {
      __shared__ bool good[2];
      Sync();  // all threads have read the result of the wait before
      if (Leads()) good[Number()] = wait();
      Sync();
      return good[Number()];
    }
  }
};

// Copies `bytes` bytes as vectors of type Vec, and the bytes after the last whole vector one by one. All threads of a
// crew call it together.
template <class C, class Vec>
__device__ __forceinline__ void CopyVectors(char* to, const char* from, uint64_t bytes) {
  constexpr int kTogether = C::kInFlight * C::kThreads;
  const int thread = static_cast<int>(threadIdx.x % C::kThreads), n = static_cast<int>(bytes / sizeof(Vec));
  const Vec* src = reinterpret_cast<const Vec*>(from) + thread;
  Vec* dst = reinterpret_cast<Vec*>(to) + thread;
  for (int turns = n / kTogether; turns > 0; --turns, src += kTogether, dst += kTogether) {
    Vec v[C::kInFlight];
#pragma unroll
    for (int i = 0; i < C::kInFlight; ++i) v[i] = __ldcs(src + i * C::kThreads);
#pragma unroll
    for (int i = 0; i < C::kInFlight; ++i) dst[i * C::kThreads] = v[i];
  }
  for (int left = n % kTogether; thread < left; left -= C::kThreads, src += C::kThreads, dst += C::kThreads) {
    *dst = __ldcs(src);
  }
  for (uint64_t b = n * sizeof(Vec) + thread; b < bytes; b += C::kThreads) to[b] = from[b];
}
// Copies `bytes` bytes by the widest vectors that the alignment of both addresses allows. All threads of a crew call it
// together.
template <class C>
__device__ __noinline__ void CopyBytes(char* to, const char* from, uint64_t bytes) {
  const uint64_t both = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from);
  if (both % 16 == 0) {
    CopyVectors<C, int4>(to, from, bytes);
  } else if (both % 4 == 0) {
    CopyVectors<C, unsigned int>(to, from, bytes);
  } else {
    CopyVectors<C, unsigned char>(to, from, bytes);
  }
}

// Where a lane has its flags and its ring.
struct Lane {
  uint32_t* chunk_flags;   // at the receiver, one for each chunk
  uint32_t* credit_flags;  // at the sender, one for each chunk
  char* ring;              // at the receiver, `ring_chunks` slots
};
// Returns lane number `lane` from `source` to `target`. Both ranks compute the same places.
__device__ __forceinline__ Lane LaneOf(const ExchangeParams& p, const Running& run, int source, int target, int lane) {
  const uint64_t in = static_cast<uint64_t>(source) * p.lanes + lane,
                 out = static_cast<uint64_t>(target) * p.lanes + lane;
  return {reinterpret_cast<uint32_t*>(run.half[target] + p.chunk_flags) + in * p.max_chunks,
          reinterpret_cast<uint32_t*>(run.half[source] + p.credit_flags) + out * p.max_chunks,
          run.data[target] + p.ring + in * p.ring_chunks * p.chunk_bytes};
}

// The place of a chunk in the operand (for its sender) or in the output (for its receiver).
struct Chunk {
  uint64_t at;  // the first byte
  uint64_t bytes;
};
// The chunks of one lane for a message of `bytes` contiguous bytes from byte `first` on. Called with n, it returns
// chunk number n of the lane, n < count.
struct ContiguousChunks {
  uint64_t first, bytes, chunk_bytes, lanes, lane;
  uint64_t count;
  __device__ __forceinline__ ContiguousChunks(const ExchangeParams& p, uint64_t first, uint64_t bytes, int lane)
      : first(first), bytes(bytes), chunk_bytes(p.chunk_bytes), lanes(p.lanes), lane(lane) {
    const uint64_t all = (bytes + chunk_bytes - 1) / chunk_bytes;
    count = min(all > this->lane ? (all - this->lane + lanes - 1) / lanes : 0, p.max_chunks);
  }
  __device__ __forceinline__ Chunk operator()(uint64_t n) {
    const uint64_t begin = (n * lanes + lane) * chunk_bytes;
    return {first + begin, min(chunk_bytes, bytes - begin)};
  }
};

// Sends the chunks of one lane to `target`. The threads of a crew call it together. Returns false if the group has
// failed.
template <class C, class Chunks>
__device__ __forceinline__ bool SendChunks(const ExchangeParams& p, const Running& run, int target, int lane,
                                           Chunks chunks) {
  const uint32_t epoch = run.epoch;
  const Lane way = LaneOf(p, run, p.rank, target, lane);
  for (uint64_t n = 0; n < chunks.count; ++n) {
    if (n >= static_cast<uint64_t>(p.ring_chunks)) {
      const uint32_t* const credit = way.credit_flags + n - p.ring_chunks;
      if (!C::LeaderWaits([&] { return WaitFlag(credit, run, epoch, Step::kCredit, target); })) return false;
    }
    const Chunk chunk = chunks(n);
    CopyBytes<C>(way.ring + n % p.ring_chunks * p.chunk_bytes, p.operand + chunk.at, chunk.bytes);
    C::Sync();
    if (C::Leads()) {
      FenceSystem();
      StoreRelaxedSystem(way.chunk_flags + n, epoch);
    }
  }
  return true;
}

// Receives the chunks of one lane from `source`. Without `fits` it awaits and drops them. The threads of a crew call it
// together. Returns false if the group has failed.
template <class C, class Chunks>
__device__ __forceinline__ bool ReceiveChunks(const ExchangeParams& p, const Running& run, int source, int lane,
                                              bool fits, Chunks chunks) {
  const uint32_t epoch = run.epoch;
  const Lane way = LaneOf(p, run, source, p.rank, lane);
  for (uint64_t n = 0; n < chunks.count; ++n) {
    const uint32_t* const flag = way.chunk_flags + n;
    if (!C::LeaderWaits([&] { return WaitFlag(flag, run, epoch, Step::kRows, source); })) return false;
    const Chunk chunk = chunks(n);
    if (fits) CopyBytes<C>(p.output + chunk.at, way.ring + n % p.ring_chunks * p.chunk_bytes, chunk.bytes);
    C::Sync();
    // No credit is returned that the sender does not await: it might arrive when the sender is two operations ahead
    // (workspace.h).
    if (C::Leads() && n + p.ring_chunks < chunks.count) {
      FenceSystem();
      StoreRelaxedSystem(way.credit_flags + n, epoch);
    }
  }
  return true;
}

// Claims pairs of this rank and a peer until those of all rounds (p.round < 0) or of round `p.round` are done, or the
// group has failed. All threads of the block call it. For each pair, the crews of the first half call
// `send(peer, lane)` and those of the second half `receive(peer, lane)`, which return false if the group has failed.
// Where this rank is paired with itself, all crews call `own(lane)`.
template <class C, class Own, class SendLane, class ReceiveLane>
__device__ __forceinline__ void TakePairs(const ExchangeParams& p, const Running& run, Own own, SendLane send,
                                          ReceiveLane receive) {
  const int per_round = p.lanes / C::kPerHalf;
  const int first = max(p.round, 0) * per_round, end = p.round < 0 ? p.ranks * per_round : first + per_round;
  for (;;) {
    const int claimed = first + BlockClaim(&run.control->claimed[static_cast<int>(Work::kPush)], 1);
    if (claimed >= end) break;
    const int round = claimed / per_round, lane = claimed % per_round * C::kPerHalf + C::Number() % C::kPerHalf;
    const int peer = (round - p.rank + p.ranks) % p.ranks;
    bool going = true;
    if (peer == p.rank) {
      own(lane);
    } else if (C::Sends()) {
      going = send(peer, lane);
    } else {
      going = receive(peer, lane);
    }
    if (!__syncthreads_and(going)) break;
  }
}

}  // namespace xen_moe::XEN_MOE_VARIANT
