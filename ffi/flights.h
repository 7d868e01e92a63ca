// Operations in flight: started by one FFI call, finished by another. See docs/design/cuda.md, "Start and done".
//
// A start runs a whole operation on a stream of the library's own, in symmetric memory of its own. Its results are
// buffers of XLA that no other operation reads before the done half has returned. So the address of the first result is
// the flight's name, and the done half, whose results alias its operands, finds the flight by that address. Where XLA
// has copied a result in between, the copy was made too early and the name is unknown: an error, never data.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "ffi/devices.h"

namespace xen_moe {

struct Takeoff {
  void* stream;
  Beginning beginning;
};

class Flights {
 public:
  static Flights& Get();
  // Returns the stream on which a start launches, whose next kernel starts when everything queued on `stream` so far
  // has ended. `stream` waits for flights of earlier runs that were never finished, and they are forgotten. Where no
  // other flight is open on the GPU, the kernel shows its beginning, for which `stream` will wait. `result`: the
  // address of the first result. Throws MemoryError where a flight with that result is open: it was started and never
  // finished, and two flights must not write the same buffers.
  Takeoff Fork(Devices* gpus, int ordinal, void* stream, const void* result, int64_t run);
  // Records that the start has been launched.
  void Started(Devices* gpus, int ordinal, void* stream, const void* result, int64_t run, const Takeoff& takeoff);
  // Makes `stream` wait for the flight with that result, and forgets it. Returns false where there is no such flight.
  bool Land(Devices* gpus, int ordinal, const void* result, void* stream);
  // Called when `run` ends with an error on this GPU: makes `stream` wait for the run's open flights, and forgets them.
  // XLA gives the memory that they write to other buffers in the order of `stream`.
  void Abandon(Devices* gpus, int ordinal, void* stream, int64_t run);
  // Forgets all flights. Nothing may be running.
  void Clear();
  // Held from Fork to Started: a start may be several kernels, and no kernel of another start may come between them on
  // their stream. Each GPU has its own mutex, because a launch may wait for another GPU's launch.
  std::mutex& launching(int ordinal) {
    std::lock_guard<std::mutex> lock(mutex_);
    return launching_[ordinal];
  }
  int open();

 private:
  struct Flight {
    Devices* gpus;
    void* mark;
    int64_t run;
  };
  // Forgets the flights of GPU `ordinal` for whose run `ended` returns true; `stream` waits for them. `mutex_` is held.
  template <class Ended>
  void Forget(Devices* gpus, int ordinal, void* stream, Ended ended);

  std::mutex mutex_;
  std::map<int, std::mutex> launching_;                 // by GPU
  std::map<std::pair<int, const void*>, Flight> open_;  // by GPU and address
};

}  // namespace xen_moe
