// Symmetric memory as the kernels see it. Plain data: shared by kernels, launchers and the FFI layer.
//
// Every rank of a group owns one staging area that all ranks of the group can write. It has two halves; operation
// number `epoch` uses half `epoch & 1`. In a half, flags grow from the start and data lie at the end:
//   flags  uint32 words that only ever hold epochs. A word equal to the current epoch says "arrived". Because the word
//          holds the number of the operation, nothing is ever reset, and a stale word can never be mistaken.
//   data   whatever the operation stages (rows, metadata). The host makes the halves so large that no operation's data
//          reach any operation's flags.
// Why two halves are enough: an operation ends only after it has heard from every rank of the group in that same
// operation. So when a rank starts operation n+2, every other rank has started n+1, hence has finished n, and nobody
// reads or writes half `n & 1` any more.
#pragma once

#include <cstdint>

namespace xen_moe {

constexpr int kMaxRanks = 16;    // ranks of one NVLink domain
constexpr int kMaxSlots = 64;    // top-k
constexpr int kMaxBlocks = 256;  // thread blocks of one operation
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kScaleBlock = 128;  // elements that share one scale

// Who gave up, and what it was waiting for.
enum class Operation : uint32_t { kDispatch = 0, kRedispatch = 1, kCombine = 2, kExchange = 3 };

enum class Step : uint32_t {
  kNone = 0,
  kMetadata = 1,
  kRows = 2,
  kPresence = 3,
  kLocalBlocks = 4,
  kCredit = 5,
  kMemory = 6
};

// Written by a kernel that timed out, read by the host: mapped host memory. The high bit says that it is set.
struct ErrorWord {
  uint64_t packed;  // 1 << 63 | operation << 48 | step << 40 | rank << 32 | epoch
};

// State of one rank of one workspace, in this rank's own device memory. It never moves, so that a captured CUDA graph
// finds the staging areas through it even after they have grown.
struct alignas(128) Control {
  char* staging[kMaxRanks];  // each rank's staging area, as mapped into this device
  uint64_t half_bytes;
  char* scratch;        // private to this rank
  ErrorWord* error;     // mapped host memory
  uint32_t epoch;       // operations completed
  uint32_t ticket;      // blocks that have finished the current operation
  uint32_t barrier[2];  // blocks that have reached a barrier of the current operation
  uint32_t work[2];     // next unclaimed items of the current operation
  uint32_t abort;       // some block gave up
};

}  // namespace xen_moe
