#include "ffi/symmetric_memory.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "cuda_kernels/params.h"

namespace xen_moe {
namespace {

constexpr uint64_t kAlign = 256;
uint64_t AlignUp(uint64_t x) { return (x + kAlign - 1) / kAlign * kAlign; }

std::string Mib(uint64_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

[[noreturn]] void Fail(std::string message) { throw MemoryError{false, "xen_moe_jax: " + std::move(message)}; }

void Check(cudaError_t e, const std::string& what) {
  if (e == cudaSuccess) return;
  cudaGetLastError();
  if (e == cudaErrorMemoryAllocation) {
    throw MemoryError{true,
                      "xen_moe_jax: " + what +
                          ": not enough GPU memory for the symmetric workspace. JAX preallocates most of it: lower "
                          "XLA_PYTHON_CLIENT_MEM_FRACTION, or lower num_tokens or hidden"};
  }
  Fail(what + ": " + cudaGetErrorString(e));
}

struct DeviceGuard {
  int saved = 0;
  DeviceGuard() { cudaGetDevice(&saved); }
  ~DeviceGuard() { cudaSetDevice(saved); }
};

int ProcessOf(DeviceKey key) { return static_cast<int>(key / kDevicesPerProcess); }
int OrdinalOf(DeviceKey key) { return static_cast<int>(key % kDevicesPerProcess); }

void EnablePeerAccess(int from, int to) {
  int can = 0;
  Check(cudaDeviceCanAccessPeer(&can, from, to), "cudaDeviceCanAccessPeer");
  if (!can) {
    Fail("GPU " + std::to_string(from) + " cannot access the memory of GPU " + std::to_string(to) +
         ": the ranks of one axis need NVLink or PCIe peer access between all of them. Use "
         "KernelConfig(backend='reference') on "
         "this machine, or a mesh axis over GPUs that `nvidia-smi topo -p2p r` lists as OK");
  }
  Check(cudaSetDevice(from), "cudaSetDevice");
  const cudaError_t e = cudaDeviceEnablePeerAccess(to, 0);
  if (e == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
  } else {
    Check(e, "cudaDeviceEnablePeerAccess");
  }
}

}  // namespace

Workspace::Workspace(std::vector<DeviceKey> devices, int ranks, int channel)
    : devices_(std::move(devices)), ranks_(ranks), channel_(channel) {
  if (ranks < 1 || ranks > kMaxRanks || devices_.empty() || devices_.size() % ranks != 0) {
    Fail("a mesh axis of " + std::to_string(ranks) + " ranks over " + std::to_string(devices_.size()) +
         " devices: the CUDA backend takes 1 to " + std::to_string(kMaxRanks) + " ranks");
  }
  const Registry& registry = Registry::Get();
  for (size_t first = 0; first < devices_.size(); first += ranks) {
    Group group;
    group.devices.assign(devices_.begin() + first, devices_.begin() + first + ranks);
    std::set<int> processes;
    std::set<DeviceKey> distinct(group.devices.begin(), group.devices.end());
    if (distinct.size() != group.devices.size()) Fail("a device appears twice in one expert-parallel group");
    int mine = 0;
    for (DeviceKey key : group.devices) {
      processes.insert(ProcessOf(key));
      mine += ProcessOf(key) == registry.process();
    }
    if (mine == 0) continue;
    group.within_process = processes.size() == 1;
    if (!group.within_process && static_cast<int>(processes.size()) != ranks) {
      Fail("an expert-parallel group of " + std::to_string(ranks) + " GPUs over " + std::to_string(processes.size()) +
           " processes: run one process with all GPUs of the group, or one process per GPU");
    }
    if (!group.within_process && registry.provider() == nullptr) {
      Fail(
          "the expert-parallel axis spans several processes and xen_moe_jax._nvshmem is not loaded: install "
          "nvidia-nvshmem-cu13, and call xen_moe_jax.dispatch or open an xm.Buffer in every process");
    }
    if (!group.within_process && static_cast<int>(devices_.size()) != registry.num_processes()) {
      Fail("a mesh of " + std::to_string(devices_.size()) + " devices in a job of " +
           std::to_string(registry.num_processes()) +
           " processes: NVSHMEM allocates on all processes together, so the mesh must span them all");
    }
    for (int rank = 0; rank < ranks; ++rank) {
      if (ProcessOf(group.devices[rank]) != registry.process()) continue;
      Member member;
      member.rank = rank;
      member.ordinal = OrdinalOf(group.devices[rank]);
      group.members.push_back(member);
    }
    groups_.push_back(std::move(group));
  }
  CreateMembers();
}

Workspace::~Workspace() {
  // At process exit the driver may be gone; memory is released by Release().
}

void Workspace::CreateMembers() {
  DeviceGuard guard;
  for (Group& group : groups_) {
    for (Member& member : group.members) {
      if (group.within_process) {
        for (DeviceKey other : group.devices) {
          if (OrdinalOf(other) != member.ordinal) EnablePeerAccess(member.ordinal, OrdinalOf(other));
        }
      }
      Check(cudaSetDevice(member.ordinal), "cudaSetDevice");
      Check(cudaHostAlloc(reinterpret_cast<void**>(&member.error), sizeof(ErrorWord),
                          cudaHostAllocMapped | cudaHostAllocPortable),
            "cudaHostAlloc");
      std::memset(member.error, 0, sizeof(ErrorWord));
      Check(cudaMalloc(reinterpret_cast<void**>(&member.control), sizeof(Control)), "cudaMalloc");
      Check(cudaMemset(member.control, 0, sizeof(Control)), "cudaMemset");
      Check(static_cast<cudaError_t>(PreloadKernels()), "loading the kernels");
    }
  }
}

Member* Workspace::Find(int ordinal) {
  for (Group& group : groups_) {
    for (Member& member : group.members) {
      if (member.ordinal == ordinal) return &member;
    }
  }
  return nullptr;
}

void Workspace::Serve(const Needs& needs) {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  Needs largest = needs_;
  largest.flag_bytes = std::max(needs_.flag_bytes, AlignUp(needs.flag_bytes));
  largest.data_bytes = std::max(needs_.data_bytes, AlignUp(needs.data_bytes));
  largest.scratch_bytes = std::max(needs_.scratch_bytes, AlignUp(needs.scratch_bytes));
  const uint64_t half = largest.flag_bytes + largest.data_bytes;
  if (half > half_bytes_ && reserved_) {
    throw MemoryError{
        true, "xen_moe_jax: the xm.Buffer on channel " + std::to_string(channel_) + " has " +
                  std::to_string(2 * half_bytes_) + " bytes and this operation needs " + std::to_string(2 * half) +
                  ": open it with larger num_tokens, hidden or size_bytes (xm.buffer_size_hint), or use another "
                  "KernelConfig.channel"};
  }
  if (half > half_bytes_ || largest.scratch_bytes > scratch_bytes_) {
    Grow(std::max(half, half_bytes_), std::max(largest.scratch_bytes, scratch_bytes_));
  }
  needs_ = largest;
}

void Workspace::Reserve(uint64_t staging_bytes) {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  if (reserved_) Fail("an xm.Buffer is already open on channel " + std::to_string(channel_) + " of this mesh axis");
  const uint64_t half = AlignUp((staging_bytes + 1) / 2);
  if (half > half_bytes_) Grow(half, scratch_bytes_);
  reserved_ = true;
}

void Workspace::Release() {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  SynchronizeDevices();
  DeviceGuard guard;
  for (Group& group : groups_) {
    Free(group);
    for (Member& member : group.members) {
      cudaSetDevice(member.ordinal);
      cudaFree(member.scratch);
      member.scratch = nullptr;
    }
  }
  half_bytes_ = scratch_bytes_ = 0;
  needs_ = Needs{};
  reserved_ = false;
  for (Group& group : groups_) {
    for (Member& member : group.members) member.peers.clear();
    WriteTables(group);
  }
}

void Workspace::SynchronizeDevices() {
  DeviceGuard guard;
  for (Group& group : groups_) {
    for (Member& member : group.members) {
      Check(cudaSetDevice(member.ordinal), "cudaSetDevice");
      Check(cudaDeviceSynchronize(), "waiting for GPU " + std::to_string(member.ordinal));
    }
  }
}

// Epochs go on counting: zeroed flags are never the next epoch, because epoch 0 is never waited for before 2^32
// operations.
void Workspace::Grow(uint64_t half_bytes, uint64_t scratch_bytes) {
  SynchronizeDevices();
  DeviceGuard guard;
  for (Group& group : groups_) {
    if (half_bytes != half_bytes_) {
      Free(group);
      half_bytes_ = 0;
      Allocate(group, half_bytes);
    }
    for (Member& member : group.members) {
      Check(cudaSetDevice(member.ordinal), "cudaSetDevice");
      if (scratch_bytes != scratch_bytes_ && scratch_bytes != 0) {
        cudaFree(member.scratch);
        member.scratch = nullptr;
        Check(cudaMalloc(reinterpret_cast<void**>(&member.scratch), scratch_bytes),
              "scratch memory of " + Mib(scratch_bytes));
      }
    }
  }
  half_bytes_ = half_bytes;
  scratch_bytes_ = scratch_bytes;
  for (Group& group : groups_) WriteTables(group);
}

void Workspace::Allocate(Group& group, uint64_t half_bytes) {
  const uint64_t bytes = 2 * half_bytes;
  const std::string what = "staging area of " + Mib(bytes);
  if (group.within_process) {
    std::vector<char*> all;
    for (Member& member : group.members) {
      Check(cudaSetDevice(member.ordinal), "cudaSetDevice");
      Check(cudaMalloc(reinterpret_cast<void**>(&member.staging), bytes), what);
      Check(cudaMemset(member.staging, 0, bytes), "cudaMemset");
      all.push_back(member.staging);
    }
    for (Member& member : group.members) member.peers = all;
    return;
  }
  const MemoryProvider* provider = Registry::Get().provider();
  Member& member = group.members.front();
  Check(cudaSetDevice(member.ordinal), "cudaSetDevice");
  member.staging = static_cast<char*>(provider->allocate(bytes));
  if (member.staging == nullptr) {
    throw MemoryError{
        true, "xen_moe_jax: " + what +
                  ": the NVSHMEM heap is too small; set NVSHMEM_SYMMETRIC_SIZE to more than that before the first "
                  "operation, in every process"};
  }
  Check(cudaMemset(member.staging, 0, bytes), "cudaMemset");
  Check(cudaDeviceSynchronize(), "cudaMemset");
  member.peers.clear();
  for (DeviceKey key : group.devices) {
    void* peer = provider->peer(member.staging, ProcessOf(key));
    if (peer == nullptr) {
      Fail("the memory of process " + std::to_string(ProcessOf(key)) + " is not mapped into process " +
           std::to_string(ProcessOf(DeviceKey{Registry::Get().process()} * kDevicesPerProcess)) +
           ": the ranks of one axis must be on one NVLink domain. Put the expert-parallel axis inside a node, or use "
           "KernelConfig(backend='reference')");
    }
    member.peers.push_back(static_cast<char*>(peer));
  }
  provider->barrier();
}

void Workspace::Free(Group& group) {
  for (Member& member : group.members) {
    if (member.staging == nullptr) continue;
    cudaSetDevice(member.ordinal);
    if (group.within_process) {
      cudaFree(member.staging);
    } else {
      Registry::Get().provider()->release(member.staging);
    }
    member.staging = nullptr;
  }
}

void Workspace::WriteTables(Group& group) {
  for (Member& member : group.members) {
    Control table{};
    for (int rank = 0; rank < ranks_; ++rank) table.staging[rank] = member.peers.empty() ? nullptr : member.peers[rank];
    table.half_bytes = half_bytes_;
    table.scratch = member.scratch;
    void* error = nullptr;
    Check(cudaSetDevice(member.ordinal), "cudaSetDevice");
    Check(cudaHostGetDevicePointer(&error, member.error, 0), "cudaHostGetDevicePointer");
    table.error = static_cast<ErrorWord*>(error);
    Check(cudaMemcpy(member.control, &table, offsetof(Control, epoch), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
}

void Workspace::Reset() {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  std::lock_guard<std::mutex> failure_lock(failure_mutex_);
  SynchronizeDevices();
  bool across = false;
  for (Group& group : groups_) {
    across |= !group.within_process;
    ResetGroup(group);
  }
  if (across) Registry::Get().provider()->barrier();
}

void Workspace::ResetGroup(Group& group) {
  DeviceGuard guard;
  for (Member& member : group.members) {
    Check(cudaSetDevice(member.ordinal), "cudaSetDevice");
    Check(cudaDeviceSynchronize(), "waiting for GPU " + std::to_string(member.ordinal));
  }
  for (Member& member : group.members) {
    Check(cudaSetDevice(member.ordinal), "cudaSetDevice");
    if (member.staging) Check(cudaMemset(member.staging, 0, 2 * half_bytes_), "cudaMemset");
    char* const counters = reinterpret_cast<char*>(member.control) + offsetof(Control, epoch);
    Check(cudaMemset(counters, 0, sizeof(Control) - offsetof(Control, epoch)), "cudaMemset");
    Check(cudaDeviceSynchronize(), "cudaMemset");
    member.error->packed = 0;
    member.told = false;
  }
  group.failure.clear();
}

std::string Workspace::Admit(Member* member, bool capturing) {
  for (Group& group : groups_) {
    if (std::none_of(group.members.begin(), group.members.end(), [&](const Member& m) { return &m == member; }))
      continue;
    std::lock_guard<std::mutex> lock(failure_mutex_);
    std::string found;
    for (const Member& m : group.members) {
      if (found.empty()) found = FailureOf(m);
    }
    if (group.failure.empty()) group.failure = found;
    if (group.failure.empty()) return "";
    const bool all_told =
        std::all_of(group.members.begin(), group.members.end(), [](const Member& m) { return m.told; });
    if (!all_told || capturing || !group.within_process) {
      member->told = true;
      return group.failure;
    }
    ResetGroup(group);
    return "";
  }
  return "";
}

std::string Workspace::FailureOf(const Member& member) const {
  const uint64_t word = *reinterpret_cast<volatile uint64_t*>(&member.error->packed);
  if ((word >> 63) == 0) return "";
  static const char* const operations[] = {"dispatch", "redispatch", "combine", "all_to_all"};
  static const char* const steps[] = {"?",           "its routing metadata",  "its rows",
                                      "its arrival", "this GPU's own blocks", "a credit"};
  if (((word >> 40) & 0xFF) == static_cast<uint64_t>(Step::kMemory)) {
    return "xen_moe_jax: a captured program ran after its symmetric memory had been released (xm.Buffer.close); its "
           "results are "
           "not valid. Keep the buffer open while the program is in use, and call xen_moe_jax.cuda.reset() to go on";
  }
  const int operation = (word >> 48) & 0x7F, step = (word >> 40) & 0xFF, rank = (word >> 32) & 0xFF;
  return std::string("xen_moe_jax: ") + operations[std::min(operation, 3)] + " (number " +
         std::to_string(static_cast<uint32_t>(word)) + " on channel " + std::to_string(channel_) + ") on rank " +
         std::to_string(member.rank) + " gave up after KernelConfig.timeout_s waiting for rank " +
         std::to_string(rank) + ": " + steps[std::min(step, 5)] +
         " never came. That operation's result is not valid. Find out why that rank did not run the same operation; "
         "the GPUs of one "
         "process can go on after this error, several processes after xen_moe_jax.cuda.reset() in each";
}

Registry& Registry::Get() {
  static Registry* registry = new Registry;  // never destroyed: the driver may go first at exit
  return *registry;
}

void Registry::Configure(int process, int num_processes, std::vector<DeviceKey> all_devices) {
  std::lock_guard<std::mutex> lock(mutex_);
  process_ = process;
  num_processes_ = num_processes;
  all_devices_ = std::move(all_devices);
  configured_ = true;
}

void Registry::SetProvider(const MemoryProvider* provider) {
  std::lock_guard<std::mutex> lock(mutex_);
  provider_ = provider;
}

std::shared_ptr<Workspace> Registry::Find(std::vector<DeviceKey> devices, int ranks, int channel) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!configured_) Fail("the CUDA module was not configured: import xen_moe_jax and load the program through it");
  for (DeviceKey& key : devices) {
    if (key >= 0) continue;
    const size_t index = static_cast<size_t>(-1 - key);
    if (index >= all_devices_.size()) {
      Fail("the program was lowered for more than the " + std::to_string(all_devices_.size()) + " devices of this job");
    }
    key = all_devices_[index];
  }
  auto& slot = workspaces_[{devices, {ranks, channel}}];
  if (!slot) slot = std::make_shared<Workspace>(std::move(devices), ranks, channel);
  return slot;
}

std::vector<std::shared_ptr<Workspace>> Registry::All() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<Workspace>> out;
  for (auto& entry : workspaces_) {
    if (entry.second) out.push_back(entry.second);
  }
  return out;
}

void Registry::ResetAll() {
  for (auto& workspace : All()) workspace->Reset();
}
void Registry::ReleaseAll() {
  for (auto& workspace : All()) workspace->Release();
}

}  // namespace xen_moe
