// A thread block on a host thread: block.cc.
#pragma once

#include <functional>

#include "cuda_runtime.h"

namespace emulator {

constexpr int kMostShared = 232448;  // bytes of dynamic shared memory that a block can get

[[noreturn]] void Broken(const char* what);
// Runs a block until all its threads have ended. `seed`: of the order in which they run.
void RunBlock(dim3 grid, unsigned index, dim3 threads, const std::function<void()>& body, unsigned seed);

}  // namespace emulator
