// The Python side of workspaces, the same over GPUs (ffi/module.cc) and over host memory (ffi/memory_test_module.cc).
#pragma once

#include <nanobind/nanobind.h>

#include "ffi/devices.h"

namespace xen_moe {
void BindMemory(nanobind::module_& module, Devices* gpus);
}  // namespace xen_moe
