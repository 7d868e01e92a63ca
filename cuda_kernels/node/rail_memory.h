// What the host keeps for a rank of a group of several nodes, beside its Control. Plain data: no CUDA header.
//
//   counters     raised by ranks of other nodes, one for each chunk that can come from there (rail_plan.h). In memory
//                that they can write.
//   RailMemory   device memory of this rank alone: what its counters have reached, and how its link finds the others.
//
// All of it is zero, but for the link's table, before the first operation and after a reset; both clear it while no
// operation of any rank is under way: a counter that somebody still raises would be wrong for good.
#pragma once

#include "cuda_kernels/core/workspace.h"

namespace xen_moe {

constexpr int kMaxNodes = 32;    // a lane for each (node/combine.cuh)
constexpr int kMaxChunks = 256;  // of one rank to one node
constexpr int kLeadChunks = 8;   // chunks of a dispatch whose routing goes ahead of them together
constexpr int kMaxLeads = kMaxChunks / kLeadChunks;
constexpr int kRailMessages = kMaxChunks + kMaxLeads;  // of one rank to one node: chunks, then what goes ahead
constexpr int kMaxDirectChunks = 16;                   // of one rank to another, in an operation of few tokens
// A rank's counters. The same rank raises a counter in every operation: nobody's signal is taken for another one's.
// Those of an operation and the next are different ones, by the parity of its number: a rank may send the chunks of the
// next before the others have taken what it sent in this one, and no order is promised between the two. What comes from
// rank to rank is counted by rank. `sources` is how many ranks there is room for: kSmallGroup in all groups of so many
// (rank_mask.cuh), which have the same counters at the same places, and in a larger group its own ranks.
constexpr int kDirectSignals = 0;                          // [parity][source][chunk]: direct.cuh
XEN_MOE_ANYWHERE constexpr int JoinSignals(int sources) {  // [rank]: direct.cuh
  return kDirectSignals + 2 * sources * kMaxDirectChunks;
}
XEN_MOE_ANYWHERE constexpr int PastSignals(int sources) {  // [parity][source][message]: past the rails
  return JoinSignals(sources) + kMaxRanks;
}
XEN_MOE_ANYWHERE constexpr int ChunkSignals(int sources) {  // [node][parity][message]: rail.cuh
  return PastSignals(sources) + 2 * sources * kRailMessages;
}
constexpr int SourcesOf(int ranks) { return ranks <= kSmallGroup ? kSmallGroup : ranks; }
// Of all kinds, in a group of `ranks` ranks in `nodes` nodes; the first: of up to kSmallGroup ranks.
constexpr int kRailSignals = ChunkSignals(kSmallGroup) + kMaxNodes * 2 * kRailMessages;
constexpr int RailSignals(int ranks, int nodes) {
  return ranks <= kSmallGroup ? kRailSignals : ChunkSignals(ranks) + nodes * 2 * kRailMessages;
}
// Ranks whose processes have ended: a bit each.
constexpr int kGoneWords = kMaxRanks / 64;

// Where everything of the other ranks lies, as one rank sees it, for puts by pointer (peer_transport.cuh). The host
// writes a generation's entry before it lets anybody use that generation.
struct alignas(128) PeerTable {
  char* staging[kGenerations][kMaxRanks];  // generation g: entry g % kGenerations
  uint64_t* counters[kMaxRanks];           // each rank's
  Mailbox* mailbox[kMaxRanks];
};

// The same for puts over NCCL (nccl_transport.cuh), between processes. Windows are NCCL's, and opaque here; counters
// are NCCL's too, and are never set back: they count from `base`. The host writes what is before `reserved`.
struct alignas(128) WindowTable {
  void* staging[kGenerations];  // of the own block of a generation: entry g % kGenerations; null: none
  void* mailbox;
  int ranks;
  int process[kMaxRanks];        // of each rank: its rank in NCCL's communicator
  uint32_t reserved[kMaxRanks];  // puts to each rank so far
  uint64_t base[kRailSignals];   // what each own counter of NCCL's stood at at the last reset
  uint64_t gone[kGoneWords];     // ranks whose processes had ended by then: what was put to them never ends
};

struct alignas(128) RailMemory {
  uint64_t expected[kRailSignals];  // what each own counter has reached (direct: with the epoch, see there)
  PeerTable peers;                  // one process
  WindowTable windows;              // several
};
// A group of more than kSmallGroup ranks has other counters: behind its RailMemory lie, for each of them,
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
