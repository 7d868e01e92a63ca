// The calls of the CUDA driver that copy between the network's buffers and GPU memory, found at run time: where there
// is no driver the network serves host memory alone.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rma {

struct Driver {
  int (*CtxGetCurrent)(void** context);
  int (*CtxSetCurrent)(void* context);
  int (*StreamCreateWithPriority)(void** stream, unsigned flags, int priority);
  int (*StreamDestroy)(void* stream);
  int (*StreamSynchronize)(void* stream);
  int (*StreamWriteValue64)(void* stream, unsigned long long to, uint64_t value, unsigned flags);
  int (*MemcpyDtoHAsync)(void* to, unsigned long long from, size_t bytes, void* stream);
  int (*MemcpyHtoDAsync)(unsigned long long to, const void* from, size_t bytes, void* stream);
  int (*MemHostAlloc)(void** memory, size_t bytes, unsigned flags);
  int (*MemFreeHost)(void* memory);

  static const Driver* Get();  // null: there is none
};

}  // namespace rma
