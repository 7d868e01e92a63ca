// This process in its job: which devices there are, and where the process gets memory from.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "ffi/agreement.h"
#include "ffi/devices.h"
#include "ffi/memory_provider.h"

namespace xen_moe {

// A device of the job: process * kDevicesPerProcess + CUDA ordinal in that process. The ordinal of another process's
// device is a guess, used in error texts only.
using DeviceKey = int64_t;
constexpr int64_t kDevicesPerProcess = 4096;
inline int ProcessOf(DeviceKey key) { return static_cast<int>(key / kDevicesPerProcess); }
inline int OrdinalOf(DeviceKey key) { return static_cast<int>(key % kDevicesPerProcess); }

struct Job {
  int process = 0, num_processes = 1;
  std::vector<DeviceKey> devices;  // of all processes
  Devices* gpus = nullptr;
  const MemoryProvider* provider = nullptr;  // null: no groups across processes
  const LinkKernels* link = nullptr;         // null: no groups across processes in several nodes
  Agree agree;
};

// How a process that has lowered nothing, but has loaded a program, learns about its job. Python gives both functions
// when it registers the handlers; the first program that needs them calls them, without any lock of this library.
struct JobSetup {
  // Calls Registry::Configure. Returns false where this process has no GPUs and compiles for other processes.
  std::function<bool()> describe;
  // Gives the registry a memory provider and an agreement. Collective over the job's processes. Throws MemoryError.
  std::function<void()> start_memory;
};

}  // namespace xen_moe
