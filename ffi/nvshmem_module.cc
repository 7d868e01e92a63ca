// xen_moe_jax._nvshmem: starts NVSHMEM and gives its memory to xen_moe_jax._cuda. Python loads this module when a mesh
// spans processes.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>

#include <stdexcept>
#include <string>

#include "ffi/nvshmem_memory.h"

namespace nb = nanobind;

namespace {
void Check(int rc, const char* what) {
  if (rc) throw std::runtime_error(std::string("xen_moe_jax: ") + what + " failed with code " + std::to_string(rc));
}
}  // namespace

NB_MODULE(_nvshmem, m) {
  using namespace xen_moe;
  m.def("unique_id", [] {
    char id[kUniqueIdBytes];
    Check(NvshmemUniqueId(id), "nvshmemx_get_uniqueid");
    return nb::bytes(id, sizeof(id));
  });
  m.def("init", [](int process, int num_processes, nb::bytes unique_id, int ordinal) {
    if (unique_id.size() != kUniqueIdBytes)
      throw std::invalid_argument("xen_moe_jax: an NVSHMEM unique id has 128 bytes");
    const std::string id(unique_id.c_str(), unique_id.size());
    nb::gil_scoped_release nogil;
    Check(cudaSetDevice(ordinal), "cudaSetDevice");
    Check(cudaFree(nullptr), "creating the CUDA context");
    Check(NvshmemInit(process, num_processes, id.data()), "nvshmemx_init_attr");
  });
  m.def("versions", [] {
    int v[6];
    NvshmemVersions(v);
    nb::dict d;
    d["built"] = nb::make_tuple(v[0], v[1], v[2]);
    d["runtime"] = nb::make_tuple(v[3], v[4], v[5]);
    return d;
  });
  m.def("provider", [] { return nb::capsule(NvshmemProvider(), kMemoryProviderCapsule); });
}
