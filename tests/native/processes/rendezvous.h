// A rendezvous of the processes of one run, in which they exchange numbers: in memory that they share, as children of
// one process, or over TCP, on the nodes of a cluster.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace native {

class Rendezvous {
 public:
  virtual ~Rendezvous() = default;
  // Waits until all processes have called it, and returns the number of each. Throws after `seconds`, or when a process
  // has failed.
  virtual std::vector<uint64_t> AllGather(uint64_t number, double seconds) = 0;
  // Publishes the present step of this process, for a process that finds it silent.
  virtual void ShowStep(const char*) {}
  // Copies `count` bytes of rank 0, a multiple of 8, to all ranks.
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
  std::atomic<int> ended;  // a process has failed, or all processes may end: no process waits any more
  uint64_t numbers[2][kMost];
  Report reports[kMost];
};
std::unique_ptr<Rendezvous> RendezvousInMemory(Shared* shared, int rank, int ranks);
// `address`: HOST:PORT of rank 0, which listens there. Throws when a process has not connected within `seconds`.
std::unique_ptr<Rendezvous> RendezvousOverTcp(const std::string& address, int rank, int ranks, double seconds);

}  // namespace native
