#include "tests/native/fakes/fake_devices.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace xen_moe {

FakeDevices& FakeDevices::Get() {
  static FakeDevices* fake = new FakeDevices;
  return *fake;
}

void FakeDevices::Count(const char* what) {
  if (calls_++ != fail_at_) return;
  throw MemoryError{true, std::string("xen_moe_jax: ") + what + ": told to fail"};
}

// Every access must lie in a block that is alive.
void FakeDevices::Touch(const void* memory, uint64_t bytes) {
  const char* at = static_cast<const char*>(memory);
  auto block = blocks_.upper_bound(at);
  if (block == blocks_.begin() || (--block, at + bytes > block->first + block->second)) {
    Refuse("access to memory that is not allocated");
  }
}

char* FakeDevices::New(uint64_t bytes, const char* what) {
  std::lock_guard<std::mutex> lock(mutex_);
  Count(what);
  char* memory = static_cast<char*>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  std::memset(memory, 0xAB, bytes);  // nothing may rely on fresh memory
  blocks_[memory] = bytes;
  return memory;
}

void FakeDevices::Delete(char* memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (memory == nullptr) return;
  if (blocks_.erase(memory) == 0) std::abort();  // freed twice
  std::free(memory);
}

void FakeDevices::Adopt(const char* memory, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!blocks_.emplace(memory, bytes).second) std::abort();  // given out twice
}

void FakeDevices::Forget(const char* memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (blocks_.erase(memory) == 0) std::abort();
}

void FakeDevices::Prepare(const std::vector<int>&, int, int, bool) {}
int FakeDevices::Select(int) { return 0; }
int FakeDevices::SmCount(int) { return 132; }
void FakeDevices::CheckPeerAccess(int, int) {}

char* FakeDevices::Allocate(int, uint64_t bytes, const std::vector<int>&) { return New(bytes, "Allocate"); }
void FakeDevices::Free(int, char* memory) { Delete(memory); }

Pinned FakeDevices::AllocatePinned(uint64_t bytes) {
  char* memory = New(bytes, "AllocatePinned");
  std::memset(memory, 0, bytes);
  return {memory, memory};
}
void FakeDevices::FreePinned(const Pinned& memory) { Delete(memory.host); }

void FakeDevices::Write(int, void* to, const void* from, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  Count("Write");
  Touch(to, bytes);
  std::memcpy(to, from, bytes);
}
void FakeDevices::Read(int, void* to, const void* from, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  Count("Read");
  Touch(from, bytes);
  std::memcpy(to, from, bytes);
}
void FakeDevices::Zero(int, void* to, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  Count("Zero");
  Touch(to, bytes);
  std::memset(to, 0, bytes);
}

bool FakeDevices::Idle(int, double seconds) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  for (;;) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!busy_) return true;
    }
    if (std::chrono::steady_clock::now() >= limit) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void* FakeDevices::Fork(int, void*) {
  std::lock_guard<std::mutex> lock(mutex_);
  Count("Fork");
  return this;
}
Beginning FakeDevices::NextBeginning(int) {
  std::lock_guard<std::mutex> lock(mutex_);
  return {&begun_, ++beginnings_};
}
void FakeDevices::AwaitBeginning(int, void*, const Beginning& beginning) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (beginning.word != &begun_ || beginning.number > beginnings_) std::abort();  // no kernel would ever reach it
  ++held_back_;
}
void* FakeDevices::Mark(int) {
  std::lock_guard<std::mutex> lock(mutex_);
  Count("Mark");
  ++marks_;
  return this;
}
void FakeDevices::Join(int, void*, void*) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (--marks_ < 0) std::abort();  // given back twice
}
int FakeDevices::marks() {
  std::lock_guard<std::mutex> lock(mutex_);
  return marks_;
}
int FakeDevices::held_back() {
  std::lock_guard<std::mutex> lock(mutex_);
  return held_back_;
}

void FakeDevices::FailAfter(int calls) {
  std::lock_guard<std::mutex> lock(mutex_);
  fail_at_ = calls < 0 ? -1 : calls_ + calls;
}
void FakeDevices::SetBusy(bool busy) {
  std::lock_guard<std::mutex> lock(mutex_);
  busy_ = busy;
}
int FakeDevices::calls() {
  std::lock_guard<std::mutex> lock(mutex_);
  return calls_;
}
uint64_t FakeDevices::held() {
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t bytes = 0;
  for (const auto& block : blocks_) bytes += block.second;
  return bytes;
}

namespace {
void* ProviderAllocate(uint64_t bytes) {
  try {
    return FakeDevices::Get().New(bytes, "the provider's allocate");
  } catch (const MemoryError&) {
    return nullptr;
  }
}
void ProviderRelease(void* own) { FakeDevices::Get().Delete(static_cast<char*>(own)); }
void* ProviderPeer(void* own, int) { return own; }
const char* ProviderReason() { return "told to fail"; }
const MemoryProvider provider{
    "a fake",       0,       ProviderAllocate, nullptr, nullptr, ProviderRelease, ProviderPeer,
    ProviderReason, nullptr, nullptr,          nullptr};
}  // namespace

const MemoryProvider* FakeProvider() { return &provider; }

}  // namespace xen_moe
