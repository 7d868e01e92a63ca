#include "tests/gpu/native/processes/driver.h"

#include <dlfcn.h>

namespace rma {
namespace {

template <class F>
bool Find(void* library, const char* name, F* f) {
  *f = reinterpret_cast<F>(dlsym(library, name));
  return *f != nullptr;
}
bool Open(Driver* d) {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  return library != nullptr && Find(library, "cuCtxGetCurrent", &d->CtxGetCurrent) &&
         Find(library, "cuCtxSetCurrent", &d->CtxSetCurrent) &&
         Find(library, "cuStreamCreateWithPriority", &d->StreamCreateWithPriority) &&
         Find(library, "cuStreamDestroy_v2", &d->StreamDestroy) &&
         Find(library, "cuStreamSynchronize", &d->StreamSynchronize) &&
         Find(library, "cuStreamWriteValue64_v2", &d->StreamWriteValue64) &&
         Find(library, "cuMemcpyDtoHAsync_v2", &d->MemcpyDtoHAsync) &&
         Find(library, "cuMemcpyHtoDAsync_v2", &d->MemcpyHtoDAsync) &&
         Find(library, "cuMemHostAlloc", &d->MemHostAlloc) && Find(library, "cuMemFreeHost", &d->MemFreeHost);
}

}  // namespace

const Driver* Driver::Get() {
  static Driver driver{};
  static const bool there = Open(&driver);
  return there ? &driver : nullptr;
}

}  // namespace rma
