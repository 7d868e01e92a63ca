// A network between the nodes of a test, as bad as one may be: the slow half of cuda_kernels/node/transport.cuh over
// host threads. Test code.
//
// A put goes into a queue for its pair of ranks, and one thread delivers. Events that the contract does not promise do
// not happen: by `Faults`, with a seed, payloads arrive late, in any order and in pieces; signals arrive in bursts, but
// never before the payloads that they announce; a completion is reported twice; bytes wait for their turn on the wire.
// The source of a put is read when it is delivered and not before, so that a kernel that writes it too early sends
// something else. Every byte is counted.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <list>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace native {

struct Faults {
  uint32_t seed = 1;
  bool reorder = false;    // payloads in any order, in pieces; otherwise each pair's in the order of the puts
  int most_delay_us = 0;   // of every piece and every signal, at random
  bool duplicate = false;  // a completion comes again later
  double bytes_per_s = 0;  // out of each rank; 0: no limit
  uint32_t broken = 0;     // rules that are not kept, to see that tests find it: kBroken...
};
// A signal that speaks for its own put alone; completions counted, not matched; a signal before its own payload.
constexpr uint32_t kBrokenWeakSignals = 1, kBrokenCompletions = 2, kBrokenSignals = 4;

struct Traffic {
  uint64_t bytes = 0, puts = 0, signals = 0;
};

class Network {
 public:
  Network(int ranks, int ranks_per_node, int signals, const Faults& faults);
  ~Network();
  Network(const Network&) = delete;
  // Memory that puts of this generation (its low byte) go from and to, the word that Fail claims, and those that Notify
  // writes, by rank. No message may be on its way.
  void Register(uint32_t generation, int rank, char* memory, uint64_t bytes);
  void RegisterFailure(int rank, uint64_t* word);
  void RegisterTold(int rank, uint64_t* words);

  // Functions that kernels call, through network_link.cuh. `signal` < 0: none. A put inside a node, outside the memory
  // or of odd size ends the process: it is a fault of the kernel.
  void Put(int context, uint32_t generation, int source, int target, uint64_t to, uint64_t from, uint64_t bytes,
           int signal);
  uint64_t Count(int rank, int signal) const;
  int Pending(int rank, int context);
  void Fail(int source, int target, uint64_t word);
  void Notify(int source, int target, int about, uint64_t word);

  // A test's means to disturb it. Hold(true): nothing arrives until Hold(false). Kill: nothing comes from or to the
  // rank any more, and none of its puts completes.
  void Hold(bool held);
  // While it is held: the next piece, signal or completion arrives now, regardless of its delay, in an order that the
  // seed alone decides. False: nothing is left.
  bool Step();
  void Kill(int rank);
  // The first put of `source` to `target` arrives later by this time, and no later put arrives. Fail and Notify do.
  void Starve(int source, int target, int milliseconds);
  // Puts to `rank` arrive, and are read, so much later.
  void Delay(int rank, int milliseconds);
  // A payload to a higher rank in an operation with an odd number arrives, or its last part does, after all payloads
  // that the next operation sends there, or `milliseconds` later. For operations that are equal in pairs; the number is
  // that of the chunks' headers (rail_plan.h).
  void Overtake(int most_milliseconds);
  // Waits until everything has been delivered, reported and signalled, except for messages of a killed rank.
  void Drain();
  // Sets all counters to zero, as after a reset. No message may be on its way then.
  void ClearCounters();
  Traffic Between(int source, int target) const;
  void ClearTraffic();
  uint64_t LargestBurst() const;  // the most that a counter grew by at once

 private:
  struct Piece {
    uint64_t begin, end, not_before;
    bool overtaken = false;
  };
  struct Message {
    uint64_t ticket = 0;
    int context = 0, source = 0, target = 0, signal = -1;
    char* to = nullptr;
    const char* from = nullptr;
    std::vector<char> kept;     // what `from` held, where it has been read
    std::vector<Piece> pieces;  // that have not arrived
    uint64_t signal_not_before = 0, word = 0, overtaken_until = 0;
    uint32_t epoch = 0;  // of the operation; 0: not known
    int about = -1;      // of Notify: the rank
    bool signalled = false, lost = false;
  };
  struct Again {
    int rank, context;
    uint64_t ticket;
  };
  void Deliver();
  bool DeliverOne(uint64_t now);
  bool MaySignal(const Message& message, uint64_t now) const;
  void Signal(int target, int signal, uint64_t now);
  bool WaitsForNext(const Message& m, uint64_t now) const;
  bool Lost(const Message& m) const { return m.lost || killed_.count(m.source) || killed_.count(m.target); }
  void PostWord(int source, int target, int about, uint64_t word);
  void Complete(int rank, int context, uint64_t ticket);
  uint64_t Later(uint64_t now);

  const int ranks_, ranks_per_node_, signals_;
  const Faults faults_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937 random_;
  std::list<Message> messages_;                                         // in the order in which they were put
  std::vector<Again> again_;                                            // completions to report once more
  std::map<std::pair<int, int>, std::map<uint64_t, int>> outstanding_;  // (rank, context): ticket -> target
  std::map<std::pair<int, int>, int64_t> uncounted_;                    // kBrokenCompletions: puts less completions
  std::map<std::pair<uint32_t, int>, std::pair<char*, uint64_t>> memory_;
  std::vector<uint64_t*> failure_, told_;
  std::vector<uint64_t> counters_, free_at_;
  std::vector<Traffic> traffic_;
  std::set<int> killed_;
  std::map<int, uint64_t> delay_ns_;  // by target
  struct Starved {
    uint64_t delay_ns = 0;
    int puts = 0;
  };
  std::map<std::pair<int, int>, Starved> starved_;  // by source and target
  struct Sent {
    int puts = 0, signalled = 0;
  };
  std::map<std::tuple<int, int, uint32_t>, Sent> sent_;  // by source, target, number of the operation
  uint64_t overtake_ns_ = 0;
  uint64_t tickets_ = 0, largest_burst_ = 0;
  bool held_ = false, ends_ = false;
  std::thread thread_;
};

}  // namespace native
