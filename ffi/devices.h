// Everything that workspaces ask of GPUs, so that the code of workspaces compiles, runs and is tested without a GPU
// (tests/native/fakes/fake_devices.h). cuda_devices.cc implements it.
//
// After Prepare, no function but Idle waits for a running kernel, and none waits without a limit: growth and reset
// happen while kernels of this library wait for each other.
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

// How a kernel shows that it has begun: it sets `word`, which lies on its GPU, to `number`. The numbers of one word
// grow.
struct Beginning {
  uint32_t* word = nullptr;  // null: no stream waits for the beginning of the kernel
  uint32_t number = 0;
};

class Devices {
 public:
  virtual ~Devices() = default;
  // Called before a group of `ranks` ranks in `nodes` nodes first uses these GPUs: makes contexts and streams, and
  // loads every kernel that the group may run. Where the group spans processes (`across`), its kernels between nodes
  // are left to LinkKernels::prepare.
  virtual void Prepare(const std::vector<int>& ordinals, int ranks, int nodes, bool across) = 0;
  // Makes `ordinal` the GPU of the calling thread. Returns the GPU that the thread had before.
  virtual int Select(int ordinal) = 0;
  virtual int SmCount(int ordinal) = 0;
  // Throws MemoryError, with the remedy, where kernels on GPU `from` cannot load and store the memory of GPU `to`.
  virtual void CheckPeerAccess(int from, int to) = 0;
  // Returns memory of GPU `ordinal` that kernels on all GPUs `readers` of this process can load and store.
  virtual char* Allocate(int ordinal, uint64_t bytes, const std::vector<int>& readers) = 0;
  // Frees without waiting: no kernel and no copy may use the memory any more. `memory` may be null.
  virtual void Free(int ordinal, char* memory) = 0;
  virtual Pinned AllocatePinned(uint64_t bytes) = 0;
  virtual void FreePinned(const Pinned& memory) = 0;
  // These three copy on a stream of their own and return when the copy has ended. No kernel has to end first.
  virtual void Write(int ordinal, void* to, const void* from, uint64_t bytes) = 0;
  virtual void Read(int ordinal, void* to, const void* from, uint64_t bytes) = 0;
  virtual void Zero(int ordinal, void* to, uint64_t bytes) = 0;
  // Returns whether everything that was queued on the GPU ended within `seconds`.
  virtual bool Idle(int ordinal, double seconds) = 0;

  // For asynchronous operations (flights.h). Returns the library's own stream of this GPU, whose next kernel starts
  // when everything queued on `stream` so far has ended.
  virtual void* Fork(int ordinal, void* stream) = 0;
  // Returns how the next kernel on the library's stream is to show that it has begun.
  virtual Beginning NextBeginning(int ordinal) = 0;
  // Makes `stream` wait until the kernel that was given `beginning` has begun. That kernel must have been launched.
  virtual void AwaitBeginning(int ordinal, void* stream, const Beginning& beginning) = 0;
  // Returns a mark behind everything queued on the library's stream.
  virtual void* Mark(int ordinal) = 0;
  // Makes `stream` wait until the mark has been reached, and gives the mark back. `stream` may be null: no stream
  // waits.
  virtual void Join(int ordinal, void* stream, void* mark) = 0;
};

Devices& CudaDevices();

}  // namespace xen_moe
