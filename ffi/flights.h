// Operations in flight: started by one FFI call, finished by another. See docs/design/cuda.md, "Start and done".
//
// A start is a whole operation on a stream of the library's own, in symmetric memory of its own; its results are
// buffers of XLA's that only the done half gives to anybody else. So the address of the first result is the flight's
// name, and the done half, which has all of them aliased through, finds the flight by it. Where XLA has copied a
// result in between, the copy was made too early and the name is unknown: an error, never data.
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
  // Where a start launches: on a stream that goes on when everything queued on `stream` so far has ended. Flights of
  // earlier runs that nobody finished are waited for by `stream`, and forgotten. Where none is open on the GPU, the
  // kernel shows its beginning, for which `stream` will wait. `result`: the address of the first result.
  // Throws MemoryError where a flight with that result is open: it was started and never finished, and what it still
  // writes must not be written by another one too.
  Takeoff Fork(Devices* gpus, int ordinal, void* stream, const void* result, int64_t run);
  // The start has been launched.
  void Started(Devices* gpus, int ordinal, void* stream, const void* result, int64_t run, const Takeoff& takeoff);
  // Everything queued on `stream` from here on comes after the flight. False: there is none of that name.
  bool Land(Devices* gpus, int ordinal, const void* result, void* stream);
  // `run` ends with an error on this GPU: `stream`, in whose order XLA gives the memory of its open flights to others,
  // waits for them, and they are forgotten.
  void Abandon(Devices* gpus, int ordinal, void* stream, int64_t run);
  // Forgets all. Nothing may be running.
  void Clear();
  // Held from Fork to Started: a start may be several kernels, which nothing on their stream may come between. One for
  // each GPU, because a launch may wait for another GPU's.
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
  // Those of `ordinal` whose run `ended` says has ended. The mutex is held.
  template <class Ended>
  void Forget(Devices* gpus, int ordinal, void* stream, Ended ended);

  std::mutex mutex_;
  std::map<int, std::mutex> launching_;                 // by GPU
  std::map<std::pair<int, const void*>, Flight> open_;  // by GPU and address
};

}  // namespace xen_moe
