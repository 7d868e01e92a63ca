#include <thread>

#include "tests/native/expectations.h"

namespace native {
namespace {

std::string Normal(const Options& o) {
  World world(o.ranks, o.gpus);
  const auto pool = Pool(world, o, 64, 5);
  world.Start(Largest(pool));
  for (const auto& ranks : pool) {
    for (int repeat = 0; repeat < 3; ++repeat) {
      world.Each([&](int rank) { ranks[rank]->LaunchAndVerify(world.states[rank].stream[0]); });
    }
    world.Synchronize();
    ExpectSuccess(world, Name(ranks[0]->problem));
    for (const RankState& state : world.states) {
      uint32_t begun = 0;
      NATIVE_CHECK(cudaMemcpy(&begun, state.begun, 4, cudaMemcpyDeviceToHost));
      Expect(begun == ranks[state.rank]->call_id(), "no kernel showed the beginning of " + Name(ranks[0]->problem));
    }
  }
  return Text("%zu problems, each 3 times", pool.size());
}

std::string Random(const Options& o) {
  World world(o.ranks, o.gpus);
  const auto pool = Pool(world, o, 48, 20);
  world.Start(Largest(pool));
  const double start = Now();
  RunRandom(world, pool, o, o.calls, true);
  const double seconds = Now() - start;
  ExpectSuccess(world, "some of the calls");
  return Text("%lld calls on each of %d ranks, %.1f us each", static_cast<long long>(o.calls), o.ranks,
              seconds * 1e6 / static_cast<double>(o.calls));
}

// Runs random calls of the pool's operations: `o.calls`, and 20,000 at most. Returns their number.
long long RunCalls(World& world, const std::vector<std::vector<Prepared*>>& pool, const Options& o) {
  const int64_t calls = std::min<int64_t>(o.calls, 20000);
  world.Start(Largest(pool));
  RunRandom(world, pool, o, calls, true);
  ExpectSuccess(world, "some of the calls");
  return calls;
}

// A problem of few tokens, in bf16, and the blocks that the host gives it.
Problem SmallBatch(const Options& o, std::mt19937& rng) {
  Problem p;
  p.seed = static_cast<uint32_t>(rng()), p.ranks = o.ranks, p.top_k = 8;
  p.element = Element::kBf16, p.low_latency = true;
  p.blocks = std::min(96, MostBlocks(o)), p.slices = std::max(1, p.blocks / 40);
  p.push_blocks = std::max(1, p.blocks * 3 / 8);
  return p;
}

// Rows and batches as a decoding server has them: many lines travel at once.
std::string Decode(const Options& o) {
  World world(o.ranks, o.gpus);
  std::mt19937 rng(o.seed);
  std::vector<std::vector<Prepared*>> pool;
  for (int tokens : {1, 2, 17, 64, 200}) {
    for (int kind = 0; kind < 5; ++kind) {
      Problem p = SmallBatch(o, rng);
      p.tokens = tokens, p.experts = 64, p.hidden = kind == 3 ? 2048 : 7168;
      p.operation = kind == 0 || kind == 4 ? Operation::kCombine : Operation::kDispatch;
      p.layout = static_cast<Layout>(kind == 4 ? 1 : kind == 3 && tokens > 17 ? 0 : (kind + tokens) % 3);
      if (kind == 1) p.element = Element::kByte, p.scaled = true;
      p.capacity = p.layout == Layout::kRanked   ? p.ranks * tokens
                   : p.layout == Layout::kPadded ? p.local_experts() * p.ranks * tokens
                                                 : p.ranks * tokens * 8;
      if (p.layout == Layout::kPadded && tokens > 17) {
        p.layout = Layout::kGrouped, p.alignment = 16, p.capacity = p.ranks * tokens * 8 + 16 * p.local_experts();
      }
      pool.push_back(world.AddAll(p, 20 * o.patience));
    }
  }
  const long long calls = RunCalls(world, pool, o);
  return Text("%zu problems of up to 200 tokens of 7168 elements, %lld calls", pool.size(), calls);
}

// Dispatches of so few tokens that those who receive the rows number them, and of a few more.
std::string Few(const Options& o) {
  World world(o.ranks, o.gpus);
  std::mt19937 rng(o.seed);
  std::vector<std::vector<Prepared*>> pool;
  for (int kind = 0; kind < 36; ++kind) {
    Problem p;
    p.seed = static_cast<uint32_t>(rng());
    p.ranks = o.ranks, p.tokens = 1 + static_cast<int>(rng() % (40 / o.ranks)), p.top_k = 1 + kind % 15;
    p.experts = std::max(15, o.ranks * (2 + kind % 5)), p.hidden = 64 << kind % 4;
    p.operation = Operation::kDispatch, p.layout = static_cast<Layout>(kind % 3);
    p.element = kind % 4 == 1 ? Element::kF32 : Element::kBf16, p.weighted = true, p.low_latency = true;
    p.alignment = p.layout == Layout::kGrouped && kind % 5 == 4 ? 4 : 1;
    p.blocks = 1 + static_cast<int>(rng() % std::min(24, MostBlocks(o))), p.slices = 1 + p.blocks / 16;
    p.push_blocks = std::max(1, p.blocks / 4);
    const int rows = p.ranks * p.tokens * (p.layout == Layout::kRanked ? 1 : p.top_k);
    p.capacity = p.layout == Layout::kPadded ? p.local_experts() * p.ranks * p.tokens
                                             : std::max(1, kind % 7 == 6 ? rows / 8 : rows + 4 * p.local_experts());
    pool.push_back(world.AddAll(p, 20 * o.patience));
  }
  const long long calls = RunCalls(world, pool, o);
  return Text("%zu problems, %lld calls", pool.size(), calls);
}

// The group fails at any moment of small operations that follow each other: every result is right or poisoned, all of
// it. A row that lands after the poison would be neither.
std::string Broken(const Options& o) {
  World world(o.ranks, o.gpus);
  std::mt19937 rng(o.seed);
  std::vector<std::vector<Prepared*>> pool;
  for (int kind = 0; kind < 8; ++kind) {
    Problem p = SmallBatch(o, rng);
    p.tokens = kind < 4 ? 64 : 5, p.experts = 32, p.hidden = kind % 4 == 3 ? 7168 : 1024;
    p.operation = kind % 2 ? Operation::kCombine : Operation::kDispatch;
    p.capacity = p.ranks * p.tokens * 8;
    pool.push_back(world.AddAll(p, 20 * o.patience));
  }
  world.Start(Largest(pool));
  const int trials = static_cast<int>(std::clamp<int64_t>(o.calls / 10, 3, 300));
  const uint64_t word = PackFailure({Cause::kDead, Operation::kDispatch, Step::kArrival, o.ranks - 1, 0, 1});
  int failed = 0;
  for (int trial = 0; trial < trials; ++trial) {
    const auto moment = std::chrono::microseconds(rng() % 600);
    world.Each([&](int rank) {
      const RankState& state = world.states[rank];
      for (int i = 0; i < 16; ++i) {
        const Prepared* const operation = pool[(trial + i) % pool.size()][rank];
        operation->Launch(state.stream[0]);
        operation->VerifyEither(state.stream[0]);
      }
      if (rank == trial % o.ranks) {
        const auto until = std::chrono::steady_clock::now() + moment;
        while (std::chrono::steady_clock::now() < until) {
        }
        NATIVE_CHECK(cudaMemcpyAsync(&state.mailbox->failure, &word, 8, cudaMemcpyHostToDevice, state.side));
      }
    });
    world.Synchronize();
    failed += world.FailureOf(0) != 0;
    ExpectRight(world, "results that are neither right nor poisoned");
    world.Reset();
  }
  Expect(failed > 0, "no operation was caught");
  RunRandom(world, pool, o, 20, false);
  ExpectSuccess(world, "calls after the last reset");
  return Text("%d of %d trials failed while operations ran; every result whole", failed, trials);
}

// Batches as they fly on few SMs: dispatches and redispatches that place four rows at a time by bulk copies, and
// combines, of every number of slots up to eight, rows of several chunks, more rows than the capacity, ranks left out.
std::string Flying(const Options& o) {
  World world(o.ranks, o.gpus);
  std::mt19937 rng(o.seed);
  std::vector<std::vector<Prepared*>> pool;
  for (int kind = 0; kind < 24; ++kind) {
    Problem p;
    p.seed = static_cast<uint32_t>(rng());
    p.ranks = o.ranks, p.tokens = 1 + static_cast<int>(rng() % 150), p.top_k = 1 + kind % 8;
    p.experts = o.ranks * (1 + static_cast<int>(rng() % 12)), p.hidden = kind % 5 == 0 ? 7168 : 512 * (1 + kind % 3);
    p.operation = kind % 6 == 5 ? Operation::kCombine : kind % 6 == 4 ? Operation::kRedispatch : Operation::kDispatch;
    p.layout = kind % 3 == 2 ? Layout::kPadded : Layout::kGrouped;
    const bool bytes = p.operation == Operation::kDispatch && kind % 2;
    p.element = bytes ? Element::kByte : Element::kBf16, p.scaled = bytes && kind % 4 == 1;
    p.alignment = p.layout == Layout::kGrouped && kind % 4 == 0 ? 16 : 1;
    const int rows = p.ranks * p.tokens * std::min(p.top_k, p.local_experts()) + p.local_experts() * (p.alignment - 1);
    p.capacity = p.layout == Layout::kPadded ? p.local_experts() * p.ranks * p.tokens
                 : kind % 7 == 3             ? std::max(1, rows / 8)
                                             : rows;
    p.blocks = std::min(1 + kind % 6, MostBlocks(o)), p.push_blocks = (p.blocks + 1) / 2;
    p.slices = 1, p.segment_tokens = 16, p.bulk = true;
    if (kind % 8 == 7 || kind == 4 || kind == 10) p.members.reset(rng() % o.ranks);
    pool.push_back(world.AddAll(p, 20 * o.patience));
  }
  const long long calls = RunCalls(world, pool, o);
  return Text("%zu problems, %lld calls", pool.size(), calls);
}

std::string EpochWrap(const Options& o) {
  World world(o.ranks, o.gpus, 0xFFFFFFF0u);
  const auto pool = Pool(world, o, 24, 5);
  world.Start(Largest(pool));
  world.LeaveOldFlags(40);
  RunRandom(world, pool, o, 200, true);
  ExpectSuccess(world, "calls over the wrap");
  uint32_t epoch = 0;
  NATIVE_CHECK(cudaMemcpy(&epoch, &world.states[0].control->epoch, 4, cudaMemcpyDeviceToHost));
  Expect(epoch == 0xFFFFFFF0u + 200 + 2, Text("the epoch is %u after 200 calls", epoch));  // 0 and 1 are left out
  return Text("200 calls from epoch 0xFFFFFFF0 to %u, flags of the round before left up", epoch);
}

std::string Late(const Options& o) {
  World world(o.ranks, o.gpus);
  const auto pool = Pool(world, o, 12, 20);
  world.Start(Largest(pool));
  for (const auto& ranks : pool) {
    world.Each([&](int rank) {
      if (rank == o.ranks - 1) std::this_thread::sleep_for(std::chrono::milliseconds(150));
      ranks[rank]->LaunchAndVerify(world.states[rank].stream[0]);
    });
  }
  world.Synchronize();
  for (int r = 0; r < o.ranks; ++r) {
    Expect(world.FailureOf(r) == 0, Text("rank %d failed: ", r) + FailureText(world.FailureOf(r)) + world.Picture());
  }
  ExpectRight(world, "results beside a late rank");
  return "12 operations, one rank 150 ms late each time";
}

// A rank never comes. The other ranks queue up to 500 operations: two of a rank may wait for the time-out, and the
// others end at once. An operation that waits lasts as long as the time-out, however slow the machine is, and the
// others far less.
std::string Absent(const Options& o) {
  const int queued = static_cast<int>(std::clamp<int64_t>(o.calls, 3, 500));
  const double timeout_s = 0.5;
  World world(o.ranks, o.gpus);
  const auto pool = Pool(world, o, 12, timeout_s);
  world.Start(Largest(pool));
  RunRandom(world, pool, o, 50, false);
  ExpectRight(world, "calls before");
  const double start = Now();
  const int absent = o.ranks - 1;
  std::vector<std::vector<float>> lasted_ms(o.ranks, std::vector<float>(queued));
  world.Each([&](int rank) {
    if (rank == absent) return;
    const cudaStream_t stream = world.states[rank].stream[0];
    std::vector<cudaEvent_t> ends(queued + 1);
    for (int i = 0; i <= queued; ++i) {
      if (i > 0) pool[(i - 1) % 12][rank]->LaunchAndVerify(stream, true);
      NATIVE_CHECK(cudaEventCreate(&ends[i]));
      NATIVE_CHECK(cudaEventRecord(ends[i], stream));
    }
    NATIVE_CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < queued; ++i) NATIVE_CHECK(cudaEventElapsedTime(&lasted_ms[rank][i], ends[i], ends[i + 1]));
    for (cudaEvent_t end : ends) NATIVE_CHECK(cudaEventDestroy(end));
  });
  const double seconds = Now() - start;
  ExpectRight(world, "results that are not poisoned");
  for (std::vector<float>& ms : lasted_ms) {
    std::sort(ms.begin(), ms.end(), std::greater<float>());
    Expect(ms[2] < 900 * timeout_s * o.patience,
           Text("three of %d operations took %.2f s and longer", queued, ms[2] / 1e3));
    Expect(ms[queued / 2] < 100 * timeout_s * o.patience,
           Text("half of %d operations took %.2f s and longer", queued, ms[queued / 2] / 1e3));
  }
  // The rank comes after all: its results are poisoned at once, and it names the same rank.
  world.Each([&](int rank) {
    if (rank == absent) pool[0][rank]->LaunchAndVerify(world.states[rank].stream[0], true);
  });
  ExpectRight(world, "the late rank's result is not poisoned");
  const Failure f = ExpectFailure(world, Cause::kTimeout);
  Expect(f.rank == absent && f.step == Step::kArrival,
         Text("named rank %d, step %d", f.rank, static_cast<int>(f.step)));
  world.Reset();
  RunRandom(world, pool, o, 200, true);
  ExpectSuccess(world, "calls after reset");
  return Text("%d operations ended after %.2f s, rank %d named by all; 200 calls right after reset", queued, seconds,
              absent);
}

// One rank skips an operation: the numbers no longer mean the same.
std::string Skip(const Options& o) {
  World world(o.ranks, o.gpus);
  const auto pool = Pool(world, o, 12, 20);
  world.Start(Largest(pool));
  RunRandom(world, pool, o, 21, false);
  const double start = Now();
  world.Each([&](int rank) {
    for (int i = rank == 0 ? 1 : 0; i < 12; ++i) pool[i][rank]->LaunchAndVerify(world.states[rank].stream[0], true);
  });
  ExpectRight(world, "results that are not poisoned");
  const double seconds = Now() - start;
  const Failure f = ExpectFailure(world, Cause::kMismatch);
  Expect(o.ranks == 2 || f.rank == 0, Text("rank %d was named", f.rank));
  Expect(seconds < 2 * o.patience, Text("took %.2f s", seconds));
  for (const RankState& state : world.states) {
    Expect(Signature(state.error->of_rank) != Signature(state.error->of_other), "both descriptors are the same");
    const uint32_t first = pool[0][0]->signature(), second = pool[1][0]->signature();
    const uint32_t a = Signature(state.error->of_rank), b = Signature(state.error->of_other);
    Expect((a == first && b == second) || (a == second && b == first), "the descriptors are of other operations");
  }
  world.Reset();
  RunRandom(world, pool, o, 200, true);
  ExpectSuccess(world, "calls after reset");
  return Text("named after %.3f s: rank %d", seconds, f.rank);
}

std::string Shapes(const Options& o) {
  int seen = 0;
  for (int kind = 0; kind < 4; ++kind) {
    World world(o.ranks, o.gpus);
    std::mt19937 rng(o.seed + kind);
    Problem p;
    do {
      p = RandomProblem(rng, o.ranks, 8);
    } while (static_cast<int>(p.operation) != kind);
    Problem other = p;
    other.tokens += 8;
    other.capacity = other.operation == Operation::kExchange
                         ? o.ranks * other.tokens + (other.ragged ? 1 : 0)
                         : other.capacity + 8 * o.ranks * other.top_k * other.local_experts();
    if (other.layout == Layout::kPadded && kind != 3) other.capacity = other.local_experts() * o.ranks * other.tokens;
    const auto mine = world.AddAll(p, 20 * o.patience), theirs = world.AddAll(other, 20 * o.patience);
    world.Start(Largest({mine, theirs}));
    const double start = Now();
    world.Each([&](int rank) {
      (rank == o.ranks - 1 ? theirs : mine)[rank]->LaunchAndVerify(world.states[rank].stream[0], true);
    });
    ExpectRight(world, "results that are not poisoned: " + Name(p));
    Expect(Now() - start < o.patience, Text("took %.2f s", Now() - start));
    const Failure f = ExpectFailure(world, Cause::kMismatch);
    Expect(f.rank == o.ranks - 1, Text("rank %d was named", f.rank));
    const bool units = p.operation == Operation::kExchange;  // an exchange reports the operand's units
    auto told = [&](const Problem& q) {
      const bool tokens = !units || q.by_table || q.gather;
      return static_cast<uint32_t>(tokens ? q.tokens : q.ragged ? o.ranks * q.tokens : o.ranks);
    };
    for (const RankState& state : world.states) {
      const auto sent = [&](const Descriptor& d) { return units ? d.exchange.operand_units : d.routed.tokens; };
      Expect(sent(state.error->of_rank) == told(other) && sent(state.error->of_other) == told(p),
             "the error does not tell the two sizes");
    }
    ++seen;
  }
  return Text("%d kinds of operation", seen);
}

// Two calls of the same shapes, which the last rank starts the other way round. Without Descriptor::site no rank could
// notice, and each would get the rows of the other call.
std::string Order(const Options& o) {
  for (int kind = 0; kind < 4; ++kind) {
    World world(o.ranks, o.gpus);
    std::mt19937 rng(o.seed + kind);
    Problem p;
    do {
      p = RandomProblem(rng, o.ranks, 8);
    } while (static_cast<int>(p.operation) != kind);
    Problem other = p;
    p.site = 1, other.site = 2, other.seed = p.seed + 1;
    const std::vector<std::vector<Prepared*>> both = {world.AddAll(p, 20 * o.patience),
                                                      world.AddAll(other, 20 * o.patience)};
    world.Start(Largest(both));
    auto run = [&](bool turned, bool poisoned) {
      const double start = Now();
      world.Each([&](int rank) {
        for (int i = 0; i < 2; ++i) {
          const int which = turned && rank == o.ranks - 1 ? 1 - i : i;
          both[which][rank]->LaunchAndVerify(world.states[rank].stream[0], poisoned);
        }
      });
      world.Synchronize();
      Expect(Now() - start < o.patience, Text("took %.2f s", Now() - start));
    };
    run(false, false);
    ExpectSuccess(world, Name(p) + " in one order");
    run(true, true);
    ExpectRight(world, "results that are not poisoned: " + Name(p));
    const Failure f = ExpectFailure(world, Cause::kMismatch);
    Expect(f.rank == o.ranks - 1, Text("rank %d was named", f.rank));
    for (const RankState& state : world.states) {
      Expect(state.error->of_rank.site == 2 && state.error->of_other.site == 1,
             Text("rank %d tells of calls %u and %u: ", state.rank, state.error->of_rank.site,
                  state.error->of_other.site) +
                 FailureText(state.error->failure) + world.Picture());
    }
    world.Reset();
    run(false, false);
    ExpectSuccess(world, Name(p) + " after reset");
  }
  return "4 kinds of operation, two calls of equal shapes in two orders";
}

// The host of one rank learns that a process is dead, and tells its own mailbox alone. `torn`: kernels of the dead
// process still ran while its stores to the other ranks were lost, so that it seems to have gone on without them.
static double DeadOnce(const Options& o, bool torn) {
  World world(o.ranks, o.gpus);
  const auto pool = Pool(world, o, 12, 0);  // no time-out at all
  world.Start(Largest(pool));
  const int dead = o.ranks - 1;
  if (torn) {
    const uint64_t later = PackProgress(1000);
    NATIVE_CHECK(cudaSetDevice(world.states[dead].device));
    NATIVE_CHECK(cudaMemcpy(&world.states[dead].mailbox->progress, &later, 8, cudaMemcpyHostToDevice));
  }
  const double start = Now();
  world.Each([&](int rank) {
    const RankState& state = world.states[rank];
    if (rank == dead) return;
    for (int i = 0; i < 20; ++i) pool[i % 12][rank]->LaunchAndVerify(state.stream[0], true);
    if (rank == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      const uint64_t word = PackFailure({Cause::kDead, Operation::kDispatch, Step::kArrival, dead, 0, 1});
      NATIVE_CHECK(cudaMemcpyAsync(&state.mailbox->failure, &word, 8, cudaMemcpyHostToDevice, state.side));
      NATIVE_CHECK(cudaStreamSynchronize(state.side));
    }
    NATIVE_CHECK(cudaStreamSynchronize(state.stream[0]));
  });
  const double seconds = Now() - start;
  world.Each([&](int rank) {
    if (rank == dead) pool[0][rank]->LaunchAndVerify(world.states[rank].stream[0], true);
  });
  ExpectRight(world, "results that are not poisoned");
  const Failure f = ExpectFailure(world, Cause::kDead);
  Expect(f.rank == dead && seconds < 2 * o.patience, Text("rank %d, %.2f s", f.rank, seconds));
  return seconds;
}

std::string Dead(const Options& o) {
  const double seconds = DeadOnce(o, false), torn = DeadOnce(o, true);
  return Text("all left %.2f s after the start, without a time-out; %.2f s when stores were lost", seconds, torn);
}

// Positions, counts, offsets and sizes that are anything: nothing outside the results is touched.
std::string Indices(const Options& o) {
  std::mt19937 rng(o.seed);
  int operations = 0, failed = 0;
  for (int trial = 0; trial < 24; ++trial) {
    World world(o.ranks, o.gpus);
    Problem p;
    do {
      p = RandomProblem(rng, o.ranks, 8);
    } while (p.operation == Operation::kDispatch || (p.operation == Operation::kExchange && !p.ragged));
    const auto ranks = world.AddAll(p, 0.3 * o.patience);
    world.Start(ranks[0]->needs());
    const std::vector<RankCase> cases = Reference(p);
    bool bad_counts = false;
    for (int r = 0; r < o.ranks; ++r) {
      auto spoil = [&](size_t input, bool keep_unused) {
        std::vector<int> values(cases[r].inputs[input].size() / 4);
        std::memcpy(values.data(), cases[r].inputs[input].data(), values.size() * 4);
        for (int& v : values) {
          if (keep_unused && v == -1) continue;
          static const int bad[] = {-3, -1000000, 0x7FFFFFFF, static_cast<int>(0x80000000u), 1 << 20, 0x40000000};
          if (rng() % 2) v = bad[rng() % 6];
        }
        NATIVE_CHECK(cudaSetDevice(world.states[r].device));
        NATIVE_CHECK(cudaMemcpy(ranks[r]->Input(input), values.data(), values.size() * 4, cudaMemcpyHostToDevice));
      };
      if (p.operation == Operation::kCombine) {
        spoil(2, true);
        if (p.by_home) spoil(4, false);
      } else if (p.operation == Operation::kRedispatch) {
        spoil(3, true);
        if (trial % 2) spoil(4, false), bad_counts = true;
      } else {
        spoil(1 + rng() % 3, false);
      }
    }
    world.Each([&](int rank) {
      ranks[rank]->Launch(world.states[rank].stream[0]);
      ranks[rank]->VerifyBorders(world.states[rank].stream[0]);
    });
    ExpectRight(world, "borders: " + Name(p));
    if (world.FailureOf(0)) {
      const Failure f = UnpackFailure(world.FailureOf(0));
      Expect(bad_counts && f.cause == Cause::kIndex, Name(p) + ": " + FailureText(world.FailureOf(0)));
      ++failed;
    }
    ++operations;
  }
  return Text("%d operations with spoilt arrays, nothing outside the results written; %d named impossible counts",
              operations, failed);
}

// Memory grows while calls run, at another time on every rank.
std::string Generations(const Options& o) {
  World world(o.ranks, o.gpus);
  constexpr int kSteps = 10;
  std::mt19937 rng(o.seed);
  std::vector<std::vector<Prepared*>> small = Pool(world, o, 12, 20), large;
  std::vector<uint32_t> generation;
  Needs needs = Largest(small);
  world.Start(needs);
  for (int step = 0; step < kSteps; ++step) {
    Problem p;
    do {
      p = RandomProblem(rng, o.ranks, 8);
    } while (p.operation == Operation::kExchange);
    p.tokens = 50 + 10 * step, p.hidden = 1024 + 128 * step, p.capacity = o.ranks * p.tokens * p.top_k * 2 + 64;
    if (p.layout == Layout::kPadded) p.capacity = p.local_experts() * o.ranks * p.tokens;
    large.push_back(world.AddAll(p, 20 * o.patience));
    needs = Largest({large.back(), large[step ? step - 1 : 0], small[0]});
    const Needs of_small = Largest(small);
    needs.flag_bytes = std::max(needs.flag_bytes, of_small.flag_bytes);
    needs.data_bytes = std::max(needs.data_bytes, of_small.data_bytes);
    needs.scratch_bytes = std::max(needs.scratch_bytes, of_small.scratch_bytes);
    generation.push_back(world.Allocate(needs));
  }
  world.Synchronize();
  world.Each([&](int rank) {
    std::mt19937 same(o.seed + 3), own(o.seed * 17 + rank);
    const cudaStream_t stream = world.states[rank].stream[0];
    for (int step = 0; step < kSteps; ++step) {
      const int ahead = own() % 60;
      for (int i = 0; i < 120; ++i) {
        if (i == ahead) world.Publish(rank, generation[step]);
        if (own() % 32 == 0) Sleep(stream, 1 + own() % 200);
        const bool grown = i >= 60 && same() % 4 == 0;
        (grown ? large[step] : small[same() % small.size()])[rank]->LaunchAndVerify(stream);
      }
      // Keeps the ranks within the tables that a rank holds, as the host does before it makes another generation.
      NATIVE_CHECK(cudaStreamSynchronize(stream));
    }
  });
  ExpectSuccess(world, "calls while memory grew");
  for (const RankState& state : world.states) {
    const uint32_t told = *reinterpret_cast<volatile uint32_t*>(&state.error->generation);
    Expect(told == (generation.back() & 0xFF), Text("rank %d reports generation %u", state.rank, told));
  }
  // More than any generation has: an error, and poison.
  Problem p = small[0][0]->problem;
  p.operation = Operation::kDispatch, p.layout = Layout::kGrouped, p.element = Element::kF32, p.scaled = false;
  p.tokens = 300, p.hidden = 4096, p.capacity = 100, p.alignment = 1;
  const auto too_large = world.AddAll(p, 5 * o.patience);
  world.Each([&](int rank) { too_large[rank]->LaunchAndVerify(world.states[rank].stream[0], true); });
  ExpectRight(world, "the result of the operation without memory is not poisoned");
  ExpectFailure(world, Cause::kMemory);
  return Text("%d generations while %d calls ran; too large a call fails on all ranks", kSteps, kSteps * 120);
}

// Two operations on one channel at a time, on two streams. Alone they are ordered; with several ranks they are ordered
// or refused, never mixed.
std::string Concurrent(const Options& o) {
  int ordered = 0, refused = 0;
  const int64_t trials = o.calls > 0 ? std::min<int64_t>(o.calls, 30) : 30;
  for (int ranks : {1, o.ranks}) {
    for (int64_t trial = 0; trial < trials; ++trial) {
      Options one = o;
      one.ranks = ranks, one.seed = o.seed + static_cast<uint32_t>(trial);
      World world(ranks, std::min(o.gpus, ranks));
      const auto pool = Pool(world, one, 2, 20);
      world.Start(Largest(pool));
      for (int repeat = 0; repeat < 20; ++repeat) {
        // In every fifth round, rank 0 starts them the other way round.
        const bool other_way = repeat % 5 == 4;
        world.Each([&](int rank) {
          for (int i = 0; i < 2; ++i) {
            const int which = other_way && rank == 0 ? 1 - i : i;
            pool[which][rank]->Launch(world.states[rank].stream[which]);
          }
        });
        world.Synchronize();
        const bool failed = world.FailureOf(0) != 0;
        world.Each([&](int rank) {
          for (int i = 0; i < 2; ++i) {
            // A result is whole or poisoned: in a failed round the first of the two may have been right.
            if (!failed) pool[i][rank]->Verify(world.states[rank].stream[i], false);
          }
        });
        if (failed) {
          Expect(ranks > 1, "a single rank failed: " + FailureText(world.FailureOf(0)));
          ExpectFailure(world, Cause::kMismatch);
          world.Reset();
          world.Each([&](int rank) {
            for (int i = 0; i < 2; ++i) pool[i][rank]->VerifyBorders(world.states[rank].stream[i]);
          });
          ++refused;
        } else {
          ++ordered;
        }
        ExpectRight(world, Name(pool[0][0]->problem) + " beside " + Name(pool[1][0]->problem));
      }
    }
  }
  Expect(ordered > 0 && refused > 0, Text("%d rounds ordered, %d refused", ordered, refused));
  return Text("%d rounds ordered, %d refused with an error", ordered, refused);
}

// A kernel that leaves only a few multiprocessors: an operation with more blocks than these ends all the same.
std::string Company(const Options& o) {
  const int ranks = std::max(1, std::min(o.ranks, o.gpus));
  World world(ranks, ranks);
  std::mt19937 rng(o.seed);
  std::vector<std::vector<Prepared*>> pool;
  for (int i = 0; i < 40; ++i) {
    Problem p = RandomProblem(rng, ranks, 48);
    p.blocks = std::max(p.blocks, 24);
    if (p.operation == Operation::kExchange) p.lanes = p.low_latency ? 24 : 24 / ranks * (p.gather ? kBlockLanes : 1);
    pool.push_back(world.AddAll(p, 4 * o.patience));
  }
  world.Start(Largest(pool));
  int* stop = nullptr;
  NATIVE_CHECK(cudaHostAlloc(&stop, sizeof(int), cudaHostAllocMapped | cudaHostAllocPortable));
  int rounds = 0;
  for (int leave : {1, 2, 5}) {
    *stop = 0;
    world.Each([&](int rank) {
      Occupy(world.states[rank].side, leave, stop, 20 * o.patience);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      for (const auto& operation : pool) operation[rank]->LaunchAndVerify(world.states[rank].stream[0]);
      NATIVE_CHECK(cudaStreamSynchronize(world.states[rank].stream[0]));
    });
    Expect(cudaStreamQuery(world.states[0].side) == cudaErrorNotReady, "the filling kernel ended too early");
    cudaGetLastError();
    *reinterpret_cast<volatile int*>(stop) = 1;
    world.Synchronize();
    ExpectSuccess(world, Text("results with %d multiprocessors left", leave));
    ++rounds;
  }
  NATIVE_CHECK(cudaFreeHost(stop));
  return Text("%zu operations of 24 blocks and more with 1, 2 and 5 multiprocessors left, %d ranks", pool.size(),
              ranks);
}

std::string Graphs(const Options& o) {
  World world(o.ranks, o.gpus);
  const auto pool = Pool(world, o, 16, 2);
  world.Start(Largest(pool));
  const int replays = static_cast<int>(std::min<int64_t>(10000, std::max<int64_t>(10, o.calls)));
  std::vector<cudaGraphExec_t> graphs(o.ranks);
  std::vector<size_t> nodes(o.ranks);
  // Captured one after the other: nothing runs.
  auto capture = [&](bool poisoned) {
    for (const RankState& state : world.states) {
      NATIVE_CHECK(cudaSetDevice(state.device));
      cudaGraph_t graph;
      NATIVE_CHECK(cudaStreamBeginCapture(state.stream[0], cudaStreamCaptureModeThreadLocal));
      for (const auto& operation : pool) operation[state.rank]->LaunchAndVerify(state.stream[0], poisoned);
      NATIVE_CHECK(cudaStreamEndCapture(state.stream[0], &graph));
      NATIVE_CHECK(cudaGraphGetNodes(graph, nullptr, &nodes[state.rank]));
      NATIVE_CHECK(cudaGraphInstantiate(&graphs[state.rank], graph, 0));
      NATIVE_CHECK(cudaGraphUpload(graphs[state.rank], state.stream[0]));
      NATIVE_CHECK(cudaGraphDestroy(graph));
      Expect(nodes[state.rank] == 2 * pool.size(), Text("the graph has %zu nodes", nodes[state.rank]));
    }
    world.Synchronize();
  };
  auto replay = [&](int times, int absent) {
    world.Each([&](int rank) {
      if (rank == absent) return;
      for (int i = 0; i < times; ++i) {
        NATIVE_CHECK(cudaGraphLaunch(graphs[rank], world.states[rank].stream[0]));
        if (i % 4 == 3) NATIVE_CHECK(cudaStreamSynchronize(world.states[rank].stream[0]));
      }
      NATIVE_CHECK(cudaStreamSynchronize(world.states[rank].stream[0]));
    });
  };
  capture(false);
  const double start = Now();
  replay(replays, -1);
  const double seconds = Now() - start;
  ExpectSuccess(world, "replays");
  // A rank stops replaying: the replays of all other ranks fail and name it; after reset the same graphs go on.
  std::vector<cudaGraphExec_t> good = graphs;
  capture(true);
  replay(3, o.ranks - 1);
  ExpectRight(world, "replays without a rank are not poisoned");
  Expect(UnpackFailure(world.FailureOf(0)).rank == o.ranks - 1, FailureText(world.FailureOf(0)));
  world.Reset();
  graphs.swap(good);
  const int afterwards = std::min(100, replays);
  replay(afterwards, -1);
  ExpectSuccess(world, "replays after reset");
  for (const RankState& state : world.states) {
    NATIVE_CHECK(cudaSetDevice(state.device));
    NATIVE_CHECK(cudaGraphExecDestroy(graphs[state.rank]));
    NATIVE_CHECK(cudaGraphExecDestroy(good[state.rank]));
  }
  return Text("%d replays of %zu operations, %.1f us each; failure during a replay named; %d after reset", replays,
              pool.size(), seconds * 1e6 / replays / static_cast<double>(pool.size()), afterwards);
}

}  // namespace

const std::vector<Scenario>& Scenarios() {
  static const std::vector<Scenario> all = {
      {"normal", Normal, 40},
      {"errors", Errors, 40},
      {"flying", Flying, 60},
      {"decode", Decode, 40},
      {"few", Few, 40},
      {"broken", Broken, 40},
      {"wrap", EpochWrap, 20},
      {"late", Late, 30},
      {"absent", Absent, 20},
      {"skip", Skip, 20},
      {"shapes", Shapes, 30},
      {"order", Order, 30},
      {"dead", Dead, 20},
      {"indices", Indices, 60},
      {"generations", Generations, 40},
      {"company", Company, 60},
      {"concurrent", Concurrent, 60},
      {"graphs", Graphs, 60},
      {"members", Members, 60},
      {"wide", Wide, 60},
      {"leaver", Leaver, 60},
      {"rings", Rings, 60},
      {"random", Random, 60},
      {"unmet", Unmet, 60},
      {"balance", Balance, 60},
      {"alone", Alone, 60},
      {"numbers", Numbers, 60},
  };
  return all;
}

}  // namespace native
