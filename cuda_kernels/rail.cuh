// Chunks between nodes: sent, awaited, and told of failures. rail_plan.h says what they are.
//
// Who waits for whom: sending a chunk waits for nobody. Awaiting one waits for its sender, as rank `rank` in an error.
// Memory order: transport.cuh; a chunk's header and records go in one put with its signal, so that a weak signal would
// do. A chunk is awaited by one warp in an operation, which alone keeps the counter's expected value.
#pragma once

#include "rail_plan.h"
#include "transport.cuh"

namespace XEN_MOE_KERNELS {

// Ranks of this rank's node.
__device__ __forceinline__ RankMask NodeMask(const RailPlan& plan, int node) {
  return RanksFrom(node * plan.per_node, plan.per_node);
}
// Tokens of chunk `chunk`.
__device__ __forceinline__ int TokensOf(const RailPlan& plan, int chunk, int tokens) {
  return min(plan.chunk_tokens, tokens - chunk * plan.chunk_tokens);
}

template <class Link>
class Rail {
 public:
  __device__ __forceinline__ Rail(const RailParams& params, const Link& link, const Running& run, uint64_t data_bytes)
      : plan(params.plan), expected_(params.expected), run_(run), transport_(link, run), data_bytes_(data_bytes) {}

  // The rank of this one's rail on `node`.
  __device__ __forceinline__ int RankOn(int node) const { return node * plan.per_node + plan.index; }
  // The node to send the `turn`th chunk to, and the one to await it from: everybody begins with another one.
  __device__ __forceinline__ int NodeTo(int turn) const { return (plan.node + 1 + turn) % plan.nodes; }
  __device__ __forceinline__ int NodeFrom(int turn) const { return (plan.node + plan.nodes - 1 - turn) % plan.nodes; }

  // Byte offset in a rank's data of a record that is sent to `node`, or came from there.
  __device__ __forceinline__ uint64_t SentRecord(int node, int chunk, int record) const {
    return plan.send + Chunk(node, chunk) + sizeof(ChunkHeader) + record * plan.record_bytes;
  }
  __device__ __forceinline__ uint64_t LandedRecord(int node, int chunk, int record) const {
    return plan.land + Chunk(node, chunk) + sizeof(ChunkHeader) + record * plan.record_bytes;
  }
  // Sends the chunk whose records are complete. All lanes of the warp that stored them call it.
  __device__ __forceinline__ void Send(int node, int chunk, uint32_t tokens) const {
    const uint64_t from = plan.send + Chunk(node, chunk);
    if ((threadIdx.x & 31) == 0) {
      ChunkHeader* const header = reinterpret_cast<ChunkHeader*>(run_.data[run_.rank] + from);
      header->announcement = PackAnnouncement(run_.epoch, run_.signature, run_.generation);
      header->tokens = tokens, header->reserved = 0;
    }
    transport_.PutSignal(RankOn(node), Offset(plan.land + Chunk(plan.node, chunk)), Offset(from),
                         sizeof(ChunkHeader) + __popc(tokens) * plan.record_bytes, Signal(plan.node, chunk));
  }
  // Awaits a chunk from `node`; its mask of tokens. False: the group has failed. All lanes call it.
  __device__ __forceinline__ bool Await(int node, int chunk, uint32_t* tokens) const {
    const int rank = RankOn(node);
    uint64_t* const reached = expected_ + Signal(node, chunk);
    const uint64_t value = *reached + 1;
    if (!transport_.Wait(Signal(node, chunk), value, Step::kRows, rank)) return false;
    const ChunkHeader* const header =
        reinterpret_cast<const ChunkHeader*>(run_.data[run_.rank] + plan.land + Chunk(node, chunk));
    // Read once: lanes that went different ways would wait for each other for ever.
    uint64_t theirs = 0;
    *tokens = 0;
    if ((threadIdx.x & 31) == 0) {
      theirs = LoadRelaxedSystem(&header->announcement);
      *tokens = LoadRelaxedSystem(&header->tokens);
    }
    theirs = __shfl_sync(0xFFFFFFFFu, static_cast<unsigned long long>(theirs), 0);
    *tokens = __shfl_sync(0xFFFFFFFFu, *tokens, 0);
    const uint64_t own = PackAnnouncement(run_.epoch, run_.signature, run_.generation);
    if (theirs != own) {
      const bool same = theirs >> 8 == own >> 8;  // but for the generation of memory
      if ((threadIdx.x & 31) == 0) {
        XEN_MOE_KERNELS::Fail(run_, same ? Cause::kMemory : Cause::kMismatch, Step::kArrival, rank, run_.rank, 0);
      }
      __syncwarp();
      return false;
    }
    if ((threadIdx.x & 31) == 0) *reached = value;
    return true;
  }
  // Tells the other nodes that the group has failed, if it has. One thread calls it.
  __device__ __forceinline__ void TellFailure() const {
    const uint64_t word = LoadRelaxedSystem(&run_.mailbox->failure);
    for (int turn = 0; word && turn < plan.nodes - 1; ++turn) transport_.Fail(RankOn(NodeTo(turn)), word);
  }

  const RailPlan& plan;

 private:
  __device__ __forceinline__ uint64_t Chunk(int node, int chunk) const {
    return (static_cast<uint64_t>(node) * plan.chunks + chunk) * plan.chunk_bytes;
  }
  __device__ __forceinline__ static uint32_t Signal(int node, int chunk) { return node * kMaxChunks + chunk; }
  // From an offset in the data to one in the generation's staging area, equal on all ranks.
  __device__ __forceinline__ uint64_t Offset(uint64_t data) const {
    const uint64_t to_data = static_cast<uint64_t>(run_.data[run_.rank] - run_.half[run_.rank]);
    return (run_.epoch & 1) * (to_data + data_bytes_) + to_data + data;
  }

  uint64_t* const expected_;
  const Running& run_;
  const Transport<Link> transport_;
  const uint64_t data_bytes_;  // that the operation has asked for
};

}  // namespace XEN_MOE_KERNELS
