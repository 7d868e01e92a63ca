// Copies between registered memory and a buffer, for tcp_rma.cc.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/gpu/native/processes/driver.h"
#include "tests/gpu/native/processes/rma_interface.h"

namespace rma {

constexpr size_t kPieceBytes = 256 << 10;  // that are on their way from memory to a socket at once

struct Memory {
  uint64_t id = 0;
  char* base = nullptr;
  uint64_t bytes = 0;
  int kind = kHostMemory;
};

inline void Check(int rc, const char* what) {
  if (rc != 0) throw std::runtime_error(std::string(what) + " failed with CUresult " + std::to_string(rc));
}

// Copies between a buffer and registered memory. Done on return. All movers of one direction share a stream: streams of
// their own might have to wait for a kernel that spins.
class Mover {
 public:
  Mover() : own_(kPieceBytes) { buffer = own_.data(); }
  ~Mover() {
    if (context_ != nullptr) Driver::Get()->MemFreeHost(buffer);
  }
  Mover(const Mover&) = delete;
  // Before device memory is used.
  void UseGpu(void* context, void* stream) {
    context_ = context, stream_ = stream;
    Check(Driver::Get()->MemHostAlloc(reinterpret_cast<void**>(&buffer), kPieceBytes, 1), "cuMemHostAlloc");
  }
  void Read(const Memory& m, uint64_t at, size_t bytes) const {
    if (m.kind == kHostMemory) {
      std::memcpy(buffer, m.base + at, bytes);
      return;
    }
    Check(Driver::Get()->CtxSetCurrent(context_), "cuCtxSetCurrent");
    Check(Driver::Get()->MemcpyDtoHAsync(buffer, Address(m, at), bytes, stream_), "cuMemcpyDtoHAsync");
    Check(Driver::Get()->StreamSynchronize(stream_), "cuStreamSynchronize");
  }
  void Write(const Memory& m, uint64_t at, size_t bytes) const {
    if (m.kind == kHostMemory) {
      std::memcpy(m.base + at, buffer, bytes);
      return;
    }
    Check(Driver::Get()->CtxSetCurrent(context_), "cuCtxSetCurrent");
    Check(Driver::Get()->MemcpyHtoDAsync(Address(m, at), buffer, bytes, stream_), "cuMemcpyHtoDAsync");
    Check(Driver::Get()->StreamSynchronize(stream_), "cuStreamSynchronize");
  }
  // Nobody else may add to memory of this group meanwhile. GPU memory: a load sees the word before or after, whole.
  void Add(const Memory& m, uint64_t at, uint64_t value) const {
    if (m.kind == kHostMemory) {
      __atomic_fetch_add(reinterpret_cast<uint64_t*>(m.base + at), value, __ATOMIC_RELEASE);
      return;
    }
    Read(m, at, 8);
    uint64_t now;
    std::memcpy(&now, buffer, 8);
    Check(Driver::Get()->StreamWriteValue64(stream_, Address(m, at), now + value, 0), "cuStreamWriteValue64");
    Check(Driver::Get()->StreamSynchronize(stream_), "cuStreamSynchronize");
  }
  char* buffer = nullptr;

 private:
  static unsigned long long Address(const Memory& m, uint64_t at) {
    return reinterpret_cast<unsigned long long>(m.base + at);
  }
  void* context_ = nullptr;
  void* stream_ = nullptr;
  std::vector<char> own_;
};

}  // namespace rma
