// Memory for the rails of a group of several nodes (cuda_kernels/node/rail_memory.h): counters that other nodes raise,
// and the tables through which a rank's kernels reach other nodes. It is made with the persistent memory, updated with
// every generation of staging memory, and cleared by a reset.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cuda_kernels/node/rail_memory.h"
#include "ffi/groups.h"

namespace xen_moe {

// The staging blocks in the ring of generations, entry `generation % kGenerations`; null: none.
struct StagingRing {
  char* own[kGenerations] = {};
  char* of_rank[kGenerations][kMaxRanks] = {};  // within one process only
};

class Rails {
 public:
  Rails(const Job& job, const Groups& groups) : job_(job), groups_(groups), ranks_(groups.local().size()) {}

  // Within one process: allocates counters and rail memory of every local rank. After an error the caller calls Free.
  void AllocateWithin();
  // Within one process, once every local rank has a mailbox: fills the table of local rank `i`.
  void FillWithin(size_t i, const std::vector<char*>& mailboxes);
  // Between processes: allocates the rail memory of the one local rank.
  void AllocateAcross();
  // Between processes, collective, once the mailbox has been shown: makes the connection that puts go over.
  void Connect(double seconds);
  // Between processes, after Connect: fills the table of the one local rank.
  void FillAcross(char* mailbox);

  // Tells the kernels of local rank `i` where staging memory lies; before they learn of the newest generation.
  void WriteStaging(size_t i, const StagingRing& ring);
  // Zeroes the counters, and the values that kernels expect in them. No put to or from local rank `i` may be in
  // progress.
  void Clear(size_t i);
  // Between processes: returns when no put from or to this rank is in progress. Ranks in the bit mask `gone`, whose
  // processes have ended, are not waited for. Throws MemoryError after `seconds`.
  void Settle(const uint64_t (&gone)[kGoneWords], double seconds);
  void Free(size_t i);

  RailMemory* memory(size_t i) const { return reinterpret_cast<RailMemory*>(ranks_[i].memory); }
  // The structure that MemoryProvider::connect has filled; null where all nodes are in this process.
  const std::shared_ptr<const std::string>& connection() const { return connection_; }
  void Disconnect() { connection_.reset(); }

 private:
  struct Rank {
    char* counters = nullptr;
    char* memory = nullptr;  // RailMemory
  };
  uint64_t CounterBytes() const { return sizeof(uint64_t) * RailSignals(groups_.ranks(), groups_.nodes()); }

  const Job& job_;
  const Groups& groups_;
  std::vector<Rank> ranks_;
  std::shared_ptr<const std::string> connection_;
  uint64_t settled_times_ = 0;  // since Connect
};

}  // namespace xen_moe
