#include "ffi/flights.h"

#include <string>

namespace xen_moe {

Flights& Flights::Get() {
  static Flights* flights = new Flights;  // never destroyed: the driver may go first at exit
  return *flights;
}

void* Flights::Fork(Devices* gpus, int ordinal, void* stream, int64_t run) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto flight = open_.lower_bound({ordinal, nullptr}); flight != open_.end() && flight->first.first == ordinal;) {
    if (flight->second.run == run) {
      ++flight;
      continue;
    }
    gpus->Join(ordinal, stream, flight->second.mark);  // its run ended early
    flight = open_.erase(flight);
  }
  return gpus->Fork(ordinal, stream);
}

void Flights::Started(Devices* gpus, int ordinal, const void* result, int64_t run) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto [flight, fresh] = open_.try_emplace({ordinal, result}, Flight{gpus, nullptr, run});
  if (!fresh) {
    Refuse(
        "a flight was started and never finished, and its memory serves another one: finish every flight once, with "
        "dispatch_done or combine_done, in the program that starts it");
  }
  try {
    flight->second.mark = gpus->Mark(ordinal);
  } catch (...) {
    open_.erase(flight);
    throw;
  }
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
