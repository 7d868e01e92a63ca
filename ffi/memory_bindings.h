// The Python bindings of workspaces, for GPUs (ffi/module.cc) and for host memory
// (tests/native/memory_test_module.cc).
#pragma once

#include <nanobind/nanobind.h>

#include <stdexcept>

#include "ffi/devices.h"
#include "ffi/memory_provider.h"

namespace xen_moe {

// Calls `f` without the GIL. A MemoryError becomes Python's RuntimeError.
template <class F>
auto WithoutGil(F f) {
  nanobind::gil_scoped_release nogil;
  try {
    return f();
  } catch (const MemoryError& e) {
    throw std::runtime_error(e.message);
  }
}

// `link`: the kernels between nodes of several processes; null where the module has none.
void BindMemory(nanobind::module_& module, Devices* gpus, const LinkKernels* link = nullptr);
// `provider`: that of ffi/nccl_memory.h, or one that tests wrap around it.
// Functions for groups whose processes come and go: ffi/ipc_bindings.cc.
void BindIpc(nanobind::module_& m);
void BindNccl(nanobind::module_& module, Devices* gpus, const MemoryProvider* provider);

}  // namespace xen_moe
