// The memory of a workspace that never moves: for each local rank its mailbox, its control block and its error record,
// and between nodes its rails. It is made before the first staging memory.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "cuda_kernels/core/workspace.h"
#include "ffi/groups.h"
#include "ffi/peer_mapping.h"
#include "ffi/rails.h"

namespace xen_moe {

// A local rank as handlers and kernels see it.
struct Member {
  int rank = -1;
  int ordinal = -1;
  Control* control = nullptr;     // device memory
  Mailbox* mailbox = nullptr;     // device memory
  ErrorRecord* record = nullptr;  // host memory
  RailMemory* rail = nullptr;     // device memory; null where the group is one node
  // The structure that MemoryProvider::connect has filled; null where all nodes are in this process.
  std::shared_ptr<const std::string> connection;
};

class PersistentMemory {
 public:
  PersistentMemory(const Job& job, const Groups& groups);

  // Within one process: allocates everything. After an error nothing is allocated.
  void MakeWithin();
  // Between processes, in this order: MakeAcross allocates; Show (collective) shows the mailbox to the other processes;
  // Join maps their mailboxes and fills the tables, once Rails::Connect has connected the nodes. All processes must
  // call these, and must call Leave where one of them has failed.
  void MakeAcross();
  void Show(double seconds);
  void Join(double seconds);
  // Frees the memory, but for a mailbox that other processes may have mapped: not every process may have one to
  // release.
  void Leave();
  // Within one process: frees everything. No kernel may use the memory any more.
  void Free();

  // Between processes: maps the other processes' mailboxes anew, and writes the tables. Nothing may run.
  void Remap();

  bool made() const { return !blocks_.empty(); }
  // The mailbox of local rank `i` as its process has allocated it.
  void* own(size_t i) const { return blocks_[i].mailbox; }
  // Returns whether kernels and other threads may use it.
  bool settled() const { return settled_.load(std::memory_order_acquire); }
  const std::vector<Member>& members() const { return members_; }
  Rails& rails() { return rails_; }

  // Sets the mailbox of local rank `i`, and its control block but for the tables, to zero, and its epoch to `epoch`.
  void Clear(size_t i, uint32_t epoch);
  void ClearRecord(size_t i);
  // Returns the latest epoch of any local rank.
  uint32_t NewestEpoch() const;
  // Returns whether everything that was queued on the GPUs ended within `seconds`.
  bool WaitIdle(double seconds) const;

 private:
  struct Block {  // of a local rank
    char* mailbox = nullptr;
    char* control = nullptr;
    std::array<char*, kMaxRanks> mailboxes{};  // of every rank of its group
    bool joined = false;                       // between processes: other processes may have mapped the mailbox
  };
  void FillControl(size_t i);
  void FreePinned();

  const Job& job_;
  const Groups& groups_;
  const PeerMapping mapping_;
  Rails rails_;
  std::vector<Block> blocks_;  // empty before the first growth
  std::vector<Member> members_;
  Pinned records_;
  std::atomic<bool> settled_{false};
};

}  // namespace xen_moe
