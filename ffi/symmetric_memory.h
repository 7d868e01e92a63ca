// Symmetric memory: for each group of devices (the ranks of one expert-parallel axis) and channel, what
// cuda_kernels/core/workspace.h describes, made, grown by generations, and given back.
//
// Within one process `Devices` gives memory that all GPUs of the group reach; between processes (one per GPU)
// `MemoryProvider` does, and the processes agree first. Nothing here stops a running program: an operation that runs
// while memory grows finishes in the old generation, which is freed when every local rank has used a newer one.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
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

namespace xen_moe {

// A device of the job: process * kDevicesPerProcess + CUDA ordinal in that process. The ordinal of another process's
// device is a guess, for error texts.
using DeviceKey = int64_t;
constexpr int64_t kDevicesPerProcess = 4096;
inline int ProcessOf(DeviceKey key) { return static_cast<int>(key / kDevicesPerProcess); }
inline int OrdinalOf(DeviceKey key) { return static_cast<int>(key % kDevicesPerProcess); }

inline double SecondsSince(std::chrono::steady_clock::time_point began) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

// This process in its job, and what it makes memory with.
struct Job {
  int process = 0, num_processes = 1;
  std::vector<DeviceKey> devices;  // all of the job
  Devices* gpus = nullptr;
  const MemoryProvider* provider = nullptr;  // null: no groups across processes
  const LinkKernels* link = nullptr;         // null: none of them in several nodes
  Agree agree;
};

constexpr int64_t kNoRun = std::numeric_limits<int64_t>::min();
inline uint64_t Half(uint64_t flag_bytes, uint64_t data_bytes) { return flag_bytes + data_bytes; }

struct Member {
  int rank = -1;
  int ordinal = -1;
  Control* control = nullptr;     // device memory
  Mailbox* mailbox = nullptr;     // device memory
  ErrorRecord* record = nullptr;  // host memory
  RailMemory* rail = nullptr;     // device memory; null where the group is one node
  // What MemoryProvider::connect has filled; null where all nodes are in this process.
  std::shared_ptr<const std::string> connection;
};

// The groups of one mesh axis on one channel, as far as this process has a part in them.
class Workspace {
 public:
  // `ranks_per_node`: consecutive ranks of a group that share NVLink; `ranks`: all of them. Between nodes no rank has
  // the other's pointers but in its link's table (cuda_kernels/node/rail_memory.h).
  // `flights_of`: the workspace whose flights it serves, and which makes and owns it; null: one of its own.
  Workspace(Job job, std::vector<DeviceKey> devices, int ranks, int ranks_per_node, int channel,
            Workspace* flights_of = nullptr);
  // Nothing may use its memory any more: Registry::Leave sees to that.
  ~Workspace();
  Workspace(const Workspace&) = delete;

  // Makes it serve `needs` too. An explicit buffer (`Reserve`) does not grow; then MemoryError says what it lacks.
  // Between processes every process must call it; `seconds` limits the wait for them.
  void Serve(const Needs& needs, double seconds);
  // An xm.Buffer of `staging_bytes`, which it gives back on Release.
  void Reserve(uint64_t staging_bytes, double seconds);
  void Release(double seconds);
  // Tells the kernels that use it to leave.
  void Interrupt(double seconds);
  // Starts again after a failure. Returns, or throws MemoryError, within about `seconds`.
  void Reset(double seconds);
  // For tests: goes on from this number, as after a reset. Nothing may be running.
  void Renumber(uint32_t epoch);
  // The process has ended: every group that has a rank there fails. `clean`: it had said so; then the failure shows
  // when an operation needs that rank. So it does in any case after LeaveOutTheDead.
  void MarkDead(int process, bool clean);
  // A program of this workspace is told which ranks take part: whether it needs a rank that is dead, only it knows.
  void LeaveOutTheDead() { masked_.store(true); }

  bool Serves(const Needs& needs) const {
    return needs.flag_bytes <= serves_[0].load(std::memory_order_acquire) &&
           needs.data_bytes <= serves_[1].load(std::memory_order_relaxed) &&
           needs.scratch_bytes <= serves_[2].load(std::memory_order_relaxed);
  }
  // Empty, or why this run of a program must stop before it launches anything. A run that some device has begun goes on
  // on all of them, poisoned: the devices of a run must agree on what they launch, XLA's own collectives included.
  std::string Admit(int64_t run);
  // Whether everything that its GPUs were given has ended.
  bool WaitIdle(double seconds);
  bool Failed() const;
  // Empty, or the failure of one of its groups.
  std::string Failure() const;

  const Member* Find(int ordinal) const;
  const std::vector<Member>& members() const { return members_; }
  int ranks() const { return ranks_; }
  int ranks_per_node() const { return ranks_per_node_; }
  int channel() const { return channel_; }
  // What operations in flight use, beside those that use this one. Null in such a workspace itself.
  Workspace* flights() const { return flights_.get(); }
  bool for_flights() const { return flights_of_ != nullptr; }
  const std::vector<DeviceKey>& devices() const { return devices_; }
  uint64_t staging_bytes() const { return staging_bytes_.load(); }
  uint64_t scratch_bytes() const { return scratch_bytes_.load(); }
  int generation() const { return static_cast<int>(newest_.load()); }
  // Generations that hold memory.
  int held() const { return held_.load(); }
  // Frees generations that nobody uses any more, if there may be any. Cheap.
  void ReclaimIfStale();
  bool stale() const { return stale_.load(std::memory_order_relaxed); }
  bool across() const { return across_; }  // spans processes
  // Where its memory comes from.
  const char* memory() const { return across_ ? job_.provider->name : "peer access"; }
  // Launches by the host, and how many of them into a graph that was captured. A replay is neither.
  std::atomic<uint64_t> launches{0}, captured{0};
  // Held shared while a kernel is launched, exclusively while what running kernels rely on changes.
  std::shared_mutex& launching() { return launching_; }

 private:
  struct Group {
    std::vector<DeviceKey> devices;  // in rank order
  };
  struct Block {  // a generation's memory of one member
    char* staging = nullptr;
    char* scratch = nullptr;
    std::array<char*, kMaxRanks> peers{};
    bool joined = false;  // between processes: the others may have it mapped
  };
  struct Generation {
    uint32_t number = 0;
    uint64_t flag_bytes = 0, data_bytes = 0, scratch_bytes = 0;
    std::vector<Block> blocks;  // of every member, group after group
    uint64_t ticket = 0;        // between processes: its name
  };
  struct Home {  // what never moves, of one member
    char* mailbox = nullptr;
    char* control = nullptr;
    std::array<char*, kMaxRanks> mailboxes{};  // of every rank of its group
    bool joined = false;                       // as in Block, the mailbox
    char* counters = nullptr;                  // where the group has several nodes in this process
    char* rail = nullptr;                      // where it has several nodes
    std::shared_ptr<const std::string> connection;
  };

  void MakeGroups();
  void MakeHomesWithin();
  void MakeRails(std::vector<Home>* homes);
  void AddRail(size_t member);
  void Connect(double seconds);
  void AddWindows();
  void Settle(double seconds);
  void WriteRail(size_t member);
  void ClearRail(size_t member);
  void FreeHome(size_t member, const Home& home);
  bool SeveralNodes() const { return ranks_per_node_ != ranks_; }
  int Nodes() const { return ranks_ / ranks_per_node_; }
  uint64_t CounterBytes() const { return sizeof(uint64_t) * RailSignals(ranks_, Nodes()); }
  // Whether a rank's kernels may use the pointers of `rank`.
  bool SameNode(size_t member, int rank) const {
    return members_[member].rank / ranks_per_node_ == rank / ranks_per_node_;
  }
  void MakeHomeAcross();
  void JoinHome(double seconds);
  void LeaveHome();
  void AddControl(size_t member);
  Generation Wanted(const Needs& needs) const;
  void Grow(const Needs& needs, Generation next, double seconds);
  void GrowWithin(Generation* next, double seconds);
  void GrowAcross(Generation* next, double seconds);
  void Fill(Generation* next);  // memory of a new generation, with zeroed flags
  void Join(Generation* next, double seconds);
  // Where memory is shown to the others in a step of its own: what became of it, as Said to all.
  std::string JoinTogether(Generation* next, bool fresh, const std::string& outcome, const std::string& what,
                           double seconds);
  void ShowTo(void* own, bool* joined, double seconds);
  char* Reach(void* own, int rank) const;
  void Drop(Generation* generation);
  bool Undivided() const;  // nothing can have run in the newest generation
  bool HasRoom() const;    // in the ring of memory tables
  // True: there is room. False: no operation has run since the ring filled up, and none runs: all generations may be
  // replaced at once.
  bool WaitForRoom(double seconds);
  void Publish(Generation next, bool alone, double seconds);
  void WriteTables(bool alone);
  void Reclaim();
  void Forget(uint32_t before);
  void Restart(uint32_t epoch);
  uint32_t NewestEpoch();
  MemoryTable TableOf(const Generation* generation, size_t member) const;
  uint32_t OldestInUse() const;
  void Tell(size_t member, uint64_t failure);
  void WriteDead();  // to the mailboxes of this process
  std::unique_lock<std::timed_mutex> Change(double seconds);
  std::string KeyOf(const char* what);
  std::string WhereIs(const Group& group, int rank) const;
  void ReleaseRetired(const std::vector<std::string>& offers);
  std::string Offer() const;

  const Job job_;
  const std::vector<DeviceKey> devices_;
  const int ranks_, ranks_per_node_, channel_;
  Workspace* const flights_of_;
  std::unique_ptr<Workspace> flights_;
  bool across_ = false;
  std::vector<Group> groups_;    // with a rank in this process
  std::vector<Member> members_;  // the ranks of this process, group after group
  std::vector<size_t> group_of_;
  std::vector<Home> homes_;           // empty before the first growth
  std::atomic<bool> settled_{false};  // homes_ are there
  Pinned records_;

  std::timed_mutex changing_;  // one growth, release or reset at a time
  Needs needs_;                // largest so far
  Needs known_;                // of programs that are older than the open xm.Buffer
  uint64_t reserved_ = 0;      // bytes of a half of an open xm.Buffer
  std::deque<Generation> generations_;
  std::vector<Generation> retired_;  // between processes: to be released by all together
  uint64_t changes_ = 0;             // agreements of this workspace
  uint64_t settled_times_ = 0;       // of its link

  std::mutex dead_mutex_;
  std::set<int> dead_;  // processes
  std::atomic<bool> masked_{false};

  std::atomic<uint64_t> serves_[3] = {};
  std::atomic<uint64_t> staging_bytes_{0}, scratch_bytes_{0};
  std::atomic<uint32_t> newest_{0};
  std::atomic<int> held_{0};
  std::atomic<bool> stale_{false};  // there may be something to reclaim

  mutable std::shared_mutex launching_;
  std::mutex runs_mutex_;
  std::array<int64_t, 64> runs_;  // begun before any failure
};

// What all processes must do in one order: that of the tickets of their agreements.
class Turns {
 public:
  static Turns& Get();
  // Waits until every ticket before this one has ended.
  void Begin(uint64_t ticket, double seconds);
  void End(uint64_t ticket);
  void Clear();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t done_ = 0;         // all up to this one have ended
  std::set<uint64_t> ended_;  // and these
};

// How a process that has lowered nothing, but has loaded a program, learns about its job. Python gives both functions
// when it registers the handlers; the first program that needs them calls them, without any lock of this library.
struct JobSetup {
  // Calls Registry::Configure. False: this process has no GPUs and compiles for others.
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
  // Whether this process knows its job, or has learned about it now. False: it has no GPUs.
  bool KnowsJob();
  void SetProvider(const MemoryProvider* provider);
  void SetAgree(Agree agree);
  // `devices`: groups of `ranks`, one after the other; a negative number -1-i stands for the i-th device of the job.
  // The workspace lives as long as somebody holds it; between processes, where no one can leave alone, for ever.
  // `flights`: the one for operations in flight, which lives as long as the other.
  // `ranks_per_node`: as in Workspace; 0: all ranks. Groups that are cut in another way share nothing.
  std::shared_ptr<Workspace> Find(std::vector<DeviceKey> devices, int ranks, int channel, bool flights = false,
                                  int ranks_per_node = 0);
  std::vector<std::shared_ptr<Workspace>> All();
  void ResetAll(double seconds);
  void MarkDead(int process, bool clean);
  // Processes that a reset has gone on without: the same in all that are left.
  std::set<int> Gone();
  void GoOnWithout(const std::vector<int>& processes);
  // Empty, or the first failure of a group.
  std::string Failure();
  // The last user of `workspace` has gone. It is deleted when its GPUs have finished what they were given; if it has
  // failed by then, it stays until ResetAll, so that nobody misses the failure.
  void Leave(std::shared_ptr<Workspace> workspace);
  // For tests: forgets everything.
  void Clear();

 private:
  // The keys of devices that `devices` may name by their place in the job. `mutex_` is held.
  void ResolvePlaces(std::vector<DeviceKey>* devices) const;

  std::mutex mutex_;
  bool configured_ = false;
  Job job_;
  JobSetup setup_;
  // By devices, ranks, ranks of a node, channel.
  std::map<std::pair<std::vector<DeviceKey>, std::array<int, 3>>, std::weak_ptr<Workspace>> workspaces_;
  std::vector<std::shared_ptr<Workspace>> kept_;
  std::set<int> gone_;
  std::mutex leaving_mutex_;
  std::vector<std::shared_ptr<Workspace>> leaving_;
  void Forget(const Workspace* gone);
};

// Frees memory that may still be in use, when its GPU is idle: on a thread of its own.
void FreeWhenIdle(Devices* gpus, std::vector<int> ordinals, std::vector<std::pair<int, char*>> memory, Pinned records);

}  // namespace xen_moe
