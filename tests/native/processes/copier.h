// Copies between GPU memory and host memory by a process of their own, for tcp_rma.cc.
//
// The network must copy while a kernel of its process waits for the copied bytes. A call of the driver in that process
// may have to wait for another one that waits for the kernel: seen with CUDA graphs, for as long as the kernel waited.
// The process of copies shares no lock with this one. It has a context of its own on the same GPU, maps the memory
// there through a file descriptor, and copies with the copy engines, which do not wait for a kernel of another process.
//
// xen_moe_rma_copier (copier_main.cc) lies beside the library, or where XEN_MOE_RMA_COPIER says. It ends when the
// process that started it does.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "tests/native/processes/driver.h"

namespace rma {

constexpr size_t kPieceBytes = 256 << 10;  // that are on their way from memory to a socket at once

// Memory of one copying thread that both processes see. The owner writes a question and gives the turn away; the
// process answers and gives it back.
struct Channel {
  enum Turn : uint32_t { kOwner, kCopier };
  enum What : uint32_t { kRead, kWrite, kAdd };
  std::atomic<uint32_t> turn;
  What what;
  uint64_t memory, at, bytes, value;
  int rc;  // CUresult, or -1: no such memory
  alignas(64) uint64_t word;
  alignas(4096) char buffer[kPieceBytes];
};

// Requests of the owner over the socket; one answer, a CUresult, for each.
struct Order {
  enum What : uint32_t { kStart, kMap, kUnmap, kOpen };
  What what;
  uint64_t memory, bytes, offset;  // kMap, with a file descriptor; kUnmap
  char device[32];                 // kStart: its PCI bus id
};

// Waits until it is `whose` turn, spinning first. False: `whose` is the owner, and the process has ended.
bool AwaitTurn(Channel* channel, Channel::Turn whose, int watched);
void GiveTurn(Channel* channel, Channel::Turn whose);

class Copier {
 public:
  // Returns the copier of this process, which starts on the current context's GPU at the first call. Throws.
  static std::shared_ptr<Copier> Get();
  ~Copier();
  Copier(const Copier&) = delete;

  // Maps `bytes` from `base` on; the number of that memory there. Where it may not be shared, memory that may takes its
  // place, at the same address and with the same content.
  uint64_t Map(char* base, uint64_t bytes);
  void Unmap(uint64_t memory);
  Channel* Open();  // a thread and a stream there, for a thread here
  // Done on return. Throws.
  void Run(Channel* channel, Channel::What what, uint64_t memory, uint64_t at, uint64_t bytes, uint64_t value = 0);
  pid_t process() const { return process_; }

 private:
  Copier();
  void Send(const Order& order, int fd, const char* what);

  std::mutex mutex_;
  int socket_ = -1;
  pid_t process_ = -1;
  uint64_t last_memory_ = 0;
};

}  // namespace rma
