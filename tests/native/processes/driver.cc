#include "tests/native/processes/driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace rma {
namespace {

bool Open(Driver* d) {
  const char* const other = std::getenv("XEN_MOE_RMA_DRIVER");
  void* const library = dlopen(other != nullptr ? other : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return false;
  bool all = true;
  auto find = [&](const char* name, auto* f) {
    *f = reinterpret_cast<std::remove_pointer_t<decltype(f)>>(dlsym(library, name));
    all &= *f != nullptr;
  };
  find("cuInit", &d->Init);
  find("cuDeviceGetPCIBusId", &d->DeviceGetPciBusId);
  find("cuDeviceGetByPCIBusId", &d->DeviceGetByPciBusId);
  find("cuDevicePrimaryCtxRetain", &d->DevicePrimaryCtxRetain);
  find("cuCtxGetCurrent", &d->CtxGetCurrent);
  find("cuCtxSetCurrent", &d->CtxSetCurrent);
  find("cuCtxGetDevice", &d->CtxGetDevice);
  find("cuCtxSynchronize", &d->CtxSynchronize);
  find("cuStreamCreateWithPriority", &d->StreamCreateWithPriority);
  find("cuStreamDestroy_v2", &d->StreamDestroy);
  find("cuStreamSynchronize", &d->StreamSynchronize);
  find("cuMemcpyDtoHAsync_v2", &d->MemcpyDtoHAsync);
  find("cuMemcpyHtoDAsync_v2", &d->MemcpyHtoDAsync);
  find("cuMemcpy2DAsync_v2", &d->Memcpy2DAsync);
  find("cuStreamWriteValue64_v2", &d->StreamWriteValue64);
  find("cuMemcpyDtoH_v2", &d->MemcpyDtoH);
  find("cuMemcpyHtoD_v2", &d->MemcpyHtoD);
  find("cuMemHostRegister_v2", &d->MemHostRegister);
  find("cuMemHostUnregister", &d->MemHostUnregister);
  find("cuMemGetAddressRange_v2", &d->MemGetAddressRange);
  find("cuMemAddressReserve", &d->MemAddressReserve);
  find("cuMemAddressFree", &d->MemAddressFree);
  find("cuMemCreate", &d->MemCreate);
  find("cuMemRelease", &d->MemRelease);
  find("cuMemMap", &d->MemMap);
  find("cuMemUnmap", &d->MemUnmap);
  find("cuMemSetAccess", &d->MemSetAccess);
  find("cuMemRetainAllocationHandle", &d->MemRetainAllocationHandle);
  find("cuMemGetAllocationPropertiesFromHandle", &d->MemGetAllocationProperties);
  find("cuMemExportToShareableHandle", &d->MemExport);
  find("cuMemImportFromShareableHandle", &d->MemImport);
  return all;
}

}  // namespace

const Driver* Driver::Get() {
  static Driver driver{};
  static const bool there = Open(&driver);
  return there ? &driver : nullptr;
}

void Check(int rc, const char* what) {
  if (rc != 0) throw std::runtime_error(std::string(what) + " failed with CUresult " + std::to_string(rc));
}

}  // namespace rma
