// Symmetric memory: for each group of devices (the ranks of one expert-parallel axis) and channel, a staging area and a
// Control block per rank, and the table through which every rank sees all staging areas (cuda_kernels/workspace.h).
//
// Two providers fill the same table: one process with all GPUs of the group (cudaMalloc and peer access), or one
// process per GPU (MemoryProvider, NVSHMEM). Memory is made and grown when an executable is instantiated, never while
// one runs.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "cuda_kernels/workspace.h"
#include "ffi/memory_provider.h"

namespace xen_moe {

// A device of the job: process * kDevicesPerProcess + CUDA ordinal in that process.
using DeviceKey = int64_t;
constexpr int64_t kDevicesPerProcess = 4096;

struct Needs {
  uint64_t flag_bytes = 0;  // of a half
  uint64_t data_bytes = 0;  // of a half
  uint64_t scratch_bytes = 0;
};

// Thrown with a message for the user; handlers turn it into an ffi::Error.
struct MemoryError {
  bool exhausted;  // not enough memory, as opposed to a wrong argument
  std::string message;
};

struct Member {
  int rank = -1;
  int ordinal = -1;
  Control* control = nullptr;  // device memory
  char* scratch = nullptr;
  char* staging = nullptr;
  ErrorWord* error = nullptr;  // mapped host memory
  std::vector<char*> peers;    // staging of every rank, as mapped into this device
  bool told = false;           // has returned the error of the group's failure
};

// The groups of one mesh axis on one channel, as far as this process has a part in them.
class Workspace {
 public:
  Workspace(std::vector<DeviceKey> devices, int ranks, int channel);
  ~Workspace();
  Workspace(const Workspace&) = delete;

  // Makes it serve `needs` too. An explicit buffer (`Reserve`) does not grow; then MemoryError says what it lacks.
  void Serve(const Needs& needs);
  void Reserve(uint64_t staging_bytes);
  void Release();
  // Restarts after a timeout: clears flags, counters and the error words. Nothing may be running.
  void Reset();
  // Called before every launch. Empty, or the text of a timeout: each rank of a group that failed gets it at least
  // once; when all have had it, a group within one process starts afresh. Between processes that takes Reset() in all
  // of them.
  std::string Admit(Member* member, bool capturing);

  Member* Find(int ordinal);
  int ranks() const { return ranks_; }
  int channel() const { return channel_; }
  uint64_t staging_bytes() const { return 2 * half_bytes_; }
  uint64_t scratch_bytes() const { return scratch_bytes_; }
  const std::vector<DeviceKey>& devices() const { return devices_; }
  bool Serves(const Needs& needs) const {
    return needs.flag_bytes <= needs_.flag_bytes && needs.data_bytes <= needs_.data_bytes &&
           needs.scratch_bytes <= scratch_bytes_;
  }
  // Held shared while a kernel is launched, exclusively while memory changes.
  std::shared_mutex& mutex() { return mutex_; }

 private:
  struct Group {
    std::vector<DeviceKey> devices;
    std::vector<Member> members;  // those of this process
    bool within_process = true;
    std::string failure;  // not empty: some rank gave up
  };
  void CreateMembers();
  void Grow(uint64_t half_bytes, uint64_t scratch_bytes);
  void Allocate(Group& group, uint64_t half_bytes);
  void Free(Group& group);
  void WriteTables(Group& group);
  void SynchronizeDevices();
  void ResetGroup(Group& group);
  std::string FailureOf(const Member& member) const;

  std::vector<DeviceKey> devices_;
  int ranks_, channel_;
  std::vector<Group> groups_;
  Needs needs_;  // largest so far
  uint64_t half_bytes_ = 0, scratch_bytes_ = 0;
  bool reserved_ = false;
  std::shared_mutex mutex_;
  std::mutex failure_mutex_;
};

// All workspaces of this process.
class Registry {
 public:
  static Registry& Get();
  void Configure(int process, int num_processes, std::vector<DeviceKey> all_devices);
  void SetProvider(const MemoryProvider* provider);
  // `devices`: groups of `ranks`, one after the other; a negative number -1-i stands for the i-th device of the job.
  std::shared_ptr<Workspace> Find(std::vector<DeviceKey> devices, int ranks, int channel);
  std::vector<std::shared_ptr<Workspace>> All();
  void ResetAll();
  void ReleaseAll();

  int process() const { return process_; }
  int num_processes() const { return num_processes_; }
  const MemoryProvider* provider() const { return provider_; }

 private:
  std::mutex mutex_;
  bool configured_ = false;
  int process_ = 0, num_processes_ = 1;
  std::vector<DeviceKey> all_devices_;
  const MemoryProvider* provider_ = nullptr;
  std::map<std::pair<std::vector<DeviceKey>, std::pair<int, int>>, std::shared_ptr<Workspace>> workspaces_;
};

}  // namespace xen_moe
