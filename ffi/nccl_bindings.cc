#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "ffi/memory_bindings.h"
#include "ffi/nccl_memory.h"

namespace nb = nanobind;

namespace xen_moe {

void BindNccl(nb::module_& m, Devices* gpus, const MemoryProvider* provider) {
  m.def("nccl_load", [](const std::string& path) { return WithoutGil([&] { return LoadNccl(path); }); });
  m.def("nccl_unique_id", [] {
    const std::string id = WithoutGil([] { return NewNcclId(); });
    return nb::bytes(id.data(), id.size());
  });
  m.def("nccl_start", [gpus](int ordinal, int process, int num_processes, nb::bytes unique_id, double seconds) {
    const std::string id(unique_id.c_str(), unique_id.size());
    WithoutGil([&] { StartNccl(gpus, ordinal, process, num_processes, id, seconds); });
  });
  m.def("nccl_provider", [provider] { return nb::capsule(provider, kMemoryProviderCapsule); });
}

}  // namespace xen_moe
