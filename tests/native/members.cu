#include <thread>

#include "tests/native/expectations.h"

namespace native {
namespace {

// Problems whose ranks are those of `masks`, one after the other.
std::vector<std::vector<Prepared*>> PoolOf(World& world, const Options& o, const std::vector<uint32_t>& masks,
                                           double timeout_s) {
  std::mt19937 rng(o.seed + 3);
  std::vector<std::vector<Prepared*>> pool;
  for (uint32_t members : masks) {
    Problem p;
    do {
      p = RandomProblem(rng, world.ranks(), std::min(16, MostBlocks(o)));
    } while (p.operation == Operation::kExchange);
    p.members = members;
    pool.push_back(world.AddAll(p, timeout_s * o.patience));
  }
  return pool;
}

}  // namespace

// Inactive ranks: some run the program all the same, and some run nothing.
std::string Members(const Options& o) {
  const uint32_t all = (1u << o.ranks) - 1, absent = 1u << (o.ranks - 1);
  World world(o.ranks, o.gpus);
  std::mt19937 rng(o.seed);
  std::vector<uint32_t> any, without;
  for (int i = 0; i < 40; ++i) any.push_back(i < 4 ? all : i < 6 ? 0 : rng() & all);
  for (int i = 0; i < 24; ++i) without.push_back((rng() | 1) & all & ~absent);
  for (int i = 0; i < 4; ++i) without[i] = all & ~absent;
  const auto pool = PoolOf(world, o, any, 20), rest = PoolOf(world, o, without, 2);
  const auto whole = PoolOf(world, o, {all, all, all}, 2), needs_absent = PoolOf(world, o, {all}, 0);
  world.Start(Largest({pool[0], pool[1]}));  // the rest needs more: memory is chosen by those who take part
  const uint32_t generation = world.Allocate([&] {
    std::vector<std::vector<Prepared*>> every = pool;
    for (const auto& more : {rest, whole, needs_absent}) every.insert(every.end(), more.begin(), more.end());
    return Largest(every);
  }());
  for (int r = 0; r < o.ranks; ++r) world.Publish(r, generation);
  const int64_t calls = std::max<int64_t>(40, o.calls / 20);
  const double start = Now();
  RunRandom(world, pool, o, calls, true);  // all ranks call; an inactive rank runs ahead
  ExpectSuccess(world, "calls with changing members");
  const double each = (Now() - start) * 1e6 / static_cast<double>(calls);
  RunRandom(world, rest, o, calls, true, absent);
  ExpectSuccess(world, "calls without a rank that calls nothing");
  world.Reset();  // it comes back
  RunRandom(world, whole, o, 60, true);
  ExpectSuccess(world, "calls of all after reset");
  // Its process ends: operations that leave it out go on, and operations that need it fail at once.
  for (const RankState& state : world.states) {
    NATIVE_CHECK(cudaSetDevice(state.device));
    NATIVE_CHECK(cudaMemcpy(state.mailbox->dead, &absent, 4, cudaMemcpyHostToDevice));
  }
  RunRandom(world, rest, o, 100, true, absent);
  ExpectSuccess(world, "calls without a dead rank");
  const double needed = Now();
  world.Each([&](int rank) {
    if (!(absent >> rank & 1)) needs_absent[0][rank]->LaunchAndVerify(world.states[rank].stream[0], true);
  });
  ExpectRight(world, "a result that needs a dead rank is not poisoned");
  const Failure dead = UnpackFailure(world.FailureOf(0));
  Expect(dead.cause == Cause::kDead && dead.rank == o.ranks - 1, FailureText(world.FailureOf(0)));
  Expect(world.FailureOf(o.ranks - 1) == 0, "the dead rank was written to");
  Expect(Now() - needed < o.patience, Text("it took %.2f s", Now() - needed));
  // Ranks disagree about the members: ranks that one of them leaves out wait for it in vain, and get the failure.
  std::string seen;
  for (const uint32_t mine : {all & ~2u, 1u, all}) {
    world.Reset();
    RunRandom(world, whole, o, 8, false);
    const uint32_t theirs = mine == all ? all & ~2u : all;
    const auto odd = PoolOf(world, o, {mine}, 20), others = PoolOf(world, o, {theirs}, 20);
    const double from = Now();
    world.Each([&](int rank) {
      const cudaStream_t stream = world.states[rank].stream[0];
      for (int i = 0; i < 3; ++i) {
        (rank == 0 ? odd : others)[0][rank]->Launch(stream);
        (rank == 0 ? odd : others)[0][rank]->VerifyBorders(stream);
      }
    });
    world.Synchronize();
    world.ClearWrong();
    const int waits = o.ranks > 2 ? 2 : mine == all ? 0 : 1;  // of two ranks only the one that counts on the other
    const Failure f = UnpackFailure(world.FailureOf(waits));
    Expect(f.cause == Cause::kMismatch, "another cause: " + FailureText(world.FailureOf(waits)));
    Expect(Now() - from < 5 * o.patience, Text("took %.2f s", Now() - from));
    seen += Text(" %d", f.rank);
  }
  return Text(
      "%lld calls with changing members, %.1f us each; as many without a rank that calls nothing; dead named; "
      "disagreement named:%s",
      static_cast<long long>(calls), each, seen.c_str());
}

// One rank stays away from the first operation after a reset, in which all ranks meet. All other ranks show that they
// wait for it alone, however many blocks wait; then they name it. Then all ranks come.
std::string Unmet(const Options& o) {
  World world(o.ranks, o.gpus);
  std::mt19937 rng(o.seed);
  const double timeout_s = 0.1 * o.patience;
  std::vector<std::vector<Prepared*>> pool;
  for (int i = 0; i < 6; ++i) {
    Problem p = RandomProblem(rng, o.ranks, std::min(8, MostBlocks(o)));
    p.blocks = std::min(8, MostBlocks(o));
    pool.push_back(world.AddAll(p, timeout_s));
  }
  world.Start(Largest(pool));
  const auto trials = static_cast<size_t>(std::max<int64_t>(4, o.calls / 200));
  int samples = 0;
  for (size_t trial = 0; trial < trials; ++trial) {
    const auto& ranks = pool[trial % pool.size()];
    const int absent = static_cast<int>(rng() % o.ranks);
    world.Each([&](int rank) {
      if (rank != absent) ranks[rank]->LaunchAndVerify(world.states[rank].stream[0], true);
    });
    samples += ExpectToShow(world, absent, Step::kArrival, timeout_s, Name(ranks[0]->problem));
    world.Synchronize();
    ExpectRight(world, "results that are not poisoned: " + Name(ranks[0]->problem));
    for (int r = 0; r < o.ranks; ++r) {
      const Failure f = UnpackFailure(world.FailureOf(r));
      Expect(r == absent || (f.cause == Cause::kTimeout && f.rank == absent && f.step == Step::kArrival),
             Text("rank %d, not %d: ", r, absent) + FailureText(world.FailureOf(r)));
    }
    world.Reset();
  }
  RunRandom(world, pool, o, 50, false);
  ExpectSuccess(world, "calls of all after reset");
  return Text("%zu times the rank that stayed away from the first operation was shown (%d samples) and named", trials,
              samples);
}

// A rank is left out while it is still busy with the previous operation: blocks of it that start late, and rows that no
// rank waits for because they are dropped, must not reach the operations that the other ranks run without it.
std::string Leaver(const Options& o) {
  if (o.ranks < 3 || o.gpus < o.ranks) return "not run: it takes three ranks and a GPU for each";
  const int slow = 1;
  int operations = 0;
  int* stop = nullptr;
  NATIVE_CHECK(cudaHostAlloc(&stop, sizeof(int), cudaHostAllocMapped | cudaHostAllocPortable));
  for (int kind = 0; kind < 6; ++kind) {
    World world(o.ranks, o.gpus);
    Problem p;
    p.operation = kind < 4 ? Operation::kDispatch : kind == 4 ? Operation::kRedispatch : Operation::kCombine;
    p.low_latency = kind % 2 == 1;
    p.ranks = o.ranks, p.tokens = 24, p.top_k = 4, p.experts = 4 * o.ranks, p.hidden = 64, p.told = true;
    p.capacity = kind < 2 || kind == 5 ? o.ranks * p.tokens * p.top_k : 8;  // else nearly all rows are dropped
    p.blocks = 6, p.push_blocks = 3, p.slices = 2, p.seed = o.seed + kind;
    const bool drops = kind >= 2 && kind < 5;
    if (drops) p.tokens = 200;
    const std::vector<RankCase> cases = Reference(p);
    std::vector<Prepared*> before;
    for (int r = 0; r < o.ranks; ++r) {
      Problem own = p;
      if (drops && r == slow) own.blocks = 3, own.push_blocks = 1;  // it sends its routing at once, its rows slowly
      before.push_back(world.Add(own, cases[r], r, 1000, 20 * o.patience));
    }
    Problem without = p;  // of such a size that the slow rank's place in the first lies in that of rank 0
    without.members.reset(slow), without.tokens = drops ? 60 : 30,
                                 without.capacity = o.ranks * without.tokens * p.top_k;
    const auto after = world.AddAll(without, 20 * o.patience);
    world.Start(Largest({before, after}));
    if (drops) {  // a rank does not write to a rank where the operation has ended
      std::vector<Bytes> staged(o.ranks);
      world.Each([&](int rank) {
        const RankState& state = world.states[rank];
        before[rank]->LaunchAndVerify(state.stream[0]);
        if (rank == slow) return;
        NATIVE_CHECK(cudaStreamSynchronize(state.stream[0]));
        staged[rank] = world.Staged(rank);
      });
      world.Synchronize();
      for (int r = 0; r < o.ranks; ++r) {
        Expect(r == slow || staged[r] == world.Staged(r), Text("rank %d was written to after ", r) + Name(p));
      }
    }
    for (int round = 0; round < 2; ++round) {
      *stop = 0;
      world.Each([&](int rank) {
        const RankState& state = world.states[rank];
        if (rank == slow) {
          Occupy(state.side, drops ? 3 : 1, stop, 20 * o.patience);  // 1: one block at a time
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
        before[rank]->LaunchAndVerify(state.stream[0]);
        for (int i = 0; i < (drops ? 4 : 12); ++i) after[rank]->LaunchAndVerify(state.stream[0]);
        NATIVE_CHECK(cudaStreamSynchronize(state.stream[0]));
        if (rank == slow) *reinterpret_cast<volatile int*>(stop) = 1;
      });
      world.Synchronize();
      ExpectSuccess(world, "operations beside a rank that was left out, after " + Name(p));
      operations += drops ? 5 : 13;
    }
  }
  NATIVE_CHECK(cudaFreeHost(stop));
  return Text("%d operations, most of them without a rank that was still busy with the one before", operations);
}

}  // namespace native
