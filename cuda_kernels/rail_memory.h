// What the host keeps for a rank of a group of several nodes, beside its Control. Plain data: no CUDA header.
//
//   counters     raised by ranks of other nodes, one for each chunk that can come from there (rail_plan.h). In memory
//                that they can write.
//   RailMemory   device memory of this rank alone: what its counters have reached, and how its link finds the others.
//
// All of it is zero, but for the link's table, before the first operation and after a reset; both clear it while no
// operation of any rank is under way: a counter that somebody still raises would be wrong for good.
#pragma once

#include "workspace.h"

namespace xen_moe {

constexpr int kMaxNodes = 32;    // a lane for each (node_combine.cuh)
constexpr int kMaxChunks = 256;  // of one rank to one node
constexpr int kLeadChunks = 8;   // chunks of a dispatch whose routing goes ahead of them together
constexpr int kMaxLeads = kMaxChunks / kLeadChunks;
constexpr int kRailMessages = kMaxChunks + kMaxLeads;  // of one rank to one node: chunks, then what goes ahead
constexpr int kMaxDirectChunks = 16;                   // of one rank to another, in an operation of few tokens
// A rank's counters. The same rank raises a counter in every operation: nobody's signal is taken for another one's.
// Those of an operation and the next are different ones, by the parity of its number: a rank may send the chunks of the
// next before the others have taken what it sent in this one, and no order is promised between the two. Chunks that go
// from rank to rank, and so those of ranks that may be out, are for kNarrowRanks ranks at most.
constexpr int kDirectSignals = 0;                                                   // [parity][rank][chunk]: direct.cuh
constexpr int kJoinSignals = kDirectSignals + 2 * kNarrowRanks * kMaxDirectChunks;  // [rank]: direct.cuh
constexpr int kPastSignals = kJoinSignals + kMaxRanks;  // [parity][rank][message]: past the rails
constexpr int kChunkSignals = kPastSignals + 2 * kNarrowRanks * kRailMessages;  // [node][parity][message]: rail.cuh
constexpr int kRailSignals = kChunkSignals + kMaxNodes * 2 * kRailMessages;     // of all kinds
constexpr uint64_t kCounterBytes = kRailSignals * sizeof(uint64_t);

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
  uint64_t gone;                 // bit mask of ranks whose processes had ended by then: what was put to them never ends
};

struct alignas(128) RailMemory {
  uint64_t expected[kRailSignals];  // what each own counter has reached (direct: with the epoch, see there)
  PeerTable peers;                  // one process
  WindowTable windows;              // several
};

}  // namespace xen_moe
