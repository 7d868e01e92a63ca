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
  m.def("nccl_join_devices", [](nb::bytes requirements, uint64_t bytes, double seconds) {
    const std::string wanted(requirements.c_str(), requirements.size());
    const std::string made = WithoutGil([&] { return JoinNcclDevices(wanted, bytes, seconds); });
    return nb::bytes(made.data(), made.size());
  });
  m.def("nccl_properties", [](nb::bytes asked) {
    std::string properties(asked.c_str(), asked.size());
    WithoutGil([&] { QueryNccl(&properties); });
    return nb::bytes(properties.data(), properties.size());
  });
  m.def("nccl_provider", [provider] { return nb::capsule(provider, kMemoryProviderCapsule); });
}

}  // namespace xen_moe
