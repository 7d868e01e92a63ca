// What happens in the order of the processes' agreements, and what happens when nobody waits for it.
#include <algorithm>
#include <chrono>
#include <thread>

#include "ffi/symmetric_memory.h"

namespace xen_moe {

Turns& Turns::Get() {
  static Turns* turns = new Turns;
  return *turns;
}

void Turns::Begin(uint64_t ticket, double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return done_ + 1 >= ticket; })) {
    Refuse("the processes' agreement number " + std::to_string(done_ + 1) + " did not end within " +
           std::to_string(static_cast<int>(seconds)) + " s in this process");
  }
}

void Turns::End(uint64_t ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  ended_.insert(ticket);
  while (!ended_.empty() && *ended_.begin() <= done_ + 1) {
    done_ = std::max(done_, *ended_.begin());
    ended_.erase(ended_.begin());
  }
  changed_.notify_all();
}

void Turns::Clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  done_ = 0;
  ended_.clear();
}

void FreeWhenIdle(Devices* gpus, std::vector<int> ordinals, std::vector<std::pair<int, char*>> memory, Pinned records) {
  std::thread([gpus, ordinals = std::move(ordinals), memory = std::move(memory), records] {
    try {
      for (int ordinal : ordinals) {
        while (!gpus->Idle(ordinal, 60.0)) std::this_thread::sleep_for(std::chrono::seconds(1));
      }
      for (const auto& [ordinal, block] : memory) gpus->Free(ordinal, block);
      if (records.host != nullptr) gpus->FreePinned(records);
    } catch (const MemoryError&) {  // the process is ending, and the driver has gone
    }
  }).detach();
}

}  // namespace xen_moe
