// Symmetric memory as the kernels see it. Plain data: shared by kernels, launchers, the FFI layer and its fake
// provider.
//
// Each rank of a group has
//   Mailbox   a small allocation that every rank of the group can write: announcements, the failure word, and what
//             this rank shows to the other ranks. It never moves while the workspace lives.
//   staging   a large allocation that every rank can write. It is replaced when it must grow: one per generation.
//   Control   device memory of this rank alone: the tables through which it reaches the other ranks. It never moves, so
//             that a captured CUDA graph finds the staging areas after they have grown.
//   ErrorRecord  mapped host memory: what the host reads.
//
// A staging area has two halves; the operation with number `epoch` uses half `epoch & 1`. In a half, flags begin at the
// start, LL128 lines follow and data lie at the end:
//   flags  uint32 words that only ever hold epochs. A word equal to the current epoch means "arrived". Because the word
//          holds the number of the operation, no flag must be reset between operations, and a stale word is never taken
//          for a new one. Epochs wrap around after 2^32 operations: long before that every rank clears its flags and
//          lines (kClearAfter).
//   lines  128 bytes each, of which the last eight only ever hold epochs and the others any data (ll128.cuh): the
//          staging of the low-latency kernels. They write whole lines and nothing else, so a line that holds the
//          current epoch was written in this operation, whatever the shape of the operations that wrote it before.
//   data   the staging of all other operations (rows, metadata).
// The borders never move within a generation: no operation stores data where another operation looks for flags or
// lines. In a half, the first LineBorder(flag_bytes) of MemoryTable::flag_bytes bytes are flags, the rest are lines; a
// fresh generation and a reset clear all of them.
//
// Why two halves are enough: an operation ends only after it has seen every rank's announcement of the same operation.
// So when a rank starts operation n+2, every other rank has started n+1, hence has finished n, and no rank reads or
// writes half `n & 1` any more. The same holds for the announcements, which are kept by parity too.
//
// Generations: an announcement carries the newest generation that its rank has. The next operation uses the oldest
// generation of all ranks' announcements, which every rank computes from the same words: all ranks switch at the same
// operation. An operation that needs more memory than that generation has waits for the announcements of its own epoch
// first, and uses the oldest generation in them.
//
// Inactive ranks: an operation may be given a mask of the ranks that take part. No rank stores to an inactive rank or
// waits for it; "every rank" above means every active rank. An inactive rank only counts the operation, if it runs the
// operation at all; it may run ahead or fall behind. So when an operation has a rank that the operation before did not
// have, all its ranks first meet (`Mailbox::joins`): each has begun this operation, hence has ended everything before,
// and the argument above holds from there on. Such an operation takes its memory from its own announcements. After a
// start or a reset, the operation before counts as one without any ranks. The mask is part of the announced signature.
// A rank that becomes inactive may still be busy with the operation before, and the other ranks do not learn when it
// has ended: they may use the half again meanwhile. Therefore everything that is stored at a rank in an operation is
// awaited there before the operation ends, even rows that are dropped; and where ranks may be inactive, nothing is
// stored a second time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define XEN_MOE_ANYWHERE __host__ __device__
#else
#define XEN_MOE_ANYWHERE
#endif

namespace xen_moe {

constexpr int kMaxRanks = 256;  // ranks of a group: the failure word has eight bits for a rank
// groups of up to this many ranks run the ranks16 variant (variant.h), in which a set of ranks is one word
constexpr int kSmallGroup = 16;
constexpr int kRankWords = kMaxRanks / 32;
constexpr int kMaxSlots = 64;      // top-k
constexpr int kMaxExperts = 4096;  // of all ranks
constexpr int kMaxBlocks = 256;    // thread blocks of one operation
constexpr int kMaxParts = 64;      // parts of a row
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kScaleBlock = 128;  // elements that share one scale
constexpr int kGenerations = 4;   // memory tables that a rank keeps
constexpr int kRingRounds = 4;    // rounds of tokens that a ring of staged rows holds (rounds.cuh)
constexpr int kMaxRounds = 1024;  // rounds of one operation

enum class Operation : uint32_t { kDispatch = 0, kRedispatch = 1, kCombine = 2, kExchange = 3 };

// The event that a waiting rank waits for.
enum class Step : uint32_t {
  kArrival = 0,      // the other rank starts the operation
  kMetadata = 1,     // its routing
  kRows = 2,         // its rows
  kCredit = 3,       // it takes rows out of the ring
  kLocalBlocks = 4,  // blocks of this GPU
  kOwner = 5         // the operation before this one on the channel ends
};

enum class Cause : uint32_t {
  kNone = 0,
  kTimeout = 1,     // `rank` did not arrive; `other` gave up
  kMismatch = 2,    // `rank` and `other` run different operations under one epoch
  kDead = 3,        // the process of `rank` has ended: written by the host
  kMemory = 4,      // `rank` has released its memory, or has too little
  kIndex = 5,       // `rank` was given a handle with impossible counts
  kConcurrent = 6,  // on `rank`, another operation held the channel for too long
  kReset = 7        // the host asks all kernels to end
};

// The failure word: 1 << 63 | cause << 56 | operation << 52 | step << 48 | rank << 40 | other << 32 | epoch. 0: none.
struct Failure {
  Cause cause;
  Operation operation;
  Step step;
  int rank;   // the root: the rank that did not do its part
  int other;  // the rank that noticed
  uint32_t epoch;
};
XEN_MOE_ANYWHERE inline uint64_t PackFailure(const Failure& f) {
  return 1ull << 63 | static_cast<uint64_t>(f.cause) << 56 | static_cast<uint64_t>(f.operation) << 52 |
         static_cast<uint64_t>(f.step) << 48 | static_cast<uint64_t>(f.rank & 0xFF) << 40 |
         static_cast<uint64_t>(f.other & 0xFF) << 32 | f.epoch;
}
XEN_MOE_ANYWHERE inline Failure UnpackFailure(uint64_t word) {
  return {static_cast<Cause>(word >> 56 & 0x7F), static_cast<Operation>(word >> 52 & 0xF),
          static_cast<Step>(word >> 48 & 0xF),   static_cast<int>(word >> 40 & 0xFF),
          static_cast<int>(word >> 32 & 0xFF),   static_cast<uint32_t>(word)};
}

// An announcement: epoch << 32 | signature << 8 | generation. The generation is the low byte of a counter: two
// generations are compared by their difference, which is less than kGenerations.
XEN_MOE_ANYWHERE inline uint64_t PackAnnouncement(uint32_t epoch, uint32_t signature, uint32_t generation) {
  return static_cast<uint64_t>(epoch) << 32 | (signature & 0xFFFFFF) << 8 | (generation & 0xFF);
}
XEN_MOE_ANYWHERE inline uint32_t AnnouncedEpoch(uint64_t word) { return static_cast<uint32_t>(word >> 32); }
XEN_MOE_ANYWHERE inline uint32_t AnnouncedSignature(uint64_t word) { return static_cast<uint32_t>(word) >> 8; }
XEN_MOE_ANYWHERE inline uint32_t AnnouncedGeneration(uint64_t word) { return static_cast<uint32_t>(word) & 0xFF; }
XEN_MOE_ANYWHERE inline bool OlderGeneration(uint32_t a, uint32_t b) {
  return static_cast<int8_t>(static_cast<uint8_t>(a - b)) < 0;
}

// The word that shows the state of a rank: epoch << 32 | waits << 31 | beat << 16 | step << 8 | rank. Without `waits`
// the rank has started the epoch and is not known to wait. A waiting rank keeps changing the beat: a rank that has been
// stopped shows the same word for ever.
XEN_MOE_ANYWHERE inline uint64_t PackProgress(uint32_t epoch) { return static_cast<uint64_t>(epoch) << 32; }
XEN_MOE_ANYWHERE inline uint64_t PackWaiting(uint32_t epoch, Step step, int rank, uint32_t beat = 0) {
  return static_cast<uint64_t>(epoch) << 32 | 1u << 31 | (beat & 0x7FFF) << 16 | static_cast<uint32_t>(step) << 8 |
         static_cast<uint32_t>(rank);
}
XEN_MOE_ANYWHERE inline uint32_t ProgressEpoch(uint64_t word) { return static_cast<uint32_t>(word >> 32); }
XEN_MOE_ANYWHERE inline bool ProgressWaits(uint64_t word) { return word >> 31 & 1; }
XEN_MOE_ANYWHERE inline Step ProgressStep(uint64_t word) { return static_cast<Step>(word >> 8 & 0xFF); }
XEN_MOE_ANYWHERE inline int ProgressRank(uint64_t word) { return static_cast<int>(word & 0xFF); }

// Returns the epoch after `epoch`. It skips 0, because fresh flags are 0; parity keeps alternating.
XEN_MOE_ANYWHERE inline uint32_t NextEpoch(uint32_t epoch) { return epoch == 0xFFFFFFFFu ? 2u : epoch + 1u; }
// A half is cleared again this many epochs after its last clearing, so that no word survives until its epoch comes
// again.
constexpr uint32_t kClearAfter = 1u << 30;
// Returns whether epoch `a` is older than `b`, across the wrap-around.
XEN_MOE_ANYWHERE inline bool EpochBefore(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) < 0; }

// Shapes of a dispatch, redispatch or combine, as a descriptor has them.
struct RoutedShapes {
  uint32_t tokens;
  uint32_t top_k;
  uint32_t experts;
  uint32_t hidden;
  uint32_t capacity;
  uint32_t alignment;
  uint32_t parts : 8;
  uint32_t ring_tokens : 24;      // 0: rows do not lie in rings
  uint32_t metadata_slices : 16;  // dispatch only
  uint32_t chunk_tokens : 16;     // 0: all ranks share one node
};

// Shapes of an exchange, as a descriptor has them.
struct ExchangeShapes {
  uint32_t operand_units;
  uint32_t ring_chunks;
  uint32_t chunk_bytes;
  uint32_t unit_bytes_low;  // the low half of the bytes of a unit
  uint32_t output_units;
  uint32_t unit_bytes_high;
  uint32_t lanes;
  uint32_t unused;  // 0
};

// An operation in full, as the error names it. All of it must be equal on all ranks. `Describe` in params.h makes it.
struct Descriptor {
  uint32_t operation;  // enum Operation
  uint32_t dtype;      // the host's code
  uint32_t wire, layout;
  uint32_t flags;  // kDescribed...
  uint32_t ranks, ranks_per_node;
  union {
    RoutedShapes routed;
    ExchangeShapes exchange;  // where `operation` is kExchange
  };
  uint32_t site;  // tells call sites apart that are otherwise equal, if the host gives it; equal on all ranks
};
static_assert(sizeof(RoutedShapes) == sizeof(ExchangeShapes), "every word of a descriptor is initialized and compared");
static_assert(sizeof(Descriptor) == 64, "published as sixteen words");
constexpr uint32_t kDescribedUe8m0 = 1, kDescribedScaled = 2, kDescribedWeighted = 4, kDescribedRagged = 8,
                   kDescribedLowLatency = 16, kDescribedByHome = 32, kDescribedMove = 64, kDescribedGather = 128,
                   kDescribedNumbered = 256, kDescribedByRank = 512;
// From this bit on: the inactive ranks, one bit each in groups of up to kSmallGroup ranks, else a hash. The host leaves
// it 0.
constexpr int kDescribedInactiveShift = 16;

// 24 bits of a hash (FNV-1a over words, then mixed).
XEN_MOE_ANYWHERE inline uint32_t Signature(const Descriptor& d) {
  uint32_t words[16];
  memcpy(words, &d, sizeof(words));
  uint32_t h = 2166136261u;
  for (int i = 0; i < 16; ++i) {
    h = (h ^ words[i]) * 16777619u;
    h ^= h >> 15;
  }
  h *= 0x85EBCA6Bu;
  return (h ^ h >> 13) & 0xFFFFFF;
}

// One per rank, in memory that all ranks of the group can write and read. Zeroed when allocated.
struct alignas(128) Mailbox {
  // Written by the ranks of the group.
  uint64_t announcements[2][kMaxRanks];  // [epoch parity][source rank]
  uint64_t joins[kMaxRanks];             // [source rank], in the format of an announcement; 0: none, or consumed
  // Written by the first rank that gives up; 0: none. It has a cache line of its own because it is polled.
  alignas(128) uint64_t failure;
  // Written by the host: a mask of the ranks whose process has ended. No memory of such a rank is read or written.
  uint32_t dead[kRankWords];
  uint64_t unread;  // written by ranks of other nodes: the payload of a signal that carries no data
  // Written by ranks of other nodes, repeatedly while they wait: what each rank of their node shows in `progress`.
  alignas(128) uint64_t told[kMaxRanks];
  // Written by this rank alone; the other ranks read it after a failure.
  alignas(128) Descriptor descriptor;  // of the operation that `progress` is about
  uint64_t progress;
  uint64_t waited_ns;  // how long this rank had waited when it gave up
};

// A generation of staging areas, as one rank sees it.
struct MemoryTable {
  uint32_t generation;       // the first two fields are read together with Control::owner: see there
  uint32_t members;          // only in Control::current: mask of the ranks that were active in the operation before
  char* staging[kMaxRanks];  // of each rank, as mapped into this device; null: released
  char* scratch;             // private to this rank
  uint64_t flag_bytes;       // of a half: flags and lines
  uint64_t data_bytes;       // of a half; a half has flag_bytes + data_bytes
  uint64_t scratch_bytes;
  uint32_t more_members[kRankWords - 1];  // the further words of `members`
};

// LineBorder returns where lines begin in a half whose flags and lines take `flag_bytes` together: a fixed share, so
// that one number determines the room for both. FlagAndLineBytes returns the bytes that have room for the given bytes
// of flags and for the given bytes of lines.
constexpr uint64_t kLineShare = 7;
XEN_MOE_ANYWHERE inline uint64_t LineBorder(uint64_t flag_bytes) { return flag_bytes / kLineShare / 128 * 128; }
XEN_MOE_ANYWHERE inline uint64_t FlagAndLineBytes(uint64_t flags, uint64_t lines) {
  const uint64_t for_flags = (flags + 127) / 128 * 128 * kLineShare;
  const uint64_t for_lines = (lines * kLineShare + kLineShare - 2) / (kLineShare - 1);
  return ((for_flags > for_lines ? for_flags : for_lines) + 255) / 256 * 256;
}

// The memory that an operation needs of a generation.
struct Needs {
  uint64_t flag_bytes = 0;
  uint64_t data_bytes = 0;
  uint64_t scratch_bytes = 0;
};
XEN_MOE_ANYWHERE inline bool Suffices(const MemoryTable& table, const Needs& needs) {
  return needs.flag_bytes <= table.flag_bytes && needs.data_bytes <= table.data_bytes &&
         needs.scratch_bytes <= table.scratch_bytes;
}

// The record that the host reads without asking the device. Zeroed when allocated.
struct alignas(64) ErrorRecord {
  uint64_t failure;     // as in Mailbox; written last
  uint64_t waited_ns;   // how long `other` had waited
  Descriptor of_rank;   // the root's operation (its latest one, if it never started this one)
  Descriptor of_other;  // the operation of the rank that noticed
  // Not about errors: the generation (low byte) of the newest completed operation. The host may free older generations
  // when every local rank has reached this one.
  uint32_t generation;
};

// State of one rank of one workspace. The host writes the first part: `memory` and `newest` at any time (the table
// first, then the number, in one stream), the other fields while no operation runs. It may change the second part only
// while no operation runs: at the start and after reset() all of it is zero except `epoch` and `current` (equal on all
// ranks: the table of a generation that all ranks have).
struct alignas(128) Control {
  Mailbox* mailbox[kMaxRanks];  // each rank's, as mapped into this device
  ErrorRecord* error;
  MemoryTable memory[kGenerations];  // generation g: entry g % kGenerations
  uint32_t newest;                   // this rank has all generations up to this one

  // The running operation and its epoch, in one 8-byte word: read together, claimed by its first half.
  alignas(128) uint32_t owner;  // Call::call_id of the running operation; 0: none
  uint32_t epoch;               // completed operations, counted by NextEpoch
  MemoryTable current;  // the memory of the next operation; its first words are read together with `owner` and `epoch`
  alignas(128) uint32_t ticket;                   // counts the blocks that have finished the current operation
  uint32_t claimed[7];                            // next unclaimed item of each kind of work of the current operation
  uint32_t completed[2];                          // items of the current operation that are done
  uint32_t mirrored;                              // the failure has been written to `error`
  uint32_t reported;                              // generation written to `error`
  uint32_t cleared[2];                            // for each half: the epoch in which its flags were last set to 0
  uint64_t told_ns;                               // when this rank last notified other nodes of the waits here
  alignas(128) uint32_t started[2 * kMaxBlocks];  // fixed shares of work: the epoch in which a block began the share
  uint32_t visible[kMaxBlocks];  // for each block: the last low-latency epoch whose rows are visible to other blocks
  alignas(128) uint32_t taken[kMaxRounds];  // items of a round that are done; 0 again when all are (rounds.cuh)
};

static_assert(offsetof(Control, epoch) == offsetof(Control, owner) + 4, "read as one word");
static_assert(offsetof(Control, current) == offsetof(Control, owner) + 8,
              "its generation and members are read with them");
static_assert(256 % kGenerations == 0, "the low byte of a generation tells its table");

}  // namespace xen_moe
