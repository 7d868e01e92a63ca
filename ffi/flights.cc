#include "ffi/flights.h"

#include <string>

namespace xen_moe {

Flights& Flights::Get() {
  static Flights* flights = new Flights;  // never destroyed: the driver may go first at exit
  return *flights;
}

template <class Ended>
void Flights::Forget(Devices* gpus, int ordinal, void* stream, Ended ended) {
  for (auto flight = open_.lower_bound({ordinal, nullptr}); flight != open_.end() && flight->first.first == ordinal;) {
    if (!ended(flight->second.run)) {
      ++flight;
      continue;
    }
    void* const mark = flight->second.mark;
    flight = open_.erase(flight);
    gpus->Join(ordinal, stream, mark);
  }
}

Takeoff Flights::Fork(Devices* gpus, int ordinal, void* stream, const void* result, int64_t run) {
  std::lock_guard<std::mutex> lock(mutex_);
  Forget(gpus, ordinal, stream, [run](int64_t its) { return its != run; });
  if (open_.count({ordinal, result})) {
    Refuse(
        "a flight was started and never finished, and its memory serves another one: finish every flight once, with "
        "dispatch_done or combine_done, in the program that starts it");
  }
  // The next kernel on `stream`, a matmul say, could take every SM first. Then the flight would get none until that
  // kernel ends, and the other ranks would wait for this one so long. Beside an open flight `stream` is not held back:
  // it would have to wait until that flight has ended.
  const auto open = open_.lower_bound({ordinal, nullptr});
  const bool first = open == open_.end() || open->first.first != ordinal;
  return {gpus->Fork(ordinal, stream), first ? gpus->NextBeginning(ordinal) : Beginning{}};
}

void Flights::Started(Devices* gpus, int ordinal, void* stream, const void* result, int64_t run,
                      const Takeoff& takeoff) {
  std::lock_guard<std::mutex> lock(mutex_);
  void* const mark = gpus->Mark(ordinal);
  open_[{ordinal, result}] = Flight{gpus, mark, run};
  if (takeoff.beginning.word) gpus->AwaitBeginning(ordinal, stream, takeoff.beginning);
}

void Flights::Abandon(Devices* gpus, int ordinal, void* stream, int64_t run) {
  std::lock_guard<std::mutex> lock(mutex_);
  Forget(gpus, ordinal, stream, [run](int64_t its) { return its == run; });
}

bool Flights::Land(Devices* gpus, int ordinal, const void* result, void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto flight = open_.find({ordinal, result});
  if (flight == open_.end()) return false;
  void* const mark = flight->second.mark;
  open_.erase(flight);
  gpus->Join(ordinal, stream, mark);
  return true;
}

void Flights::Clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [name, flight] : open_) flight.gpus->Join(name.first, nullptr, flight.mark);
  open_.clear();
}

int Flights::open() {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(open_.size());
}

}  // namespace xen_moe
