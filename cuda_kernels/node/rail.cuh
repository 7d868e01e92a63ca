// Chunks between nodes: how they are sent and awaited, and how failures are reported. rail_plan.h defines them.
//
// Who waits for whom: sending a chunk waits for no rank. Awaiting a chunk waits for its sender, which is rank `rank` in
// an error. Memory order: transport.cuh; a chunk's header and records go in one put with its signal, so a weak signal
// would suffice. One warp of an operation awaits a chunk, and it alone updates the counter's expected value.
#pragma once

#include "cuda_kernels/node/rail_plan.h"
#include "cuda_kernels/node/transport.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

// Returns the number of ranks that have counters by rank (rail_memory.h).
__device__ __forceinline__ int Sources(const RailPlan& plan) {
  return kLargeGroups ? plan.nodes * plan.per_node : kSmallGroup;
}
// Returns the ranks of this rank's node.
__device__ __forceinline__ RankMask NodeMask(const RailPlan& plan, int node) {
  return RanksFrom(node * plan.per_node, plan.per_node);
}
// Returns the number of tokens of chunk `chunk`.
__device__ __forceinline__ int TokensOf(const RailPlan& plan, int chunk, int tokens) {
  return min(plan.chunk_tokens, tokens - chunk * plan.chunk_tokens);
}
// Returns the bits of the tokens that a chunk has.
__device__ __forceinline__ uint32_t ExistingTokens(const RailPlan& plan, int chunk, int tokens) {
  const int count = TokensOf(plan, chunk, tokens);
  return count < 32 ? (1u << count) - 1 : 0xFFFFFFFFu;
}

// Calls f(record, token) for the records of a chunk that are assigned to this warp, in order.
template <class F>
__device__ __forceinline__ void EachOwnRecord(const RailPlan& plan, int chunk, uint32_t tokens, F f) {
  const int warp = threadIdx.x / 32;
  int record = 0;
  for (uint32_t m = tokens; m; m &= m - 1, ++record) {
    if (record % kWarps == warp) f(record, chunk * plan.chunk_tokens + __ffs(m) - 1);
  }
}
// Converts an offset in the data to an offset in the generation's staging area, equal on all ranks. `data_bytes`: as
// the operation has requested.
__device__ __forceinline__ uint64_t Offset(const Running& run, uint64_t data_bytes, uint64_t data) {
  const uint64_t to_data = static_cast<uint64_t>(run.data[run.rank] - run.half[run.rank]);
  return (run.epoch & 1) * (to_data + data_bytes) + to_data + data;
}
// Returns whether a chunk's header says that `rank` runs this operation in the same generation of memory; otherwise the
// group fails. One lane calls it.
__device__ __forceinline__ bool SameOperation(const Running& run, uint64_t theirs, int rank) {
  const uint64_t own = PackAnnouncement(run.epoch, run.signature, run.generation);
  if (theirs == own) return true;
  const bool same = theirs >> 8 == own >> 8;  // compares all but the generation of memory
  Fail(run, same ? Cause::kMemory : Cause::kMismatch, Step::kArrival, rank, run.rank, 0);
  return false;
}

// Writes the header of the chunk of `bytes` at `from` in this rank's data, and sends the chunk to `to` in the data of
// `rank`. All lanes of a warp call it: the warp that stored the records, or any warp after a barrier.
template <class Link>
__device__ __forceinline__ void SendChunk(const Running& run, const Transport<Link>& transport, uint64_t data_bytes,
                                          int rank, uint64_t from, uint64_t to, uint64_t bytes, uint32_t tokens,
                                          uint32_t signal) {
  if ((threadIdx.x & 31) == 0) {
    ChunkHeader* const header = reinterpret_cast<ChunkHeader*>(run.data[run.rank] + from);
    header->announcement = PackAnnouncement(run.epoch, run.signature, run.generation);
    header->tokens = tokens, header->reserved = 0;
  }
  transport.PutSignal(rank, Offset(run, data_bytes, to), Offset(run, data_bytes, from), bytes, signal);
}

// The last step of every warp in an operation with an `active` mask: waits until the sources of its puts may be written
// again. A rank that is inactive in the next operation may still wait for this data, and the other ranks do not learn
// when it ends this operation. Without inactive ranks, a rank that ends the next operation knows that. Returns false if
// the group has failed. All lanes call it.
template <class Link>
__device__ __forceinline__ bool AwaitSources(const Call& call, const Transport<Link>& transport) {
  return call.active == nullptr || transport.Flush();
}

template <class Link>
class Rail {
 public:
  __device__ __forceinline__ Rail(const RailParams& params, const Link& link, const Running& run, uint64_t data_bytes)
      : plan(params.plan), expected_(params.expected), run_(run), transport_(link, run), data_bytes_(data_bytes) {}

  // Returns the rank of this rank's rail on `node`; and whether `rank` is on the rail.
  __device__ __forceinline__ int RankOn(int node) const { return node * plan.per_node + plan.index; }
  __device__ __forceinline__ bool OnRail(int rank) const { return rank % plan.per_node == plan.index; }
  // The number of turns, and the rank to send to, or to await from, in a turn; each rank begins with a different one.
  // Where ranks may be inactive these are all ranks of other nodes; Goes says which of them have chunks.
  __device__ __forceinline__ int Turns() const {
    return plan.masked ? (plan.nodes - 1) * plan.per_node : plan.nodes - 1;
  }
  __device__ __forceinline__ int RankTo(int turn) const { return RankIn((plan.node + 1 + NodesIn(turn)), turn); }
  __device__ __forceinline__ int RankFrom(int turn) const {
    return RankIn(plan.node + plan.nodes - 1 - NodesIn(turn), turn);
  }
  // Returns whether a dispatch has chunks from `from` to `to`, ranks of different nodes: along the rail, or bypassing
  // it if the rank of `to`'s node that would forward them is inactive. A combine has the same chunks in the other
  // direction.
  __device__ __forceinline__ bool Goes(int from, int to) const {
    if (!plan.masked) return true;
    const int forwards = to / plan.per_node * plan.per_node + from % plan.per_node;
    return Takes(from) && Takes(to) && (forwards == to || !Takes(forwards));
  }
  __device__ __forceinline__ bool Takes(int rank) const { return Holds(run_.active, rank); }

  // Returns the place of the chunks to and from a rank among all chunks.
  __device__ __forceinline__ int Place(int rank) const { return plan.masked ? rank : rank / plan.per_node; }
  // Byte offset in a rank's data of a record that is sent to `rank`, or came from it.
  __device__ __forceinline__ uint64_t SentRecord(int rank, int chunk, int record) const {
    return plan.send + Chunk(rank, chunk) + sizeof(ChunkHeader) + record * plan.record_bytes;
  }
  __device__ __forceinline__ uint64_t ArrivedRecord(int rank, int chunk, int record) const {
    return plan.receive + Chunk(rank, chunk) + sizeof(ChunkHeader) + record * plan.record_bytes;
  }
  // Byte offset of a lead in a rank's data: its header, with the records behind it.
  __device__ __forceinline__ uint64_t SentLead(int rank, int lead) const { return plan.lead_send + Lead(rank, lead); }
  __device__ __forceinline__ uint64_t ArrivedLead(int rank, int lead) const {
    return plan.lead_receive + Lead(rank, lead);
  }

  // Sends the chunk whose records are complete. All lanes of a warp call it: the warp that stored them, or any warp
  // after a barrier.
  __device__ __forceinline__ void Send(int rank, int chunk, uint32_t tokens) const {
    SendChunk(run_, transport_, data_bytes_, rank, plan.send + Chunk(rank, chunk),
              plan.receive + Chunk(run_.rank, chunk), sizeof(ChunkHeader) + __popc(tokens) * plan.record_bytes, tokens,
              Signal(run_.rank, OnRail(rank), chunk));
  }
  // Sends a lead with `records` records.
  __device__ __forceinline__ void SendLead(int rank, int lead, int records) const {
    SendChunk(run_, transport_, data_bytes_, rank, SentLead(rank, lead), ArrivedLead(run_.rank, lead),
              sizeof(LeadHeader) + records * plan.routing_bytes, 0, Signal(run_.rank, OnRail(rank), kMaxChunks + lead));
  }
  // Waits for a chunk of `rank` and returns its mask of tokens. Returns false if the group has failed. All lanes call
  // it.
  __device__ __forceinline__ bool Await(int rank, int chunk, uint32_t* tokens) const {
    return AwaitMessage(rank, chunk, plan.receive + Chunk(rank, chunk), Step::kRows, tokens);
  }
  __device__ __forceinline__ bool AwaitLead(int rank, int lead) const {
    uint32_t tokens;
    return AwaitMessage(rank, kMaxChunks + lead, ArrivedLead(rank, lead), Step::kMetadata, &tokens);
  }
  // Sends the failure word, if the group has failed, to the other nodes: to their rank of this place, which passes it
  // on; where ranks may be inactive, to every active rank. One thread calls it.
  __device__ __forceinline__ void PutFailure() const {
    const uint64_t word = LoadRelaxedSystem(&run_.mailbox->failure);
    const RankMask alive = run_.members & ~LoadDead(*run_.mailbox);
    for (int turn = 0; word && turn < Turns(); ++turn) {
      const int rank = RankTo(turn);
      if (!plan.masked || Holds(alive, rank)) transport_.Fail(rank, word);
    }
  }

  __device__ __forceinline__ bool Leave(const Call& call) const { return AwaitSources(call, transport_); }

  const RailPlan& plan;

 private:
  __device__ __forceinline__ int NodesIn(int turn) const { return plan.masked ? turn / plan.per_node : turn; }
  __device__ __forceinline__ int RankIn(int node, int turn) const {
    const int place = plan.masked ? (turn + plan.index) % plan.per_node : plan.index;
    return node % plan.nodes * plan.per_node + place;
  }
  __device__ __forceinline__ uint64_t Chunk(int rank, int chunk) const {
    return (static_cast<uint64_t>(Place(rank)) * plan.chunks + chunk) * plan.chunk_bytes;
  }
  __device__ __forceinline__ uint64_t Lead(int rank, int lead) const {
    return (static_cast<uint64_t>(Place(rank)) * plan.leads + lead) * plan.lead_bytes;
  }
  // Returns the counter of a chunk, or of a lead (leads follow all chunks).
  __device__ __forceinline__ uint32_t Signal(int source, bool on_rail, int message) const {
    const uint32_t parity = run_.epoch & 1;
    const int sources = Sources(plan);
    return on_rail ? ChunkSignals(sources) + (source / plan.per_node * 2 + parity) * kRailMessages + message
                   : PastSignals(sources) + (parity * sources + source) * kRailMessages + message;
  }
  __device__ __forceinline__ bool AwaitMessage(int rank, int message, uint64_t offset, Step step,
                                               uint32_t* tokens) const {
    const uint32_t signal = Signal(rank, OnRail(rank), message);
    uint64_t* const reached = expected_ + signal;
    const uint64_t value = *reached + 1;
    if (!transport_.Wait(signal, value, step, rank)) return false;
    const ChunkHeader* const header = reinterpret_cast<const ChunkHeader*>(run_.data[run_.rank] + offset);
    // Read once: lanes that took different branches would wait for each other for ever.
    bool good = true;
    *tokens = 0;
    if ((threadIdx.x & 31) == 0) {
      *tokens = LoadRelaxedSystem(&header->tokens);
      good = SameOperation(run_, LoadRelaxedSystem(&header->announcement), rank);
      if (good) *reached = value;
    }
    *tokens = __shfl_sync(0xFFFFFFFFu, *tokens, 0);
    return __shfl_sync(0xFFFFFFFFu, good, 0);
  }

  uint64_t* const expected_;
  const Running& run_;
  const Transport<Link> transport_;
  const uint64_t data_bytes_;  // as the operation has requested
};

}  // namespace xen_moe::XEN_MOE_VARIANT
