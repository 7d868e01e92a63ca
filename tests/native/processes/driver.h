// The calls of the CUDA driver that the network's copies need, found at run time: where there is no driver the network
// serves host memory alone. XEN_MOE_RMA_DRIVER names another library (fake_driver.cc) than the driver's.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rma {

using Address = unsigned long long;
using Handle = unsigned long long;

constexpr int kFileDescriptor = 1;  // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

// CUmemAllocationProp, CUmemAccessDesc.
struct Place {
  int type, id;
};
struct AllocationProperties {
  int type, handle_types;
  Place place;
  void* unused;
  unsigned char flags[8];
};
static_assert(sizeof(AllocationProperties) == 32, "CUmemAllocationProp has another layout");
struct Access {
  Place place;
  int flags;
};
// CUDA_MEMCPY2D, from the host to a GPU.
struct Rows {
  size_t from_x = 0, from_y = 0;
  int from_kind = 1;
  const void* from;
  Address from_device = 0;
  void* from_array = nullptr;
  size_t from_pitch;
  size_t to_x = 0, to_y = 0;
  int to_kind = 2;
  void* to_host = nullptr;
  Address to;
  void* to_array = nullptr;
  size_t to_pitch, width, height;
};
static_assert(sizeof(Rows) == 128, "CUDA_MEMCPY2D has another layout");
constexpr Access ReadWrite(int device) { return {{1, device}, 3}; }

struct Driver {
  int (*Init)(unsigned flags);
  int (*DeviceGetPciBusId)(char* id, int bytes, int device);
  int (*DeviceGetByPciBusId)(int* device, const char* id);
  int (*DevicePrimaryCtxRetain)(void** context, int device);
  int (*CtxGetCurrent)(void** context);
  int (*CtxSetCurrent)(void* context);
  int (*CtxGetDevice)(int* device);
  int (*CtxSynchronize)();
  int (*StreamCreateWithPriority)(void** stream, unsigned flags, int priority);
  int (*StreamDestroy)(void* stream);
  int (*StreamSynchronize)(void* stream);
  int (*MemcpyDtoHAsync)(void* to, Address from, size_t bytes, void* stream);
  int (*MemcpyHtoDAsync)(Address to, const void* from, size_t bytes, void* stream);
  int (*Memcpy2DAsync)(const Rows* rows, void* stream);
  int (*StreamWriteValue64)(void* stream, Address to, uint64_t value, unsigned flags);
  int (*MemcpyDtoH)(void* to, Address from, size_t bytes);
  int (*MemcpyHtoD)(Address to, const void* from, size_t bytes);
  int (*MemHostRegister)(void* memory, size_t bytes, unsigned flags);
  int (*MemHostUnregister)(void* memory);
  int (*MemGetAddressRange)(Address* base, size_t* bytes, Address at);
  int (*MemAddressReserve)(Address* at, size_t bytes, size_t alignment, Address wanted, unsigned long long flags);
  int (*MemAddressFree)(Address at, size_t bytes);
  int (*MemCreate)(Handle* handle, size_t bytes, const AllocationProperties* properties, unsigned long long flags);
  int (*MemRelease)(Handle handle);
  int (*MemMap)(Address at, size_t bytes, size_t offset, Handle handle, unsigned long long flags);
  int (*MemUnmap)(Address at, size_t bytes);
  int (*MemSetAccess)(Address at, size_t bytes, const Access* access, size_t count);
  int (*MemRetainAllocationHandle)(Handle* handle, void* at);
  int (*MemGetAllocationProperties)(AllocationProperties* properties, Handle handle);
  int (*MemExport)(void* shareable, Handle handle, int type, unsigned long long flags);
  int (*MemImport)(Handle* handle, void* shareable, int type);

  static const Driver* Get();  // null: there is none
};

void Check(int rc, const char* what);  // throws

}  // namespace rma
