// Chunks from a rank to a rank of another node, without a rail, and what ranks of several nodes do together at the ends
// of an operation.
//
// What moves: a chunk is what one rank sends another for one block of tokens, in one put with one signal: a header, in
// the first chunk of a dispatch the row counts, then a record for each token that has data for that rank, in token
// order. Every pair of active ranks of different nodes exchanges all its chunks in every operation, empty chunks as
// headers alone. So a rank that has ended an operation knows that all others have ended the operation before, which is
// why two halves suffice (workspace.h). Where the next operation could begin before that is known, a chunk's counter
// depends on the parity of its epoch.
//
// Who waits for whom: sending waits for no rank. Awaiting waits for the sender, which is rank `rank` in an error. Many
// warps await the same chunk: the expected value of its counter is kept together with the epoch in which it was
// computed, so that the first warp computes it for all; and what one warp of a block has found, it shares through
// `seen`. Memory order: transport.cuh; a chunk is one put, so a weak signal would suffice. The contents of a chunk are
// checked before they become addresses.
//
// An asynchronous operation (Part) holds its channel from the first block of its first kernel to the last block of its
// last kernel. All its kernels check in under the same call_id, and only the first one meets and announces. Only their
// stream orders them, so no operation that needs the channel may come between them on that stream. If the first kernel
// could not begin, the group has failed, and the last kernel ends the operation with poison.
#pragma once

#include "cuda_kernels/core/launch.cuh"
#include "cuda_kernels/core/signal.cuh"
#include "cuda_kernels/node/rail.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

// How the beginning of an operation treats ranks of other nodes (operation.cuh): joining ranks meet them too.
template <class Link>
class JoinBarrier {
 public:
  static constexpr bool kAny = true;
  __device__ __forceinline__ JoinBarrier(const RailParams& params, const Link& link, const Running& run)
      : JoinBarrier(params, link, run, false) {}
  // `goes_on`: another kernel has begun this operation, has met and has announced.
  __device__ __forceinline__ JoinBarrier(const RailParams& params, const Link& link, const Running& run, bool goes_on)
      : expected_(params.expected),
        first_(JoinSignals(Sources(params.plan))),
        transport_(link, run),
        goes_on_(goes_on) {}
  __device__ __forceinline__ bool GoesOn() const { return goes_on_; }
  // The first warp of block 0: meets `ranks`. Returns false if the group has failed.
  __device__ __forceinline__ bool Join(const Running& run, const RankMask& ranks) const {
    for (RankMask m = ranks; Any(m); DropFirst(m)) transport_.PutSignal(FirstRank(m), 0, 0, 0, first_ + run.rank);
    bool met = true;
    for (RankMask m = ranks; met && Any(m); DropFirst(m)) {
      const int rank = FirstRank(m);
      uint64_t* const reached = expected_ + first_ + rank;
      const uint64_t value = *reached + 1;
      __syncwarp();
      met = transport_.Wait(first_ + rank, value, Step::kArrival, rank);
      if (met && (threadIdx.x & 31) == 0) *reached = value;
    }
    return met;
  }
  // Removes the epochs that are stored with counters. Called by the first warp when it clears flags before the epochs
  // wrap around.
  __device__ __forceinline__ void ForgetEpochs(const Running& run) const {
    for (int i = threadIdx.x & 31; i < first_ - kDirectSignals; i += 32) {
      unsigned long long* const word = reinterpret_cast<unsigned long long*>(expected_ + kDirectSignals + i);
      const unsigned long long seen = LoadRelaxedSystem(expected_ + kDirectSignals + i);
      if (static_cast<uint32_t>(seen >> 32) != run.epoch) atomicCAS(word, seen, seen & 0xFFFFFFFFu);
    }
    __syncwarp();
  }

 private:
  uint64_t* const expected_;
  const int first_;  // the first counter of the barrier
  const Transport<Link> transport_;
  const bool goes_on_;
};

template <class Link>
class Direct {
 public:
  // `seen`: SeenBytes of the block's shared memory.
  __device__ __forceinline__ Direct(const RailParams& params, const Link& link, const Running& run, uint64_t data_bytes,
                                    char* seen)
      : plan(params.plan),
        expected_(params.expected),
        run_(run),
        transport_(link, run),
        data_bytes_(data_bytes),
        seen_(reinterpret_cast<uint2*>(seen)) {}
  // All threads, before a barrier and then the first Await.
  __device__ __forceinline__ void ForgetSeen() const {
    for (int i = threadIdx.x; i < Ranks() * plan.chunks; i += kThreads) seen_[i].y = 0;
  }

  __device__ __forceinline__ int Others() const { return Ranks() - plan.per_node; }
  // The ranks of other nodes, for turns 0 to Others() - 1; each rank begins with a different one.
  __device__ __forceinline__ int RankAt(int turn) const {
    const int others = Others(), from = turn + plan.index;
    const int rank = (plan.node + 1) * plan.per_node + (from < others ? from : from - others);
    return rank < Ranks() ? rank : rank - Ranks();
  }
  // Byte offsets in a rank's data: of the counts in a first chunk, and of a record.
  __device__ __forceinline__ uint64_t SentCounts(int rank) const {
    return plan.send + Chunk(rank, 0) + sizeof(ChunkHeader);
  }
  __device__ __forceinline__ uint64_t ArrivedCounts(int rank) const {
    return plan.receive + Chunk(rank, 0) + sizeof(ChunkHeader);
  }
  __device__ __forceinline__ uint64_t SentRecord(int rank, int chunk, int record) const {
    return plan.send + Chunk(rank, chunk) + Records(chunk) + record * plan.record_bytes;
  }
  __device__ __forceinline__ uint64_t ArrivedRecord(int rank, int chunk, int record) const {
    return plan.receive + Chunk(rank, chunk) + Records(chunk) + record * plan.record_bytes;
  }
  // Sends the chunk; the block has completed its records before a barrier. All lanes of one warp call it.
  __device__ __forceinline__ void Send(int rank, int chunk, uint32_t tokens) const {
    SendChunk(run_, transport_, data_bytes_, rank, plan.send + Chunk(rank, chunk),
              plan.receive + Chunk(run_.rank, chunk), Records(chunk) + __popc(tokens) * plan.record_bytes, tokens,
              Signal(run_.rank, chunk));
  }
  // Waits for a chunk of `rank` and returns its mask of tokens. Returns false if the group has failed. All lanes of a
  // warp call it, any number of times.
  __device__ __forceinline__ bool Await(int rank, int chunk, Step step, uint32_t* tokens) const {
    uint2* const seen = seen_ + rank * plan.chunks + chunk;
    bool good = true;
    uint32_t mask = 0;
    if ((threadIdx.x & 31) == 0) {
      if (LoadAcquireBlock(&seen->y)) {
        mask = seen->x;
      } else {
        good = AwaitSlowly(rank, chunk, step, &mask);
        seen->x = mask;
        if (good) StoreReleaseBlock(&seen->y, 1);
      }
    }
    *tokens = __shfl_sync(0xFFFFFFFFu, mask, 0);
    good = __shfl_sync(0xFFFFFFFFu, good, 0);
    __syncwarp();  // all lanes may read what one lane has acquired
    return good;
  }
  // All lanes of a warp: wait until every chunk of `ranks`, ranks of other nodes, has arrived or the group has failed.
  // The warps that use the chunks check their contents.
  __device__ __forceinline__ void AwaitAll(const RankMask& ranks) const {
    const int others = Others();
    bool good = true;
    for (int i = threadIdx.x & 31; good && i < others * plan.chunks; i += 32) {
      const int rank = RankAt(i % others);
      if (Holds(ranks, rank)) good = AwaitCounter(rank, Signal(rank, i / others), Step::kRows);
    }
    __syncwarp();
  }
  // Sends the failure word, if the group has failed, to the ranks `ranks` of other nodes. One thread calls it.
  __device__ __forceinline__ void PutFailure(const RankMask& ranks) const {
    const uint64_t word = LoadRelaxedSystem(&run_.mailbox->failure);
    for (RankMask m = ranks & ~LoadDead(*run_.mailbox); word && Any(m); DropFirst(m)) {
      transport_.Fail(FirstRank(m), word);
    }
  }

  __device__ __forceinline__ bool Leave(const Call& call) const { return AwaitSources(call, transport_); }

  const RailPlan& plan;

 private:
  __device__ __forceinline__ int Ranks() const { return plan.nodes * plan.per_node; }
  __device__ __forceinline__ uint64_t Chunk(int rank, int chunk) const {
    return (static_cast<uint64_t>(rank) * plan.chunks + chunk) * plan.chunk_bytes;
  }
  __device__ __forceinline__ uint64_t Records(int chunk) const {
    return sizeof(ChunkHeader) + (chunk == 0 ? plan.counts_bytes : 0);
  }
  __device__ __forceinline__ uint32_t Signal(int rank, int chunk) const {
    return kDirectSignals + ((run_.epoch & 1) * Sources(plan) + rank) * kMaxDirectChunks + chunk;
  }
  // Returns what counter `signal` has reached when this operation's chunk has arrived. The word holds that value in its
  // low half and the epoch above it.
  __device__ __forceinline__ uint32_t Reached(uint32_t signal) const {
    const unsigned long long seen = LoadRelaxedSystem(expected_ + signal);
    if (static_cast<uint32_t>(seen >> 32) == run_.epoch) return static_cast<uint32_t>(seen);
    const uint32_t value = static_cast<uint32_t>(seen) + 1;
    atomicCAS(reinterpret_cast<unsigned long long*>(expected_ + signal), seen,
              // if this fails, another warp has stored the same value
              static_cast<unsigned long long>(run_.epoch) << 32 | value);
    return value;
  }
  // One lane: waits until the chunk of counter `signal` has arrived. Returns false if the group has failed.
  __device__ __forceinline__ bool AwaitCounter(int rank, uint32_t signal, Step step) const {
    const uint32_t value = Reached(signal);
    auto there = [&] { return static_cast<int32_t>(static_cast<uint32_t>(transport_.Count(signal)) - value) >= 0; };
    return transport_.WaitFor(there, step, rank);
  }
  // One lane.
  __device__ __forceinline__ bool AwaitSlowly(int rank, int chunk, Step step, uint32_t* tokens) const {
    if (!AwaitCounter(rank, Signal(rank, chunk), step)) return false;
    const ChunkHeader* const header =
        reinterpret_cast<const ChunkHeader*>(run_.data[run_.rank] + plan.receive + Chunk(rank, chunk));
    *tokens = LoadRelaxedSystem(&header->tokens);
    return SameOperation(run_, LoadRelaxedSystem(&header->announcement), rank);
  }

  uint64_t* const expected_;
  const Running& run_;
  const Transport<Link> transport_;
  const uint64_t data_bytes_;  // as the operation has requested
  uint2* const seen_;          // [rank][chunk]: its mask of tokens, and whether it has arrived
};
// In the shared memory of a block.
constexpr int kMostSeenBytes = kRanks * kMaxDirectChunks * static_cast<int>(sizeof(uint2));
inline uint32_t SeenBytes(const RailPlan& plan) {
  return static_cast<uint32_t>(plan.nodes * plan.per_node * plan.chunks * sizeof(uint2));
}

// Begins an operation of few tokens between nodes: like BeginFirstWarp, and then in the state that BeginLowLatency
// leaves. `run.active` holds the ranks of this node, which the code of low_latency/ handles, and `*far` the other
// active ranks.
template <class Link>
__device__ __forceinline__ void BeginDirect(Running& run, RankMask* far, const Call& call, Operation operation,
                                            const Routing& r, const RailParams& rails, const Link& link) {
  const JoinBarrier<Link> meeting(rails, link, run, rails.part == Part::kReceive);
  if (threadIdx.x == 0) run.repeats = run.settled = false;
  BeginFirstWarp(run, call, operation, r.ranks, r.rank, NodeMask(rails.plan, rails.plan.node), meeting);
  __syncwarp();
  if (threadIdx.x == 0) {
    *far = run.active & ~run.reachable;
    run.active = run.meets;
  }
  __syncwarp();
}

// The kernel between the sending and the receiving kernel of an asynchronous operation, as part kReceive: one warp
// waits until all chunks have arrived.
template <class Link>
__global__ void __launch_bounds__(32, 1)
    AwaitChunksKernel(const __grid_constant__ Call call, const __grid_constant__ Routing routing, Operation operation,
                      const __grid_constant__ RailParams rails, const __grid_constant__ Link link) {
  __shared__ Running run;
  __shared__ RankMask far;
  BeginDirect(run, &far, call, operation, routing, rails, link);
  if (!run.refused) Direct<Link>(rails, link, run, 0, nullptr).AwaitAll(far);
}

// Launches an operation of few tokens, whole or in parts. `launch(rails, blocks)` launches its kernel and returns a
// cudaError_t, as this function does. `senders`: blocks of a part that only sends; `receivers`: of a part that only
// receives.
template <class Link, class OnePart>
int LaunchDirect(const Call& call, const Routing& r, Operation operation, const RailParams& rails, const Link& link,
                 int blocks, int senders, int receivers, cudaStream_t stream, OnePart launch) {
  RailParams part = rails;
  part.part = Part::kWhole;
  if (!rails.in_flight) return launch(part, blocks);
  part.part = Part::kSend;
  if (int e = launch(part, senders < blocks ? senders : blocks)) return e;
  part.part = Part::kReceive;
  if (int e = Launch(AwaitChunksKernel<Link>, 1, 32, 0, stream, call, r, operation, part, link)) return e;
  return launch(part, receivers);
}
template <class Link>
int PreloadDirect() {
  return LoadKernel(AwaitChunksKernel<Link>);
}

}  // namespace xen_moe::XEN_MOE_VARIANT
