// Memory that the host keeps for a rank of a group of several nodes, beside its Control. Plain data: no CUDA header.
//
//   counters     raised by ranks of other nodes, one for each chunk that can come from there (rail_plan.h). In memory
//                that those ranks can write.
//   RailMemory   device memory of this rank alone: what its counters have reached, and how its link reaches other
//   ranks.
//
// All of it is zero, except the link's table, before the first operation and after a reset. Both clear it while no
// operation of any rank is running: a counter that a rank raises during the clearing would stay wrong.
#pragma once

#include "cuda_kernels/core/workspace.h"

namespace xen_moe {

constexpr int kMaxNodes = 32;    // one lane for each (node/combine.cuh)
constexpr int kMaxChunks = 256;  // from one rank to one node
constexpr int kLeadChunks = 8;   // chunks of a dispatch whose routing is sent ahead together
constexpr int kMaxLeads = kMaxChunks / kLeadChunks;
constexpr int kRailMessages = kMaxChunks + kMaxLeads;  // from one rank to one node: chunks, then leads
constexpr int kMaxDirectChunks = 16;                   // from one rank to another, in an operation of few tokens
// A rank's counters. The same rank raises a counter in every operation, so a signal of one rank is never taken for
// another rank's. Consecutive operations use different counters, by the parity of the epoch: a rank may send the chunks
// of the next operation before the other ranks have taken its chunks of this one, and no order is promised between the
// two. Chunks from rank to rank are counted by rank. `sources` is the number of ranks that there is room for:
// kSmallGroup in all groups of up to that many ranks (rank_mask.cuh), which have the same counters at the same places;
// in a larger group, its own number of ranks.
constexpr int kDirectSignals = 0;                          // [parity][source][chunk]: direct.cuh
XEN_MOE_ANYWHERE constexpr int JoinSignals(int sources) {  // [rank]: direct.cuh
  return kDirectSignals + 2 * sources * kMaxDirectChunks;
}
XEN_MOE_ANYWHERE constexpr int PastSignals(int sources) {  // [parity][source][message]: bypassing the rails
  return JoinSignals(sources) + kMaxRanks;
}
XEN_MOE_ANYWHERE constexpr int ChunkSignals(int sources) {  // [node][parity][message]: rail.cuh
  return PastSignals(sources) + 2 * sources * kRailMessages;
}
constexpr int SourcesOf(int ranks) { return ranks <= kSmallGroup ? kSmallGroup : ranks; }
// The number of counters of all kinds in a group of `ranks` ranks in `nodes` nodes; kRailSignals is that of groups of
// up to kSmallGroup ranks.
constexpr int kRailSignals = ChunkSignals(kSmallGroup) + kMaxNodes * 2 * kRailMessages;
constexpr int RailSignals(int ranks, int nodes) {
  return ranks <= kSmallGroup ? kRailSignals : ChunkSignals(ranks) + nodes * 2 * kRailMessages;
}
// Ranks whose processes have ended: a bit for each rank.
constexpr int kGoneWords = kMaxRanks / 64;

// The memory of the other ranks, as one rank sees it, for puts by pointer (peer_transport.cuh). The host writes a
// generation's entry before any operation may use that generation.
struct alignas(128) PeerTable {
  char* staging[kGenerations][kMaxRanks];  // generation g: entry g % kGenerations
  uint64_t* counters[kMaxRanks];           // of each rank
  Mailbox* mailbox[kMaxRanks];
};

// The table of peers for puts over NCCL (nccl_transport.cuh), between processes. Windows belong to NCCL and are opaque
// here; the counters are NCCL's too, and are never reset: they count from `base`. The host writes the fields before
// `reserved`.
struct alignas(128) WindowTable {
  void* staging[kGenerations];  // of the own block of a generation: entry g % kGenerations; null: none
  void* mailbox;
  int ranks;
  int process[kMaxRanks];        // of each rank: its rank in NCCL's communicator
  uint32_t reserved[kMaxRanks];  // puts to each rank so far
  uint64_t base[kRailSignals];   // the value of each own counter of NCCL's at the last reset
  uint64_t gone[kGoneWords];     // ranks whose processes had ended by then: puts to them never complete
};

struct alignas(128) RailMemory {
  uint64_t expected[kRailSignals];  // what each own counter has reached (direct: together with the epoch, direct.cuh)
  PeerTable peers;                  // for nodes of one process
  WindowTable windows;              // for nodes of several processes
};
// A group of more than kSmallGroup ranks has other counters: after its RailMemory lie, for each of them,
// WindowTable::base and then `expected`, in place of those above.
static_assert(offsetof(RailMemory, windows) + sizeof(WindowTable) == sizeof(RailMemory), "LargeGroupBase");
XEN_MOE_ANYWHERE inline uint64_t* LargeGroupBase(WindowTable* table) { return reinterpret_cast<uint64_t*>(table + 1); }
inline uint64_t RailBytes(int ranks, int nodes) {
  return sizeof(RailMemory) + (ranks <= kSmallGroup ? 0 : 2 * sizeof(uint64_t) * RailSignals(ranks, nodes));
}
inline uint64_t* ExpectedOf(RailMemory* rail, int ranks, int nodes) {
  return ranks <= kSmallGroup ? rail->expected : LargeGroupBase(&rail->windows) + RailSignals(ranks, nodes);
}

}  // namespace xen_moe
