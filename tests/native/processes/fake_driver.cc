// The driver's calls of driver.h on files in memory, for tests without a GPU: memory that one process shares, another
// one maps. Copies on a stream are those of the process that copies: any other process that makes one is ended, as it
// might wait there for a kernel that waits for the copy.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "tests/native/processes/driver.h"

namespace {

constexpr int kNotSupported = 801, kInvalid = 1;
struct Allocation {
  int fd;
  int handle_types;
  int holders;
};
struct Mapping {
  size_t bytes;
  rma::Handle handle;
};
std::mutex mutex;
std::map<rma::Handle, Allocation> allocations;
std::map<rma::Address, Mapping> mappings;
rma::Handle last = 0;
char context_of_all;

auto FindMapping(rma::Address at) {
  auto found = mappings.upper_bound(at);
  if (found == mappings.begin()) return mappings.end();
  --found;
  return at < found->first + found->second.bytes ? found : mappings.end();
}
bool Copies() {
  char name[64] = {};
  if (FILE* const f = std::fopen("/proc/self/comm", "r")) {
    if (std::fgets(name, sizeof(name), f) == nullptr) name[0] = '\0';
    std::fclose(f);
  }
  return std::strncmp(name, "xen_moe_rma_cop", 15) == 0;
}
void OnlyThere(const char* what) {
  static const bool there = Copies();
  if (there) return;
  std::fprintf(stderr, "fake driver: %s in a process whose kernels may wait for it\n", what);
  std::abort();
}
void Drop(rma::Handle handle) {
  Allocation& one = allocations.at(handle);
  if (--one.holders > 0) return;
  close(one.fd);
  allocations.erase(handle);
}

}  // namespace

extern "C" {
int cuInit(unsigned) { return 0; }
int cuDeviceGetPCIBusId(char* id, int bytes, int device) {
  std::snprintf(id, bytes, "0000:%02x:00.0", device);
  return 0;
}
int cuDeviceGetByPCIBusId(int* device, const char* id) {
  return std::sscanf(id, "0000:%x:", device) == 1 ? 0 : kInvalid;
}
int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = &context_of_all;
  return 0;
}
int cuCtxGetCurrent(void** context) {
  *context = &context_of_all;
  return 0;
}
int cuCtxSetCurrent(void*) { return 0; }
int cuCtxGetDevice(int* device) {
  *device = 3;
  return 0;
}
int cuCtxSynchronize() { return 0; }
int cuStreamCreateWithPriority(void** stream, unsigned, int) {
  *stream = nullptr;
  return 0;
}
int cuStreamDestroy_v2(void*) { return 0; }
int cuStreamSynchronize(void*) {
  OnlyThere("cuStreamSynchronize");
  return 0;
}
int cuMemcpyDtoH_v2(void* to, rma::Address from, size_t bytes) {
  std::memcpy(to, reinterpret_cast<void*>(from), bytes);
  return 0;
}
int cuMemcpyHtoD_v2(rma::Address to, const void* from, size_t bytes) {
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return 0;
}
int cuMemcpyDtoHAsync_v2(void* to, rma::Address from, size_t bytes, void*) {
  OnlyThere("cuMemcpyDtoHAsync");
  return cuMemcpyDtoH_v2(to, from, bytes);
}
int cuMemcpyHtoDAsync_v2(rma::Address to, const void* from, size_t bytes, void*) {
  OnlyThere("cuMemcpyHtoDAsync");
  return cuMemcpyHtoD_v2(to, from, bytes);
}
int cuMemcpy2DAsync_v2(const rma::Rows* rows, void*) {
  OnlyThere("cuMemcpy2DAsync");
  const bool known =
      rows->from_kind == 1 && rows->to_kind == 2 && rows->width <= rows->from_pitch && rows->width <= rows->to_pitch;
  for (size_t row = 0; known && row < rows->height; ++row) {
    cuMemcpyHtoD_v2(rows->to + row * rows->to_pitch, static_cast<const char*>(rows->from) + row * rows->from_pitch,
                    rows->width);
  }
  return known ? 0 : kInvalid;
}
int cuStreamWriteValue64_v2(void*, rma::Address to, uint64_t value, unsigned) {
  OnlyThere("cuStreamWriteValue64");
  __atomic_store_n(reinterpret_cast<uint64_t*>(to), value, __ATOMIC_RELEASE);
  return 0;
}
int cuMemHostRegister_v2(void*, size_t, unsigned) { return 0; }
int cuMemHostUnregister(void*) { return 0; }
int cuMemGetAddressRange_v2(rma::Address* base, size_t* bytes, rma::Address at) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = FindMapping(at);
  if (found == mappings.end()) return kInvalid;
  *base = found->first, *bytes = found->second.bytes;
  return 0;
}
int cuMemAddressReserve(rma::Address* at, size_t bytes, size_t, rma::Address, unsigned long long) {
  void* const p = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  *at = reinterpret_cast<rma::Address>(p);
  return p == MAP_FAILED ? kInvalid : 0;
}
int cuMemAddressFree(rma::Address at, size_t bytes) {
  return munmap(reinterpret_cast<void*>(at), bytes) == 0 ? 0 : kInvalid;
}
int cuMemCreate(rma::Handle* handle, size_t bytes, const rma::AllocationProperties* wanted, unsigned long long) {
  std::lock_guard<std::mutex> lock(mutex);
  const int fd = memfd_create("fake_gpu", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return kInvalid;
  *handle = ++last;
  allocations[*handle] = {fd, wanted->handle_types, 1};
  return 0;
}
int cuMemRelease(rma::Handle handle) {
  std::lock_guard<std::mutex> lock(mutex);
  Drop(handle);
  return 0;
}
int cuMemMap(rma::Address at, size_t bytes, size_t, rma::Handle handle, unsigned long long) {
  std::lock_guard<std::mutex> lock(mutex);
  Allocation& one = allocations.at(handle);
  if (mappings.count(at)) return kInvalid;
  void* const wanted = reinterpret_cast<void*>(at);
  if (mmap(wanted, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, one.fd, 0) != wanted) return kInvalid;
  ++one.holders;
  mappings[at] = {bytes, handle};
  return 0;
}
int cuMemUnmap(rma::Address at, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = mappings.find(at);
  if (found == mappings.end() || found->second.bytes != bytes) return kInvalid;
  mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  Drop(found->second.handle);
  mappings.erase(found);
  return 0;
}
int cuMemSetAccess(rma::Address at, size_t bytes, const rma::Access* access, size_t) {
  const bool known = access->place.type == 1 && access->place.id == 3 && access->flags == 3;
  return known && mprotect(reinterpret_cast<void*>(at), bytes, PROT_READ | PROT_WRITE) == 0 ? 0 : kInvalid;
}
int cuMemRetainAllocationHandle(rma::Handle* handle, void* at) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = FindMapping(reinterpret_cast<rma::Address>(at));
  if (found == mappings.end()) return kInvalid;
  *handle = found->second.handle;
  ++allocations.at(*handle).holders;
  return 0;
}
int cuMemGetAllocationPropertiesFromHandle(rma::AllocationProperties* out, rma::Handle handle) {
  std::lock_guard<std::mutex> lock(mutex);
  *out = {1, allocations.at(handle).handle_types, {1, 3}, nullptr, {}};
  return 0;
}
int cuMemExportToShareableHandle(void* shareable, rma::Handle handle, int type, unsigned long long) {
  std::lock_guard<std::mutex> lock(mutex);
  const Allocation& one = allocations.at(handle);
  if (!(one.handle_types & type)) return kNotSupported;
  *static_cast<int*>(shareable) = dup(one.fd);
  return 0;
}
int cuMemImportFromShareableHandle(rma::Handle* handle, void* shareable, int type) {
  std::lock_guard<std::mutex> lock(mutex);
  const int fd = dup(static_cast<int>(reinterpret_cast<uintptr_t>(shareable)));
  if (fd < 0) return kInvalid;
  *handle = ++last;
  allocations[*handle] = {fd, type, 1};
  return 0;
}
}
