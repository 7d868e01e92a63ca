#include "ffi/ipc_memory.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <map>
#include <mutex>

#include "cuda_kernels/core/cuda_error.h"
#include "ffi/devices.h"

namespace xen_moe {
namespace {

// The driver carves small allocations out of blocks of this size, and a handle maps the whole block. Allocations of
// this file are multiples of the size, so that no two of them share a block.
constexpr uint64_t kIpcUnit = 2 << 20;

struct Mapping {
  void* memory = nullptr;
  int users = 0;
};

struct Ipc {
  std::mutex mutex;
  int process = 0, ordinal = 0;
  std::map<void*, std::map<int, std::string>> blocks;  // by own block, then process: the handle of that one's block
  std::map<std::string, Mapping> mapped;               // by handle, which a process may open only once
};

Ipc& State() {
  static Ipc* ipc = new Ipc;  // never destroyed: at exit the driver may end first
  return *ipc;
}

thread_local std::string why;

bool Failed(cudaError_t e, const char* what) {
  if (Taken(e) == cudaSuccess) return false;
  why = std::string(what) + ": " + cudaGetErrorString(e);
  return true;
}

struct OnGpu {
  int saved = 0;
  explicit OnGpu(int ordinal) {
    Taken(cudaGetDevice(&saved));
    Taken(cudaSetDevice(ordinal));
  }
  ~OnGpu() { Taken(cudaSetDevice(saved)); }
};

void* Allocate(uint64_t bytes) {
  Ipc& ipc = State();
  std::lock_guard<std::mutex> lock(ipc.mutex);
  OnGpu guard(ipc.ordinal);
  void* memory = nullptr;
  const cudaError_t e = cudaMalloc(&memory, (bytes + kIpcUnit - 1) / kIpcUnit * kIpcUnit);
  if (Failed(e, "cudaMalloc")) {
    if (e == cudaErrorMemoryAllocation) {
      why +=
          ": JAX preallocates most of the GPU's memory, which all ranks on it share: lower XLA_CLIENT_MEM_FRACTION, or "
          "lower num_tokens or hidden";
    }
    return nullptr;
  }
  ipc.blocks[memory];
  return memory;
}

// Ends one use of a mapping, which is unmapped after the last one. The caller holds the lock.
void Forget(Ipc& ipc, const std::string& handle) {
  auto found = ipc.mapped.find(handle);
  if (found == ipc.mapped.end() || --found->second.users > 0) return;
  Failed(cudaIpcCloseMemHandle(found->second.memory), "cudaIpcCloseMemHandle");
  ipc.mapped.erase(found);
}

void Release(void* own) {
  Ipc& ipc = State();
  std::lock_guard<std::mutex> lock(ipc.mutex);
  auto found = ipc.blocks.find(own);
  if (found == ipc.blocks.end()) return;
  OnGpu guard(ipc.ordinal);
  for (const auto& [process, handle] : found->second) Forget(ipc, handle);
  ipc.blocks.erase(found);
  Failed(cudaFree(own), "cudaFree");
}

void* Peer(void* own, int process) {
  Ipc& ipc = State();
  std::lock_guard<std::mutex> lock(ipc.mutex);
  const auto& reached = ipc.blocks.at(own);
  const auto found = reached.find(process);
  return found == reached.end() ? own : ipc.mapped.at(found->second).memory;
}

const char* Reason() { return why.c_str(); }

MemoryProvider provider{"CUDA IPC", 0, Allocate, nullptr, nullptr, Release, Peer, Reason, nullptr, nullptr, nullptr};

}  // namespace

const MemoryProvider* StartIpc(int process, int num_processes, int ordinal) {
  Ipc& ipc = State();
  std::lock_guard<std::mutex> lock(ipc.mutex);
  ipc.process = process;
  ipc.ordinal = ordinal;
  provider.num_processes = num_processes;
  return &provider;
}

std::string ShowIpc(void* own) {
  OnGpu guard(State().ordinal);
  cudaIpcMemHandle_t handle;
  if (Failed(cudaIpcGetMemHandle(&handle, own), "cudaIpcGetMemHandle")) {
    Refuse("the memory of this process cannot be shown to other processes: " + why +
           ": the container must allow CUDA IPC, and the GPU must not be in MIG mode");
  }
  return std::string(reinterpret_cast<const char*>(&handle), sizeof(handle));
}

void ReachIpc(void* own, int process, const std::string& handle) {
  Ipc& ipc = State();
  std::lock_guard<std::mutex> lock(ipc.mutex);
  if (process == ipc.process) return;
  std::map<int, std::string>& reached = ipc.blocks.at(own);
  const auto before = reached.find(process);
  if (before != reached.end() && before->second == handle) return;
  OnGpu guard(ipc.ordinal);
  if (before != reached.end()) {
    const std::string old = before->second;
    reached.erase(before);
    Forget(ipc, old);
  }
  if (handle.empty()) return;
  Mapping& mapping = ipc.mapped[handle];
  if (mapping.users == 0) {
    cudaIpcMemHandle_t opened;
    if (handle.size() != sizeof(opened)) Refuse("a handle of another process has the wrong size");
    std::memcpy(&opened, handle.data(), sizeof(opened));
    if (Failed(cudaIpcOpenMemHandle(&mapping.memory, opened, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle")) {
      ipc.mapped.erase(handle);
      Refuse("the memory of process " + std::to_string(process) + " cannot be mapped: " + why);
    }
  }
  ++mapping.users;
  reached[process] = handle;
}

}  // namespace xen_moe
