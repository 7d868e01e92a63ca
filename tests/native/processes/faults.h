// Faults and speed of the network of tcp_rma.h: XEN_MOE_RMA.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

namespace rma {

constexpr uint32_t kBrokenStrong = 1, kBrokenSignals = 4;  // bits of `broken`

struct Faults {
  uint32_t seed = 1, broken = 0;
  bool reorder = false, duplicate = false;
  int most_delay_us = 0;
  double bytes_per_s = 0;
  static Faults FromEnvironment() {
    Faults f;
    const char* const text = std::getenv("XEN_MOE_RMA");
    std::string left = text ? text : "";
    while (!left.empty()) {
      const size_t comma = left.find(',');
      const std::string one = left.substr(0, comma);
      left = comma == std::string::npos ? "" : left.substr(comma + 1);
      const size_t is = one.find('=');
      const std::string name = one.substr(0, is);
      const double value = is == std::string::npos ? 1 : std::atof(one.c_str() + is + 1);
      if (name == "seed") {
        f.seed = static_cast<uint32_t>(value);
      } else if (name == "broken") {
        f.broken = static_cast<uint32_t>(value);
      } else if (name == "reorder") {
        f.reorder = value != 0;
      } else if (name == "duplicate") {
        f.duplicate = value != 0;
      } else if (name == "delay_us") {
        f.most_delay_us = static_cast<int>(value);
      } else if (name == "bytes_per_s") {
        f.bytes_per_s = value;
      } else {
        throw std::runtime_error("XEN_MOE_RMA: unknown word " + one);
      }
    }
    return f;
  }
};

// Limits the bytes a second of the whole process: bytes for which the host was late pass at once.
class Throttle {
 public:
  void Pass(size_t bytes, double per_s) {
    if (per_s <= 0) return;
    std::chrono::steady_clock::time_point until;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto now = std::chrono::steady_clock::now();
      if (free_at_ + std::chrono::milliseconds(5) < now) free_at_ = now;  // it was idle: nothing is caught up
      free_at_ += std::chrono::nanoseconds(static_cast<int64_t>(1e9 * bytes / per_s));
      until = free_at_;
    }
    std::this_thread::sleep_until(until);
  }

 private:
  std::mutex mutex_;
  std::chrono::steady_clock::time_point free_at_{};
};
}  // namespace rma
