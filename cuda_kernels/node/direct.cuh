// Chunks from a rank to one of another node, past the rails, and what ranks of several nodes do together at their ends.
//
// A chunk is what one rank sends another for one block of tokens, in one put with one signal: a header, in the first
// one of a dispatch the row counts, then a record for each token that has anything there, in token order. Every pair of
// ranks of different nodes that take part exchanges all its chunks in every operation, empty ones as their headers
// alone: so a rank that has ended an operation has seen that all others have ended the one before, which is why two
// halves suffice (workspace.h). Where the next operation could come before that is known, a chunk's counter is that of
// its epoch's parity.
//
// Who waits for whom: sending waits for nobody. Awaiting waits for the sender, as rank `rank` in an error. Many warps
// await the same chunk: what its counter must reach is kept with the epoch in which that was said, so that the first of
// them says it for all; and what one warp of a block has found, `seen` tells the others. Memory order: transport.cuh; a
// chunk goes in one put, so that a weak signal would do. What a chunk says is checked before it becomes an address.
//
// An operation in flight (Part) holds its channel from the first block of the first of its kernels to the last block of
// the last one: all have one number, by which they check in, and only the first one meets and announces. Nothing but
// its stream keeps them in order, so nothing that needs the channel may come between them there. Where the first one
// could not begin, the group has failed, and the last one ends the operation with poison.
#pragma once

#include "cuda_kernels/core/launch.cuh"
#include "cuda_kernels/core/signal.cuh"
#include "cuda_kernels/node/rail.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

// What the ranks of other nodes are to the beginning of an operation (operation.cuh): those that join meet them too.
template <class Link>
class JoinBarrier {
 public:
  static constexpr bool kAny = true;
  __device__ __forceinline__ JoinBarrier(const RailParams& params, const Link& link, const Running& run)
      : JoinBarrier(params, link, run, false) {}
  // `goes_on`: an operation that another kernel has begun, which has met and announced.
  __device__ __forceinline__ JoinBarrier(const RailParams& params, const Link& link, const Running& run, bool goes_on)
      : expected_(params.expected),
        first_(JoinSignals(Sources(params.plan))),
        transport_(link, run),
        goes_on_(goes_on) {}
  __device__ __forceinline__ bool GoesOn() const { return goes_on_; }
  // The first warp of block 0: meets `ranks`. False: the group has failed.
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
  // The same warp, where flags are cleared because numbers come round: no counter's epoch is one that is still to come.
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
  const int first_;  // of the counters that ranks meet by
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
  // The ranks of other nodes, for turns 0 to Others() - 1: everybody begins with another one.
  __device__ __forceinline__ int RankAt(int turn) const {
    const int others = Others(), from = turn + plan.index;
    const int rank = (plan.node + 1) * plan.per_node + (from < others ? from : from - others);
    return rank < Ranks() ? rank : rank - Ranks();
  }
  // Byte offsets in a rank's data: of the counts in a first chunk, and of a record.
  __device__ __forceinline__ uint64_t SentCounts(int rank) const {
    return plan.send + Chunk(rank, 0) + sizeof(ChunkHeader);
  }
  __device__ __forceinline__ uint64_t LandedCounts(int rank) const {
    return plan.land + Chunk(rank, 0) + sizeof(ChunkHeader);
  }
  __device__ __forceinline__ uint64_t SentRecord(int rank, int chunk, int record) const {
    return plan.send + Chunk(rank, chunk) + Records(chunk) + record * plan.record_bytes;
  }
  __device__ __forceinline__ uint64_t LandedRecord(int rank, int chunk, int record) const {
    return plan.land + Chunk(rank, chunk) + Records(chunk) + record * plan.record_bytes;
  }
  // Sends the chunk whose records the block has completed, before a barrier. All lanes of one warp call it.
  __device__ __forceinline__ void Send(int rank, int chunk, uint32_t tokens) const {
    SendChunk(run_, transport_, data_bytes_, rank, plan.send + Chunk(rank, chunk), plan.land + Chunk(run_.rank, chunk),
              Records(chunk) + __popc(tokens) * plan.record_bytes, tokens, Signal(run_.rank, chunk));
  }
  // Awaits a chunk of `rank`; its mask of tokens. False: the group has failed. All lanes of a warp call it, as often as
  // they like.
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
    __syncwarp();  // what one lane has acquired, all lanes may read
    return good;
  }
  // All lanes of a warp: until every chunk of `ranks`, ranks of other nodes, has come or the group has failed. What the
  // chunks say is looked at by those who take them.
  __device__ __forceinline__ void AwaitAll(const RankMask& ranks) const {
    const int others = Others();
    bool good = true;
    for (int i = threadIdx.x & 31; good && i < others * plan.chunks; i += 32) {
      const int rank = RankAt(i % others);
      if (Holds(ranks, rank)) good = AwaitCounter(rank, Signal(rank, i / others), Step::kRows);
    }
    __syncwarp();
  }
  // Tells the ranks `ranks` of other nodes that the group has failed, if it has. One thread calls it.
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
  // What counter `signal` has reached when this operation's chunk is there: low half of its word, the epoch above it.
  __device__ __forceinline__ uint32_t Reached(uint32_t signal) const {
    const unsigned long long seen = LoadRelaxedSystem(expected_ + signal);
    if (static_cast<uint32_t>(seen >> 32) == run_.epoch) return static_cast<uint32_t>(seen);
    const uint32_t value = static_cast<uint32_t>(seen) + 1;
    atomicCAS(reinterpret_cast<unsigned long long*>(expected_ + signal), seen,
              static_cast<unsigned long long>(run_.epoch) << 32 | value);  // if not, another warp has said the same
    return value;
  }
  // A lane: until the chunk of counter `signal` has come. False: the group has failed.
  __device__ __forceinline__ bool AwaitCounter(int rank, uint32_t signal, Step step) const {
    const uint32_t value = Reached(signal);
    auto there = [&] { return static_cast<int32_t>(static_cast<uint32_t>(transport_.Count(signal)) - value) >= 0; };
    return transport_.WaitFor(there, step, rank);
  }
  // One lane.
  __device__ __forceinline__ bool AwaitSlowly(int rank, int chunk, Step step, uint32_t* tokens) const {
    if (!AwaitCounter(rank, Signal(rank, chunk), step)) return false;
    const ChunkHeader* const header =
        reinterpret_cast<const ChunkHeader*>(run_.data[run_.rank] + plan.land + Chunk(rank, chunk));
    *tokens = LoadRelaxedSystem(&header->tokens);
    return SameOperation(run_, LoadRelaxedSystem(&header->announcement), rank);
  }

  uint64_t* const expected_;
  const Running& run_;
  const Transport<Link> transport_;
  const uint64_t data_bytes_;  // that the operation has asked for
  uint2* const seen_;          // [rank][chunk]: its mask of tokens, and whether it has come
};
// Of the shared memory of a block.
constexpr int kMostSeenBytes = kRanks * kMaxDirectChunks * static_cast<int>(sizeof(uint2));
inline uint32_t SeenBytes(const RailPlan& plan) {
  return static_cast<uint32_t>(plan.nodes * plan.per_node * plan.chunks * sizeof(uint2));
}

// Begins an operation of few tokens between nodes: as BeginFirstWarp, and then as BeginLowLatency leaves it, with
// `run.active` for the ranks of this node, to which the code of low_latency_*.cuh goes, and `*far` for the others.
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

// Between the two others of an operation in flight, as part kReceive: one warp, until all chunks have come.
template <class Link>
__global__ void __launch_bounds__(32, 1)
    AwaitChunksKernel(const __grid_constant__ Call call, const __grid_constant__ Routing routing, Operation operation,
                      const __grid_constant__ RailParams rails, const __grid_constant__ Link link) {
  __shared__ Running run;
  __shared__ RankMask far;
  BeginDirect(run, &far, call, operation, routing, rails, link);
  if (!run.refused) Direct<Link>(rails, link, run, 0, nullptr).AwaitAll(far);
}

// Launches an operation of few tokens, whole or in parts. `launch(rails, blocks)` launches its kernel. `senders`:
// blocks that a part has which only sends; `receivers`: which only receives. A cudaError_t.
template <class Link, class Launch>
int LaunchDirect(const Call& call, const Routing& r, Operation operation, const RailParams& rails, const Link& link,
                 int blocks, int senders, int receivers, cudaStream_t stream, Launch launch) {
  RailParams part = rails;
  part.part = Part::kWhole;
  if (!rails.in_flight) {
    launch(part, blocks);
    return cudaGetLastError();
  }
  part.part = Part::kSend;
  launch(part, senders < blocks ? senders : blocks);
  part.part = Part::kReceive;
  const auto await = AwaitChunksKernel<Link>;
  await<<<1, 32, 0, stream>>>(call, r, operation, part, link);
  launch(part, receivers);
  return cudaGetLastError();
}
template <class Link>
int PreloadDirect() {
  return LoadKernel(AwaitChunksKernel<Link>);
}

}  // namespace xen_moe::XEN_MOE_VARIANT
