// Copies between registered memory and a buffer, for tcp_rma.cc.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
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

// A call of the driver, which tells when it has taken long. Then another thread of this process has made the driver
// wait for the GPU, and a kernel on it waits for what this call was to bring: a code module that is loaded in the
// middle of a program does that, and the program has waited for its own limit. CUDA_MODULE_LOADING=EAGER is what helps.
template <class Call>
void Timed(const char* what, Call call) {
  constexpr double kLong = 2.0;
  const auto began = std::chrono::steady_clock::now();
  Check(call(), what);
  const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  if (took > kLong) std::fprintf(stderr, "xen_moe tcp_rma: %s took %.1f s\n", what, took);
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
    Timed("cuCtxSetCurrent", [&] { return Driver::Get()->CtxSetCurrent(context_); });
    Timed("cuMemcpyDtoHAsync", [&] { return Driver::Get()->MemcpyDtoHAsync(buffer, Address(m, at), bytes, stream_); });
    Timed("cuStreamSynchronize", [&] { return Driver::Get()->StreamSynchronize(stream_); });
  }
  void Write(const Memory& m, uint64_t at, size_t bytes) const {
    if (m.kind == kHostMemory) {
      std::memcpy(m.base + at, buffer, bytes);
      return;
    }
    Timed("cuCtxSetCurrent", [&] { return Driver::Get()->CtxSetCurrent(context_); });
    Timed("cuMemcpyHtoDAsync", [&] { return Driver::Get()->MemcpyHtoDAsync(Address(m, at), buffer, bytes, stream_); });
    Timed("cuStreamSynchronize", [&] { return Driver::Get()->StreamSynchronize(stream_); });
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
    Timed("cuStreamWriteValue64",
          [&] { return Driver::Get()->StreamWriteValue64(stream_, Address(m, at), now + value, 0); });
    Timed("cuStreamSynchronize", [&] { return Driver::Get()->StreamSynchronize(stream_); });
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
