// What workspaces ask of GPUs, and nothing else: their logic compiles, runs and is tested without any
// (ffi/fake_devices.h). cuda_devices.cc implements it.
//
// After Prepare, nothing here waits for a running kernel, except Idle, and nothing waits without a limit: growth and
// reset happen while kernels of this library wait for each other.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace xen_moe {

// Thrown with a message for the user; handlers turn it into an ffi::Error.
struct MemoryError {
  bool exhausted;  // not enough memory, as opposed to a wrong argument
  std::string message;
};
[[noreturn]] inline void Refuse(std::string message) { throw MemoryError{false, "xen_moe_jax: " + std::move(message)}; }

// Mapped host memory, as the host and as every GPU of the process sees it.
struct Pinned {
  char* host = nullptr;
  char* device = nullptr;
};

// A word on a GPU that has reached `number` when a kernel has begun; without a word nobody waits for that.
struct Beginning {
  uint32_t* word = nullptr;
  uint32_t number = 0;
};

class Devices {
 public:
  virtual ~Devices() = default;
  // Before the first use of these GPUs by a group of `ranks` in `nodes` nodes: contexts, streams, every kernel loaded
  // that it may run. `across` processes: but for those between nodes, which its link loads (LinkKernels::prepare).
  virtual void Prepare(const std::vector<int>& ordinals, int ranks, int nodes, bool across) = 0;
  // Makes it the GPU of the calling thread, and returns the one that was.
  virtual int Select(int ordinal) = 0;
  virtual int SmCount(int ordinal) = 0;
  // Refuses with the remedy where `from` cannot load and store the memory of `to`.
  virtual void CheckPeerAccess(int from, int to) = 0;
  // Memory of GPU `ordinal` that all GPUs `readers` of this process can load and store, `*held` bytes of it.
  virtual char* Allocate(int ordinal, uint64_t bytes, const std::vector<int>& readers) = 0;
  // Nothing may use the memory any more: nobody waits for it.
  virtual void Free(int ordinal, char* memory) = 0;
  virtual Pinned AllocatePinned(uint64_t bytes) = 0;
  virtual void FreePinned(const Pinned& memory) = 0;
  // Device memory that is not in use by a copy of the host's; done on return. On a stream of its own.
  virtual void Write(int ordinal, void* to, const void* from, uint64_t bytes) = 0;
  virtual void Read(int ordinal, void* to, const void* from, uint64_t bytes) = 0;
  virtual void Zero(int ordinal, void* to, uint64_t bytes) = 0;
  // Whether everything that was queued on the GPU ended within `seconds`.
  virtual bool Idle(int ordinal, double seconds) = 0;
  // Flights (flights.h). A stream of the library's own, which goes on when everything queued on `stream` has ended.
  virtual void* Fork(int ordinal, void* stream) = 0;
  // How the next kernel on that stream shows that it has begun.
  virtual Beginning NextBeginning(int ordinal) = 0;
  // `stream` goes on when the kernel that was given `beginning` has begun. It has been launched.
  virtual void AwaitBeginning(int ordinal, void* stream, const Beginning& beginning) = 0;
  // A mark behind everything queued on that stream.
  virtual void* Mark(int ordinal) = 0;
  // `stream` goes on when the mark has been reached. The mark is given back; without a stream that is all.
  virtual void Join(int ordinal, void* stream, void* mark) = 0;
};

Devices& CudaDevices();

}  // namespace xen_moe
