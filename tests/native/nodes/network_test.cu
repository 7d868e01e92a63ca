// The network of network.h by itself, and the six calls of cuda_kernels/node/transport.cuh over it. For the emulator.
//   network_test NAME|all [SEED]
// One line per test. Exit status 0: all passed. Each rule of the network is also broken on purpose, and the test that
// stands for it must then fail.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>

#include "cuda_kernels/node/transport.cuh"
#include "tests/native/expectations.h"
#include "tests/native/nodes/network_link.cuh"

namespace native {

using namespace xen_moe::XEN_MOE_VARIANT;

namespace {

constexpr uint64_t kSlot = 256, kSlots = 64;
// The six calls show the expected effects by chance, less often on a busy machine: the test tries this number of times,
// with another seed, and twice the delay each time up to this one.
constexpr uint32_t kAttempts = 20;
constexpr int kMostDelayUs = 20000;

// Ranks of two nodes with `kSlots` slots of memory each: the first half to put from, the second to put to.
struct Hosts {
  Network network;
  std::vector<std::vector<char>> memory;
  Hosts(int ranks, int ranks_per_node, const Faults& faults) : network(ranks, ranks_per_node, 64, faults) {
    for (int r = 0; r < ranks; ++r) memory.emplace_back(2 * kSlots * kSlot);
    for (int r = 0; r < ranks; ++r) network.Register(1, r, memory[r].data(), memory[r].size());
  }
  char* From(int rank, uint64_t slot) { return memory[rank].data() + slot * kSlot; }
  char* To(int rank, uint64_t slot) { return memory[rank].data() + (kSlots + slot) * kSlot; }
  void Put(int source, int target, uint64_t slot, int signal, int context = 0) {
    network.Put(context, 1, source, target, (kSlots + slot) * kSlot, slot * kSlot, kSlot, signal);
  }
  bool Holds(int rank, uint64_t slot, char value) {
    for (uint64_t i = 0; i < kSlot; ++i) {
      if (__atomic_load_n(To(rank, slot) + i, __ATOMIC_RELAXED) != value) return false;
    }
    return true;
  }
};

// The first three go step by step: the state between two arrivals depends on the seed alone.

// A signal speaks for its own put and for all earlier ones of its context: of those none may be missing.
void Signals(const Faults& faults) {
  for (int round = 0; round < 40; ++round) {
    Faults own = faults;
    own.seed = faults.seed * 1000 + round;
    Hosts hosts(2, 1, own);
    hosts.network.Hold(true);
    for (uint64_t slot = 0; slot < kSlots; ++slot) {
      std::memset(hosts.From(0, slot), static_cast<int>(slot + 1), kSlot);
      hosts.Put(0, 1, slot, slot % 8 == 7 ? 3 : -1);
    }
    while (hosts.network.Step()) {
      const uint64_t seen = hosts.network.Count(1, 3);
      for (uint64_t slot = 0; slot < 8 * seen; ++slot) {
        Expect(hosts.Holds(1, slot, static_cast<char>(slot + 1)),
               Text("seed %u: after %d signals slot %d has not arrived", own.seed, static_cast<int>(seen),
                    static_cast<int>(slot)));
      }
    }
    Expect(hosts.network.Count(1, 3) == kSlots / 8, "not as many signals came as were sent");
  }
}
// Unsignalled puts overtake each other, or it is not the network that it says it is.
void Reorders(const Faults& faults) {
  Hosts hosts(2, 1, faults);
  hosts.network.Hold(true);
  for (uint64_t slot = 0; slot < kSlots; ++slot) std::memset(hosts.From(0, slot), 1, kSlot);
  for (uint64_t slot = 0; slot < kSlots; ++slot) hosts.Put(0, 1, slot, -1);
  int overtaken = 0;
  while (hosts.network.Step()) {
    bool earlier = true;
    for (uint64_t slot = 0; slot < kSlots; ++slot) {
      const bool here = hosts.Holds(1, slot, 1);
      overtaken += here && !earlier;
      earlier &= here;
    }
  }
  Expect(overtaken > 0, "every put arrived before those behind it");
}
// The source is read when the put is delivered. A rank that has waited for all completions may write it again.
void Completions(const Faults& faults) {
  for (int round = 0; round < 40; ++round) {
    Faults own = faults;
    own.seed = faults.seed * 1000 + round;
    Hosts hosts(2, 1, own);
    hosts.network.Hold(true);
    for (int repeat = 0; repeat < 8; ++repeat) {
      const char value = static_cast<char>(repeat + 1);
      for (uint64_t slot = 0; slot < 8; ++slot) {
        std::memset(hosts.From(0, slot), value, kSlot);
        hosts.Put(0, 1, slot, -1);
      }
      while (hosts.network.Pending(0, 0) >= 0) Expect(hosts.network.Step(), "a put never completes");
      for (uint64_t slot = 0; slot < 8; ++slot) {
        Expect(hosts.Holds(1, slot, value), Text("seed %u: a put was reported as done before it was", own.seed));
        std::memset(hosts.From(0, slot), 0x7F, kSlot);
      }
    }
  }
}
// Signals that are held back together arrive together.
void Bursts(const Faults& faults) {
  Hosts hosts(2, 1, faults);
  hosts.network.Hold(true);
  for (uint64_t slot = 0; slot < 8; ++slot) hosts.Put(0, 1, slot, 5);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  Expect(hosts.network.Count(1, 5) == 0 && !hosts.Holds(1, 0, 0) == false, "something arrived while it was held");
  hosts.network.Hold(false);
  hosts.network.Drain();
  Expect(hosts.network.Count(1, 5) == 8, "signals are missing");
  Expect(hosts.network.LargestBurst() > 1, "every signal came by itself");
}
void Throttles(const Faults& faults) {
  Hosts hosts(4, 2, faults);
  const double start = Now();
  for (uint64_t slot = 0; slot < 50; ++slot) hosts.Put(0, 2 + static_cast<int>(slot % 2), slot, -1);
  hosts.network.Drain();
  const double least = 49 * kSlot / faults.bytes_per_s;
  Expect(Now() - start >= least, Text("50 puts took %.3f s instead of %.3f", Now() - start, least));
  Expect(hosts.network.Between(0, 2).bytes == 25 * kSlot && hosts.network.Between(0, 3).bytes == 25 * kSlot &&
             hosts.network.Between(2, 0).bytes == 0 && hosts.network.Between(0, 2).puts == 25,
         "bytes are not counted as they were put");
}
void Kills(const Faults& faults) {
  Hosts hosts(3, 1, faults);
  for (int r = 0; r < 3; ++r) std::memset(hosts.From(r, 0), 9, kSlot);
  hosts.network.Kill(2);
  hosts.Put(0, 2, 0, 1);
  hosts.Put(2, 1, 0, 1);
  hosts.Put(0, 1, 0, 2, 1);
  hosts.network.Drain();
  Expect(hosts.Holds(1, 0, 9) && hosts.network.Count(1, 2) == 1, "what is between the living did not arrive");
  Expect(hosts.network.Count(2, 1) == 0 && hosts.network.Count(1, 1) == 0 && !hosts.Holds(2, 0, 9),
         "something went to or came from a dead rank");
  Expect(hosts.network.Pending(0, 0) == 2 && hosts.network.Pending(0, 1) < 0, "a put to a dead rank is done");
}
// The first of one rank's puts to another arrives late and the rest never; words of Notify arrive, and so do the puts
// of all other ranks.
void Starves(const Faults& faults) {
  Hosts hosts(3, 1, faults);
  std::vector<uint64_t> told(3);
  hosts.network.RegisterTold(1, told.data());
  for (uint64_t slot = 0; slot < 3; ++slot) std::memset(hosts.From(0, slot), 9, kSlot);
  hosts.network.Starve(0, 1, 200);
  const double start = Now();
  hosts.Put(0, 1, 0, 1);
  hosts.Put(0, 1, 1, 2);
  hosts.Put(0, 2, 2, 1);
  hosts.network.Notify(0, 1, 2, 77);
  hosts.network.Drain();
  Expect(Now() - start > 0.19, "the first did not come late");
  Expect(hosts.Holds(1, 0, 9) && hosts.network.Count(1, 1) == 1, "the first did not come");
  Expect(!hosts.Holds(1, 1, 9) && hosts.network.Count(1, 2) == 0, "the second came");
  Expect(hosts.Holds(2, 2, 9) && hosts.network.Count(2, 1) == 1, "what goes to another rank did not come");
  Expect(told == std::vector<uint64_t>{0, 0, 77}, "the word did not come");
}

// -- the six calls
// -----------------------------------------------------------------------------------------------------

struct CallsParams {
  Control* control;
  Mailbox* mailbox;
  NetworkLink link;
  char* memory;
  int ranks, rank, ranks_per_node, rounds;
  uint64_t timeout_ns;
  uint32_t fails;  // a rank that only announces a failure to all others; ~0: none
  uint32_t* wrong;
};

__device__ void FillRunning(Running& run, const CallsParams& p) {
  run = Running{};
  run.control = p.control, run.mailbox = p.mailbox, run.timeout_ns = p.timeout_ns, run.epoch = 1;
  run.ranks = p.ranks, run.rank = p.rank, run.members = run.active = (1u << p.ranks) - 1;
  run.reachable = run.meets = ((1u << p.ranks_per_node) - 1) << (p.rank / p.ranks_per_node * p.ranks_per_node);
  run.generation = 1;
}

// Each of two warps sends to all ranks of other nodes, round after round, from memory that it writes again after each:
// one put, and one with the signal. Signals: 16 * warp + source; the barriers' are 32 + source.
__global__ void CallsKernel(const CallsParams p) {
  __shared__ Running run;
  if (threadIdx.x == 0) FillRunning(run, p);
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x & 31);
  if (warp > 1) return;
  const Transport<NetworkLink> transport(p.link, run);
  const uint32_t far = run.active & ~run.reachable;
  auto give_up = [&] {  // as the operations do
    if (lane != 0) return;
    for (uint32_t m = far; m; m &= m - 1) transport.Fail(__ffs(m) - 1, LoadAcquireSystem(&run.mailbox->failure));
  };
  auto word = [&](int rank, int round, int half) { return 1 + rank + 16 * round + 4096 * half + 65536 * warp; };
  auto own = [&](int half) { return static_cast<uint64_t>(2 * warp + half) * kSlot; };
  auto of = [&](int source, int half) { return (4 + 4 * static_cast<uint64_t>(source) + 2 * warp + half) * kSlot; };
  if (p.fails == static_cast<uint32_t>(p.rank)) {
    const uint64_t told = PackFailure({Cause::kIndex, Operation::kDispatch, Step::kRows, p.rank, p.rank, 1});
    if (warp == 0 && lane == 0) {
      for (uint32_t m = far; m; m &= m - 1) transport.Fail(__ffs(m) - 1, told);
    }
    return;
  }
  for (int round = 0; round < p.rounds; ++round) {
    for (int half = 0; half < 2; ++half) {
      reinterpret_cast<int*>(p.memory + own(half))[lane] = word(p.rank, round, half);
      reinterpret_cast<int*>(p.memory + own(half))[lane + 32] = word(p.rank, round, half);
    }
    for (uint32_t m = far; m; m &= m - 1) {
      transport.Put(__ffs(m) - 1, of(p.rank, 0), own(0), kSlot);
      transport.PutSignal(__ffs(m) - 1, of(p.rank, 1), own(1), kSlot, 16 * warp + p.rank);
    }
    for (uint32_t m = far; m; m &= m - 1) {
      const int source = __ffs(m) - 1;
      if (!transport.Wait(16 * warp + source, round + 1, Step::kRows, source)) return give_up();
      for (int half = 0; half < 2; ++half) {
        for (int i = lane; i < 64; i += 32) {
          const int* at = reinterpret_cast<const int*>(p.memory + of(source, half)) + i;
          if (*at != word(source, round, half)) atomicAdd(p.wrong, 1u);
        }
      }
    }
    if (!transport.Flush()) return give_up();
    for (int half = 0; half < 2; ++half) reinterpret_cast<int*>(p.memory + own(half))[lane] = -1;
    __syncwarp();
    // No rank sends the next round before all ranks have looked at this one.
    if (!transport.Barrier(far, 32 + 16 * warp, round + 1)) return give_up();
  }
}

struct Calls {
  World world;
  Network network;
  std::vector<char*> memory;
  Calls(int ranks, int ranks_per_node, const Faults& faults)
      : world(ranks, ranks), network(ranks, ranks_per_node, 64, faults) {
    for (const RankState& state : world.states) {
      char* p = nullptr;
      NATIVE_CHECK(cudaMalloc(&p, 128 * kSlot));
      memory.push_back(p);
      network.Register(1, state.rank, p, 128 * kSlot);
      network.RegisterFailure(state.rank, &state.mailbox->failure);
      network.RegisterTold(state.rank, state.mailbox->told);
    }
  }
  ~Calls() {
    for (char* p : memory) cudaFree(p);
  }
  // `timeout_s`: each rank's.
  void Run(int ranks_per_node, int rounds, const std::vector<double>& timeout_s, uint32_t absent = ~0u,
           uint32_t fails = ~0u) {
    world.Each([&](int rank) {
      if (static_cast<uint32_t>(rank) == absent) return;
      const RankState& state = world.states[rank];
      const CallsParams p{state.control,  state.mailbox, {&network, rank},
                          memory[rank],   world.ranks(), rank,
                          ranks_per_node, rounds,        static_cast<uint64_t>(timeout_s.at(rank) * 1e9),
                          fails,          state.wrong};
      CallsKernel<<<1, kThreads, 0, state.stream[0]>>>(p);
      NATIVE_CHECK(cudaStreamSynchronize(state.stream[0]));
    });
  }
  Failure Failed(int rank) {
    return UnpackFailure(__atomic_load_n(&world.states[rank].mailbox->failure, __ATOMIC_SEQ_CST));
  }
};

void SixCalls(const Faults& faults) {
  for (const auto& [ranks, per_node] : {std::pair<int, int>{4, 2}, {3, 1}, {4, 1}}) {
    Calls calls(ranks, per_node, faults);
    calls.Run(per_node, 12, std::vector<double>(ranks, 60));
    ExpectRight(calls.world, Text("%d ranks, %d a node", ranks, per_node));
    for (int r = 0; r < ranks; ++r) Expect(calls.Failed(r).cause == Cause::kNone, "a rank gave up");
    calls.network.Drain();
    uint64_t bytes = 0;
    for (int s = 0; s < ranks; ++s) {
      for (int t = 0; t < ranks; ++t) bytes += calls.network.Between(s, t).bytes;
    }
    const uint64_t wanted = 2 * 12 * 2 * kSlot * static_cast<uint64_t>(ranks * (ranks - per_node));
    Expect(bytes == wanted, Text("%d bytes went instead of %d", static_cast<int>(bytes), static_cast<int>(wanted)));
  }
}
// Waits end, and name the missing rank; so does a flush. Rank 1 receives the puts of rank 3 for its node, and its limit
// ends first: the other ranks get the failure.
void Limits(const Faults& faults) {
  {
    Calls calls(4, 2, faults);
    const double start = Now();
    calls.Run(2, 4, {60, 0.5, 60, 60}, 3);
    Expect(Now() - start < 20, Text("waits of 0.5 s ended after %.1f s", Now() - start));
    for (int r = 0; r < 3; ++r) {
      const Failure f = calls.Failed(r);
      Expect(f.cause == Cause::kTimeout && f.rank == 3, Text("rank %d: ", r) + FailureText(PackFailure(f)));
    }
    const uint64_t told = __atomic_load_n(&calls.world.states[2].mailbox->told[0], __ATOMIC_SEQ_CST);
    Expect(ProgressWaits(told), "rank 2 was not told that rank 0 waits");
  }
  {
    Calls calls(2, 1, faults);
    calls.network.Kill(1);
    calls.Run(1, 1, {0.5, 0.5});
    Expect(calls.Failed(0).cause == Cause::kTimeout && calls.Failed(0).rank == 1, "rank 0 does not name rank 1");
    Expect(calls.network.Pending(0, 0) == 1, "a put to a dead rank is done");
  }
}
// A failure word reaches the other nodes and ends the waits there, though no time-out does.
void Tells(const Faults& faults) {
  Calls calls(4, 2, faults);
  calls.Run(2, 4, {0, 0, 0, 0}, 1, 0);  // rank 1 is absent, rank 0 fails; all other ranks wait without a limit
  for (int r = 2; r < 4; ++r) {
    const Failure f = calls.Failed(r);
    Expect(f.cause == Cause::kIndex && f.rank == 0, Text("rank %d: ", r) + FailureText(PackFailure(f)));
  }
}

struct Case {
  const char* name;
  void (*run)(const Faults&);
  Faults faults;
  bool must_fail;  // a rule is broken
};

const std::vector<Case>& Cases() {
  Faults good, bad, slow, weak, early, counted;
  bad.reorder = bad.duplicate = true, bad.most_delay_us = 200;
  slow.bytes_per_s = 200e3;
  weak = early = counted = bad;
  weak.broken = kBrokenWeakSignals, early.broken = kBrokenSignals, counted.broken = kBrokenCompletions;
  static const std::vector<Case> cases = {
      {"signals", Signals, bad, false},
      {"signals_in_order", Signals, good, false},
      {"weak_signals", Signals, weak, true},
      {"early_signals", Signals, early, true},
      {"reorders", Reorders, bad, false},
      {"no_reorder", Reorders, good, true},
      {"completions", Completions, bad, false},
      {"counted_completions", Completions, counted, true},
      {"bursts", Bursts, bad, false},
      {"throttles", Throttles, slow, false},
      {"kills", Kills, bad, false},
      {"starves", Starves, bad, false},
      {"six_calls", SixCalls, bad, false},
      {"six_calls_in_order", SixCalls, good, false},
      {"six_calls_weak", SixCalls, weak, true},
      {"six_calls_early", SixCalls, early, true},
      {"six_calls_counted", SixCalls, counted, true},
      {"limits", Limits, bad, false},
      {"tells", Tells, bad, false},
  };
  return cases;
}

}  // namespace
}  // namespace native

int main(int argc, char** argv) {
  const std::string wanted = argc > 1 ? argv[1] : "all";
  bool passed = true, found = false;
  for (const native::Case& c : native::Cases()) {
    if (wanted != "all" && wanted != c.name) continue;
    found = true;
    native::Faults faults = c.faults;
    if (argc > 2) faults.seed = static_cast<uint32_t>(std::atoi(argv[2]));
    std::string text;
    bool failed = false;
    const double start = native::Now();
    for (uint32_t more = 0; !failed && more < (c.must_fail ? native::kAttempts : 1); ++more) {
      try {
        c.run(faults);
      } catch (const std::exception& e) {
        failed = true;
        text = e.what();
      }
      faults.seed += 100;
      faults.most_delay_us = std::min(2 * faults.most_delay_us, native::kMostDelayUs);
    }
    const bool good = failed == c.must_fail;
    passed &= good;
    std::printf("%-20s %-6s %6.2f s  %s%s\n", c.name, good ? "passed" : "FAILED", native::Now() - start,
                c.must_fail ? "a rule is broken; seen: " : "", text.c_str());
    std::fflush(stdout);
  }
  if (!found) std::fprintf(stderr, "unknown test %s\n", wanted.c_str());
  return found && passed ? 0 : 1;
}
