// The Python side of workspaces, the same over GPUs (ffi/module.cc) and over host memory (ffi/memory_test_module.cc).
#pragma once

#include <nanobind/nanobind.h>

#include <stdexcept>

#include "ffi/devices.h"
#include "ffi/memory_provider.h"

namespace xen_moe {

template <class F>
auto WithoutGil(F f) {
  nanobind::gil_scoped_release nogil;
  try {
    return f();
  } catch (const MemoryError& e) {
    throw std::runtime_error(e.message);
  }
}

// `link`: the kernels between nodes of several processes; null: none.
void BindMemory(nanobind::module_& module, Devices* gpus, const LinkKernels* link = nullptr);
// `provider`: NCCL's, as ffi/nccl_memory.h gives it, or tests see it.
void BindNccl(nanobind::module_& module, Devices* gpus, const MemoryProvider* provider);

}  // namespace xen_moe
