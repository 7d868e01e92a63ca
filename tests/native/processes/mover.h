// Copies between registered memory and a buffer, for tcp_rma.cc.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "tests/native/processes/copier.h"
#include "tests/native/processes/rma_interface.h"

namespace rma {

struct Memory {
  uint64_t id = 0;
  char* base = nullptr;
  uint64_t bytes = 0;
  int kind = kHostMemory;
  uint64_t mapped = 0;  // GPU memory: its number in the process that copies
};

// Moves bytes for one thread. It copies host memory itself. Everything is done on return.
class Mover {
 public:
  Mover() : own_(kPieceBytes) {}
  ~Mover() {
    if (channel_ != nullptr) munmap(channel_, sizeof(Channel));
  }
  Mover(const Mover&) = delete;
  // Before GPU memory is used.
  void UseGpu(const std::shared_ptr<Copier>& copier) { copier_ = copier, channel_ = copier->Open(); }

  char* Buffer(const Memory& m) { return m.kind == kHostMemory ? own_.data() : channel_->buffer; }
  void Read(const Memory& m, uint64_t at, size_t bytes) {
    if (m.kind != kHostMemory) return copier_->Run(channel_, Channel::kRead, m.mapped, at, bytes);
    std::memcpy(own_.data(), m.base + at, bytes);
  }
  void Write(const Memory& m, uint64_t at, size_t bytes) {
    if (m.kind != kHostMemory) return copier_->Run(channel_, Channel::kWrite, m.mapped, at, bytes);
    std::memcpy(m.base + at, own_.data(), bytes);
  }
  // No other thread may add to memory of this group meanwhile. GPU memory: the old word is read, and the sum written.
  void Add(const Memory& m, uint64_t at, uint64_t value) {
    if (m.kind != kHostMemory) return copier_->Run(channel_, Channel::kAdd, m.mapped, at, 8, value);
    __atomic_fetch_add(reinterpret_cast<uint64_t*>(m.base + at), value, __ATOMIC_RELEASE);
  }

 private:
  std::shared_ptr<Copier> copier_;
  Channel* channel_ = nullptr;
  std::vector<char> own_;
};

}  // namespace rma
