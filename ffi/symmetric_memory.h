// Symmetric memory: makes, grows and frees the memory that cuda_kernels/core/workspace.h describes, for each group of
// devices (the ranks of one expert-parallel axis) and channel.
//
// Within one process `Devices` gives memory that all GPUs of the group reach; between processes (one per GPU)
// `MemoryProvider` does, and the processes agree first. Nothing here stops a running program: an operation that runs
// while memory grows finishes in the old generation, which is freed when every local rank has used a newer one.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda_kernels/core/workspace.h"
#include "cuda_kernels/node/rail_memory.h"
#include "ffi/agreement.h"
#include "ffi/devices.h"
#include "ffi/memory_provider.h"
#include "ffi/ticket_order.h"
#include "ffi/vote.h"

namespace xen_moe {

// A device of the job: process * kDevicesPerProcess + CUDA ordinal in that process. The ordinal of another process's
// device is a guess, used in error texts only.
using DeviceKey = int64_t;
constexpr int64_t kDevicesPerProcess = 4096;
inline int ProcessOf(DeviceKey key) { return static_cast<int>(key / kDevicesPerProcess); }
inline int OrdinalOf(DeviceKey key) { return static_cast<int>(key % kDevicesPerProcess); }

inline double SecondsSince(std::chrono::steady_clock::time_point began) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

// This process in its job: which devices there are, and where the process gets memory from.
struct Job {
  int process = 0, num_processes = 1;
  std::vector<DeviceKey> devices;  // of all processes
  Devices* gpus = nullptr;
  const MemoryProvider* provider = nullptr;  // null: no groups across processes
  const LinkKernels* link = nullptr;         // null: no groups across processes in several nodes
  Agree agree;
};

constexpr int64_t kNoRun = std::numeric_limits<int64_t>::min();
inline uint64_t Half(uint64_t flag_bytes, uint64_t data_bytes) { return flag_bytes + data_bytes; }

// A rank of this process, as handlers and kernels see it.
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

// The symmetric memory of the groups of one mesh axis on one channel that have ranks in this process.
class Workspace {
 public:
  // `devices`: groups of `ranks`, one after the other. `ranks_per_node`: consecutive ranks of a group that share
  // NVLink; equal to `ranks` where all do. Pointers to memory of another node stand in the table of the group's link
  // alone (cuda_kernels/node/rail_memory.h). `flights_of`: the workspace whose asynchronous operations this one serves,
  // and which makes and owns it; null: this workspace makes such a one for itself. Throws MemoryError where the
  // kernels, or the job's memory, cannot serve such groups.
  Workspace(Job job, std::vector<DeviceKey> devices, int ranks, int ranks_per_node, int channel,
            Workspace* flights_of = nullptr);
  // No kernel may use its memory any more: Registry::Leave waits for that.
  ~Workspace();
  Workspace(const Workspace&) = delete;

  // Grows until operations of `needs` fit. An open xm.Buffer (`Reserve`) does not grow; then MemoryError says what it
  // lacks. Between processes every process must call it; `seconds` limits the wait for them.
  void EnsureCapacity(const Needs& needs, double seconds);
  // Opens an xm.Buffer of `staging_bytes`, and Release closes it.
  void Reserve(uint64_t staging_bytes, double seconds);
  void Release(double seconds);
  // Tells the kernels of this workspace that still wait to end.
  void Interrupt(double seconds);
  // Starts again after a failure. Returns, or throws MemoryError, within about `seconds`.
  void Reset(double seconds);
  // For tests: starts again from this epoch, as after a reset. Nothing may be running.
  void SetEpochForTest(uint32_t epoch);
  // Called when a process has ended: every group that has a rank there fails. `clean`: the process had announced its
  // end; then the failure shows when an operation needs that rank. So it does in any case after FailOnlyWhenNeeded.
  void MarkDead(int process, bool clean);
  // Called once a program uses an `active` mask. From then on a dead rank fails the group only when an operation
  // actually needs it.
  void FailOnlyWhenNeeded() { masked_.store(true); }

  bool HasCapacity(const Needs& needs) const {
    return needs.flag_bytes <= capacity_[0].load(std::memory_order_acquire) &&
           needs.data_bytes <= capacity_[1].load(std::memory_order_relaxed) &&
           needs.scratch_bytes <= capacity_[2].load(std::memory_order_relaxed);
  }
  // Returns "", or why this run of a program must stop before it launches anything. A run that some device began before
  // the failure continues on all of its devices, with poisoned results: the devices of a run must launch the same
  // operations, XLA's own collectives included.
  std::string Admit(int64_t run);
  // Returns whether everything that was queued on its GPUs ended within `seconds`.
  bool WaitIdle(double seconds);
  bool Failed() const;
  // Returns "", or the failure of one of its groups.
  std::string Failure() const;

  // Returns the member that runs on this GPU, or null.
  const Member* Find(int ordinal) const;
  const std::vector<Member>& members() const { return members_; }
  int ranks() const { return ranks_; }
  int ranks_per_node() const { return ranks_per_node_; }
  int channel() const { return channel_; }
  // The workspace of asynchronous operations, which run beside the operations that use this one. Null in such a
  // workspace itself.
  Workspace* flights() const { return flights_.get(); }
  bool for_flights() const { return flights_of_ != nullptr; }
  const std::vector<DeviceKey>& devices() const { return devices_; }
  uint64_t staging_bytes() const { return staging_bytes_.load(); }
  uint64_t scratch_bytes() const { return scratch_bytes_.load(); }
  int generation() const { return static_cast<int>(newest_.load()); }
  // How many generations hold memory.
  int held() const { return held_.load(); }
  // Frees generations that no local rank uses any more, if there may be any. Cheap.
  void ReclaimIfStale();
  bool stale() const { return stale_.load(std::memory_order_relaxed); }
  bool across() const { return across_; }  // spans processes
  // The source of its memory.
  const char* memory() const { return across_ ? job_.provider->name : "peer access"; }
  // Launches by the host, and how many of them were captured into a graph. The replay of a graph counts as neither.
  std::atomic<uint64_t> launches{0}, captured{0};
  // Held shared while a kernel is launched, and exclusively while data changes on which running kernels rely.
  std::shared_mutex& launching() { return launching_; }

 private:
  struct Group {
    std::vector<DeviceKey> devices;  // in rank order
  };
  struct Block {  // a generation's memory of one member
    char* staging = nullptr;
    char* scratch = nullptr;
    std::array<char*, kMaxRanks> peers{};
    bool joined = false;  // between processes: other processes may have mapped it
  };
  struct Generation {
    uint32_t number = 0;
    uint64_t flag_bytes = 0, data_bytes = 0, scratch_bytes = 0;
    std::vector<Block> blocks;  // one for each member
    uint64_t ticket = 0;        // between processes: the name of the generation
  };
  struct PersistentBlock {  // the memory of one member that never moves
    char* mailbox = nullptr;
    char* control = nullptr;
    std::array<char*, kMaxRanks> mailboxes{};  // of every rank of its group
    bool joined = false;                       // between processes: other processes may have mapped the mailbox
    char* counters = nullptr;                  // null but where the group has several nodes in this process
    char* rail = nullptr;                      // null where the group is one node
    std::shared_ptr<const std::string> connection;
  };

  void MakeGroups();
  void MakePersistentWithin();
  void MakeRails(std::vector<PersistentBlock>* blocks);
  void AddRail(size_t member);
  void Connect(double seconds);
  void AddWindows();
  void Settle(double seconds);
  void WriteRail(size_t member);
  void ClearRail(size_t member);
  void FreePersistent(size_t member, const PersistentBlock& block);
  bool SeveralNodes() const { return ranks_per_node_ != ranks_; }
  int Nodes() const { return ranks_ / ranks_per_node_; }
  uint64_t CounterBytes() const { return sizeof(uint64_t) * RailSignals(ranks_, Nodes()); }
  // Returns whether the kernels of `member` may use pointers to memory of `rank`.
  bool SameNode(size_t member, int rank) const {
    return members_[member].rank / ranks_per_node_ == rank / ranks_per_node_;
  }
  void MakePersistentAcross();
  void JoinPersistent(double seconds);
  void LeavePersistent();
  void AddControl(size_t member);
  Generation PlanGeneration(const Needs& needs) const;
  void Grow(const Needs& needs, Generation next, double seconds);
  void GrowWithin(Generation* next, double seconds);
  void GrowAcross(Generation* next, double seconds);
  void Allocate(Generation* next);
  void Join(Generation* next, double seconds);
  Vote JoinInSteps(Generation* next, bool fresh, const Vote& outcome, const std::string& what, double seconds);
  void Show(void* own, bool* joined, double seconds);
  char* Peer(void* own, int rank) const;
  void Drop(Generation* generation);
  bool Undivided() const;
  bool HasRoom() const;
  bool WaitForRoom(double seconds);
  void Publish(Generation next, bool alone, double seconds);
  void WriteTables(bool alone);
  void Reclaim();
  void FreeOlderThan(uint32_t number);
  void Restart(uint32_t epoch);
  uint32_t NewestEpoch();
  MemoryTable TableOf(const Generation* generation, size_t member) const;
  uint32_t OldestInUse() const;
  void WriteFailure(size_t member, uint64_t failure);
  void WriteDead();
  std::unique_lock<std::timed_mutex> BeginChange(double seconds);
  std::string NextKey(const char* what);
  Votes Agree(const char* what, const Vote& vote, double seconds, bool without_dead = false);
  std::string WhereIs(const Group& group, int rank) const;
  void ReleaseRetired(const std::vector<Vote>& votes);
  std::vector<uint64_t> RetiredTickets() const;

  const Job job_;
  const std::vector<DeviceKey> devices_;
  const int ranks_, ranks_per_node_, channel_;
  Workspace* const flights_of_;
  std::unique_ptr<Workspace> flights_;
  bool across_ = false;
  std::vector<Group> groups_;    // with a rank in this process
  std::vector<Member> members_;  // the ranks of this process, group after group
  std::vector<size_t> group_of_;
  std::vector<PersistentBlock> persistent_;  // empty before the first growth
  std::atomic<bool> settled_{false};         // kernels and other threads may use persistent_
  Pinned records_;

  std::timed_mutex changing_;  // held by the one growth, release or reset in progress
  Needs needs_;                // the largest so far
  Needs known_;                // of programs that are older than the open xm.Buffer
  uint64_t reserved_ = 0;      // bytes of a half of an open xm.Buffer
  std::deque<Generation> generations_;
  std::vector<Generation> retired_;  // between processes: all processes release them together
  uint64_t agreements_ = 0;          // how many this workspace has entered
  uint64_t settled_times_ = 0;       // how often LinkKernels::settle was called since `connect`

  std::mutex dead_mutex_;
  std::set<int> dead_;  // processes
  std::atomic<bool> masked_{false};

  std::atomic<uint64_t> capacity_[3] = {};  // flag, data and scratch bytes of the newest generation
  std::atomic<uint64_t> staging_bytes_{0}, scratch_bytes_{0};
  std::atomic<uint32_t> newest_{0};
  std::atomic<int> held_{0};
  std::atomic<bool> stale_{false};  // there may be generations to free

  mutable std::shared_mutex launching_;
  std::mutex runs_mutex_;
  std::array<int64_t, 64> runs_;  // runs that began before any failure, by the run's number modulo 64
};

// How a process that has lowered nothing, but has loaded a program, learns about its job. Python gives both functions
// when it registers the handlers; the first program that needs them calls them, without any lock of this library.
struct JobSetup {
  // Calls Registry::Configure. Returns false where this process has no GPUs and compiles for other processes.
  std::function<bool()> describe;
  // Gives the registry a memory provider and an agreement. Collective over the job's processes. Throws MemoryError.
  std::function<void()> start_memory;
};

// All workspaces of this process.
class Registry {
 public:
  static Registry& Get();
  void Configure(Job job);
  void SetUp(JobSetup setup);
  // Returns whether this process knows its job, after asking JobSetup where it does not. False: it has no GPUs.
  bool KnowsJob();
  void SetProvider(const MemoryProvider* provider);
  void SetAgree(Agree agree);
  // `devices`: groups of `ranks`, one after the other; a negative number -1-i stands for the i-th device of the job.
  // Within one process the workspace lives as long as a caller holds it. Between processes, where no process can leave
  // alone, it lives until the process ends.
  // `flights`: returns the workspace for asynchronous operations, which lives as long as the other one.
  // `ranks_per_node`: as in Workspace; 0 stands for all ranks. Groups of another `ranks_per_node` have another
  // workspace.
  std::shared_ptr<Workspace> Find(std::vector<DeviceKey> devices, int ranks, int channel, bool flights = false,
                                  int ranks_per_node = 0);
  std::vector<std::shared_ptr<Workspace>> All();
  void ResetAll(double seconds);
  void MarkDead(int process, bool clean);
  // Returns the processes that have died and that a reset has left out: the same set in every process that is left.
  std::set<int> Gone();
  void LeaveOut(const std::vector<int>& processes);
  // Returns "", or the first failure of a group.
  std::string Failure();
  // Called when no caller holds `workspace` any more. It is deleted when its GPUs are idle; if it has failed by then,
  // it stays until ResetAll, so that Failure still returns its failure.
  void Leave(std::shared_ptr<Workspace> workspace);
  // For tests: forgets everything.
  void Clear();

 private:
  // Replaces places in the job (negative numbers) by the keys of these devices. `mutex_` is held.
  void ResolvePlaces(std::vector<DeviceKey>* devices) const;

  std::mutex mutex_;
  bool configured_ = false;
  Job job_;
  JobSetup setup_;
  // By devices; ranks, ranks per node and channel.
  std::map<std::pair<std::vector<DeviceKey>, std::array<int, 3>>, std::weak_ptr<Workspace>> workspaces_;
  std::vector<std::shared_ptr<Workspace>> kept_;
  std::set<int> gone_;
  std::mutex leaving_mutex_;
  std::vector<std::shared_ptr<Workspace>> leaving_;
  void Forget(const Workspace* gone);
};

// Frees memory that may still be in use, once its GPUs are idle, on a thread of its own.
void FreeWhenIdle(Devices* gpus, std::vector<int> ordinals, std::vector<std::pair<int, char*>> memory);

}  // namespace xen_moe
