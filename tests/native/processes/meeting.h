// Where the processes of one run meet and tell each other numbers: in memory that they share, as children of one
// process, or over TCP, on the nodes of a cluster.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace native {

class Meeting {
 public:
  virtual ~Meeting() = default;
  // Until all are here: each one's number. Throws after `seconds`, or when a process has failed.
  virtual std::vector<uint64_t> Meet(uint64_t number, double seconds) = 0;
  // Publishes the present step of this process, for a process that finds it silent.
  virtual void Say(const char*) {}
  // `bytes` bytes of rank 0, a multiple of 8, to all.
  void Broadcast(char* bytes, size_t count, double seconds);
};

// Memory that the children of one process share. All zero at first.
struct Shared {
  static constexpr int kMost = 16;
  struct Report {
    std::atomic<int> finished;
    bool passed;
    char text[1024];
  };
  std::atomic<uint32_t> arrived, round;
  std::atomic<int> ended;  // a process has failed, or all may go: no process waits any more
  uint64_t numbers[2][kMost];
  Report reports[kMost];
};
std::unique_ptr<Meeting> MeetInMemory(Shared* shared, int rank, int ranks);
// `address`: HOST:PORT of rank 0, which listens there. Throws when not all have come within `seconds`.
std::unique_ptr<Meeting> MeetOverTcp(const std::string& address, int rank, int ranks, double seconds);

}  // namespace native
