// The only file that includes NVSHMEM, and the only one compiled with -rdc=true: nvshmemx_init_attr is inline and hands
// the host library the device state of the module that it is compiled into.
#include <cuda_runtime.h>
#include <nvshmem.h>
#include <nvshmemx.h>

#include <cstring>

#include "ffi/nvshmem_memory.h"

namespace xen_moe {
namespace {

void* Allocate(uint64_t bytes) { return nvshmem_malloc(bytes); }
void Release(void* own) { nvshmem_free(own); }
void* Peer(void* own, int process) { return nvshmem_ptr(own, process); }

const char* Reason() {
  return "the NVSHMEM heap is too small; set NVSHMEM_SYMMETRIC_SIZE to more than that before the first operation, in "
         "every process";
}

MemoryProvider provider{"NVSHMEM", 0, Allocate, nullptr, nullptr, Release, Peer, Reason, nullptr, nullptr, nullptr};

}  // namespace

int NvshmemUniqueId(void* out) {
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  const int rc = nvshmemx_get_uniqueid(&id);
  static_assert(sizeof(id) == kUniqueIdBytes, "NVSHMEM's unique id has another size");
  std::memcpy(out, &id, sizeof(id));
  return rc;
}

int NvshmemInit(int process, int num_processes, const void* unique_id) {
  nvshmemx_uniqueid_t id;
  std::memcpy(&id, unique_id, sizeof(id));
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  nvshmemx_set_attr_uniqueid_args(process, num_processes, &id, &attributes);
  const int rc = nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes);
  provider.num_processes = num_processes;
  return rc;
}

void NvshmemVersions(int out[6]) {
  out[0] = NVSHMEM_VENDOR_MAJOR_VERSION;
  out[1] = NVSHMEM_VENDOR_MINOR_VERSION;
  out[2] = NVSHMEM_VENDOR_PATCH_VERSION;
  nvshmemx_vendor_get_version_info(out + 3, out + 4, out + 5);
}

const MemoryProvider* NvshmemProvider() { return &provider; }

}  // namespace xen_moe
