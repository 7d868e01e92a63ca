// GPUs made of host memory, for tests of everything that the host does with GPUs. A test can make any call fail that
// can fail on a GPU.
#pragma once

#include <map>
#include <mutex>

#include "ffi/devices.h"
#include "ffi/memory_provider.h"

namespace xen_moe {

class FakeDevices final : public Devices {
 public:
  static FakeDevices& Get();
  void Prepare(const std::vector<int>& ordinals, int ranks, int nodes, bool across) override;
  int Select(int ordinal) override;
  int SmCount(int ordinal) override;
  void CheckPeerAccess(int from, int to) override;
  char* Allocate(int ordinal, uint64_t bytes, const std::vector<int>& readers) override;
  void Free(int ordinal, char* memory) override;
  Pinned AllocatePinned(uint64_t bytes) override;
  void FreePinned(const Pinned& memory) override;
  void Write(int ordinal, void* to, const void* from, uint64_t bytes) override;
  void Read(int ordinal, void* to, const void* from, uint64_t bytes) override;
  void Zero(int ordinal, void* to, uint64_t bytes) override;
  bool Idle(int ordinal, double seconds) override;
  // There is one stream; marks are counted.
  void* Fork(int ordinal, void* stream) override;
  Beginning NextBeginning(int ordinal) override;
  void AwaitBeginning(int ordinal, void* stream, const Beginning& beginning) override;
  void* Mark(int ordinal) override;
  void Join(int ordinal, void* stream, void* mark) override;
  int marks();      // marks that Mark has given and Join has not taken back
  int held_back();  // how often a stream was made to wait for the beginning of a kernel

  // The call after `calls` more fails, as if memory had run out; negative: none does. Calls of the provider count too.
  void FailAfter(int calls);
  void SetBusy(bool busy);
  int calls();
  uint64_t held();  // bytes allocated and not freed, pinned memory and the provider's included
  char* New(uint64_t bytes, const char* what);
  void Delete(char* memory);
  // Memory that the caller has allocated, and frees after Forget.
  void Adopt(const char* memory, uint64_t bytes);
  void Forget(const char* memory);

 private:
  void Count(const char* what);
  void Touch(const void* memory, uint64_t bytes);
  std::mutex mutex_;
  std::map<const char*, uint64_t> blocks_;
  int calls_ = 0, fail_at_ = -1, marks_ = 0, held_back_ = 0;
  uint32_t begun_ = 0, beginnings_ = 0;
  bool busy_ = false;
};

// Gives memory of FakeDevices; the "peers" of a block are the block itself.
const MemoryProvider* FakeProvider();

}  // namespace xen_moe
