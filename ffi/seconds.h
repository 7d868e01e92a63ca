#pragma once

#include <chrono>

namespace xen_moe {

inline double SecondsSince(std::chrono::steady_clock::time_point began) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

}  // namespace xen_moe
