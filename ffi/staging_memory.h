// The staging memory of a workspace: generations that grow, are agreed on between processes, are published to kernels
// through a ring of tables (Control::memory), and are freed once every local rank has used a newer one.
//
// Growth is transactional: after an error everything is as it was. Nothing here stops a running program: an operation
// that runs while memory grows finishes in the generation that it began with.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "ffi/changes.h"
#include "ffi/persistent_memory.h"

namespace xen_moe {

class StagingMemory {
 public:
  StagingMemory(const Job& job, const Groups& groups, Changes& changes, PersistentMemory& persistent, int channel);

  // Grows until operations of `needs` fit. An open xm.Buffer does not grow; MemoryError says what it lacks. Between
  // processes every process must call it; `seconds` limits the wait for them.
  void EnsureCapacity(const Needs& needs, double seconds);
  bool HasCapacity(const Needs& needs) const {
    return needs.flag_bytes <= capacity_[0].load(std::memory_order_acquire) &&
           needs.data_bytes <= capacity_[1].load(std::memory_order_relaxed) &&
           needs.scratch_bytes <= capacity_[2].load(std::memory_order_relaxed);
  }
  // Opens an xm.Buffer of `staging_bytes`, and Release closes it.
  void Reserve(uint64_t staging_bytes, double seconds);
  void Release(double seconds);

  // Frees generations that no local rank uses any more, if there may be any. Cheap.
  void ReclaimIfStale();
  bool stale() const { return stale_.load(std::memory_order_relaxed); }
  // Begins the launch of an operation of `needs`, which lasts as long as the lock that it returns. An operation without
  // flags uses no staging memory (cuda_kernels/core/alone.h), so that growth need not wait for its end.
  std::shared_lock<std::shared_mutex> Launch(const Needs& needs) {
    std::shared_lock<std::shared_mutex> lock(launching_);
    if (needs.flag_bytes != 0) used_.store(true, std::memory_order_relaxed);
    return lock;
  }
  // Held shared while a kernel is launched, and exclusively while data changes on which running kernels rely.
  std::shared_mutex& launching() { return launching_; }

  // For a reset, while `launching` is held exclusively and no GPU is busy: frees all generations but the newest and
  // zeroes its flags.
  void ClearFlags();
  // Writes the ring of tables of every local rank. `alone`: nothing runs, and the newest generation is used from now
  // on.
  void WriteTables(bool alone);
  // Between processes: keeps the newest generation alone, which is number `number` from now on, and maps the other
  // processes' memory of it anew. For a reset, as ClearFlags.
  void Remap(uint32_t number);
  // Returns the newest generation's block of local rank 0, and sets `needs` to its sizes; null where there is none.
  void* Newest(Needs* needs) const;
  // Within one process: frees all generations. No kernel may use the memory any more.
  void FreeAll();

  uint64_t staging_bytes() const { return staging_bytes_.load(); }
  uint64_t scratch_bytes() const { return scratch_bytes_.load(); }
  int newest() const { return static_cast<int>(newest_.load()); }
  int held() const { return held_.load(); }  // how many generations hold memory

 private:
  struct Block {  // a generation's memory of one local rank
    char* staging = nullptr;
    char* scratch = nullptr;
    std::array<char*, kMaxRanks> peers{};
    bool joined = false;  // between processes: other processes may have mapped it
  };
  struct Generation {
    uint32_t number = 0;
    uint64_t flag_bytes = 0, data_bytes = 0, scratch_bytes = 0;
    std::vector<Block> blocks;  // of every local rank
    uint64_t ticket = 0;        // between processes: the name of the generation
    uint64_t half() const { return flag_bytes + data_bytes; }
  };

  Generation Plan(const Needs& needs) const;
  void Grow(const Needs& needs, Generation next, double seconds);
  void GrowWithin(Generation* next, double seconds);
  void GrowAcross(Generation* next, double seconds);
  void Allocate(Generation* next);
  void TakeUndivided(Generation* next);
  void ReturnUndivided(Generation* next, bool taken);
  void DropUndivided();
  void Join(Generation* next, double seconds);
  Vote JoinInSteps(Generation* next, bool fresh, const Vote& outcome, const std::string& what, double seconds);
  void Drop(Generation* generation);
  bool Undivided() const;
  bool Divides(const Generation& next) const;
  bool HasRoom() const;
  bool WaitForRoom(double seconds);
  // Waits until no operation that uses staging memory runs. Returns false if one still does after `seconds`.
  bool WaitUnused(double seconds) const { return !used_ || persistent_.WaitIdle(seconds); }
  void Publish(Generation next, bool alone, double seconds);
  void Reclaim();
  void FreeOlderThan(uint32_t number);
  uint32_t OldestInUse() const;
  MemoryTable TableOf(const Generation* generation, size_t i) const;
  StagingRing RingOf(size_t i) const;
  std::vector<uint64_t> RetiredTickets() const;
  void ReleaseRetired(const std::vector<Vote>& votes);
  void ReleaseAcross(std::deque<Generation> old, bool idle, double seconds);
  void ReleaseWithin(std::deque<Generation> old, bool idle);

  const Job& job_;
  const Groups& groups_;
  Changes& changes_;
  PersistentMemory& persistent_;
  const PeerMapping mapping_;
  const int channel_;

  // Changed under the lock of Changes.
  Needs needs_;            // the largest so far
  Needs known_;            // of programs that are older than the open xm.Buffer
  uint64_t reserved_ = 0;  // bytes of a half of an open xm.Buffer
  std::deque<Generation> generations_;
  std::vector<Generation> retired_;  // between processes: all processes release them together

  std::atomic<uint64_t> capacity_[3] = {};  // flag, data and scratch bytes of the newest generation
  std::atomic<uint64_t> staging_bytes_{0}, scratch_bytes_{0};
  std::atomic<uint32_t> newest_{0};
  std::atomic<int> held_{0};
  std::atomic<bool> stale_{false};  // there may be generations to free
  std::atomic<bool> used_{false};   // an operation that uses staging memory has been launched, or captured into a graph
  std::shared_mutex launching_;
};

// Frees memory that may still be in use, once its GPUs are idle, on a thread of its own.
void FreeWhenIdle(Devices* gpus, std::vector<int> ordinals, std::vector<std::pair<int, char*>> memory);

}  // namespace xen_moe
