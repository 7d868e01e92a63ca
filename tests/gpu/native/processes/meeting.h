// What the processes of one run share: where they meet, the unique id of NCCL's communicator, and what each reports.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace native {

// In memory that all processes map; all zero at first.
struct Meeting {
  static constexpr int kMost = 16;  // processes
  struct Report {
    std::atomic<int> finished;
    bool passed;
    char text[1024];
  };
  std::atomic<uint32_t> arrived, round;
  std::atomic<int> ended;  // a process has failed: nobody waits for it
  char unique_id[128];
  uint64_t numbers[kMost];  // whatever a scenario wants to compare
  Report reports[kMost];

  // Until all `processes` are here.
  void Meet(int processes, double seconds) {
    const uint32_t now = round;
    if (arrived.fetch_add(1) + 1 == static_cast<uint32_t>(processes)) {
      arrived = 0;
      ++round;
      return;
    }
    const auto start = std::chrono::steady_clock::now();
    while (round == now) {
      if (ended) throw std::runtime_error("another process has failed");
      if (std::chrono::steady_clock::now() - start > std::chrono::duration<double>(seconds)) {
        throw std::runtime_error("not all processes came within " + std::to_string(static_cast<int>(seconds)) + " s");
      }
      usleep(100);
    }
  }
};

}  // namespace native
