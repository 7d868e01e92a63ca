#include <string>

#include "tests/native/expectations.h"

namespace native {
namespace {

// Rounds of two tokens; the last round of `kTokens` has one. Eleven rounds through rings of four.
constexpr int kRing = 2 * kRingRounds, kTokens = 21;
// These numbers of ranks run fewer cases: 17, in a few seconds, and more than 40, for which the emulator is slow.
bool Quick(int ranks) { return ranks == 17 || ranks > 40; }

Problem RingProblem(const Options& o, std::mt19937& rng, Operation operation, Layout layout) {
  Problem p;
  p.ranks = o.ranks, p.seed = static_cast<uint32_t>(rng()), p.operation = operation, p.layout = layout;
  p.tokens = kTokens, p.ring_tokens = kRing, p.top_k = 4, p.experts = 2 * o.ranks, p.hidden = 32;
  p.blocks = 2, p.push_blocks = 1, p.segment_tokens = 4;
  p.capacity = layout == Layout::kPadded ? p.local_experts() * o.ranks * p.tokens : 8 * p.tokens;
  return p;
}

// Every operation and layout, and every kernel of ranks256_ring that differs in how it reads or
// stores a staged row.
std::vector<Problem> RingProblems(const Options& o, std::mt19937& rng) {
  std::vector<Problem> out;
  auto add = [&](Operation operation, Layout layout) -> Problem& {
    out.push_back(RingProblem(o, rng, operation, layout));
    return out.back();
  };
  const bool all = !Quick(o.ranks) && o.ranks <= 20;  // else a selection: the kernels are the same ones
  for (const Operation operation : {Operation::kDispatch, Operation::kRedispatch, Operation::kCombine}) {
    for (const Layout layout : {Layout::kGrouped, Layout::kRanked, Layout::kPadded}) {
      if (all || (static_cast<int>(operation) + 2) % 3 == static_cast<int>(layout)) add(operation, layout);
    }
  }
  if (!all) return out;
  // quantized rows of odd sizes, in parts, many of them dropped; positions by every block for itself
  for (const WireType wire : {WireType::kFp8, WireType::kMxfp4}) {
    Problem& p = add(Operation::kDispatch, Layout::kGrouped);
    p.element = Element::kBf16, p.wire = wire, p.hidden = 130, p.alignment = 4, p.capacity = o.ranks;
    p.solo = true, p.parts = 2, p.blocks = 3, p.push_blocks = 2;
  }
  {  // bytes with scales; metadata in slices; more pushing blocks than there may be room for
    Problem& p = add(Operation::kDispatch, Layout::kRanked);
    p.element = Element::kByte, p.scaled = true, p.hidden = 256, p.slices = 2, p.blocks = 3, p.push_blocks = 3;
  }
  for (const WireType wire : {WireType::kNative, WireType::kFp8, WireType::kMxfp4}) {
    Problem& p = add(Operation::kCombine, Layout::kGrouped);
    p.element = Element::kBf16, p.wire = wire, p.hidden = 256, p.blocks = 3, p.push_blocks = 2;
  }
  {
    Problem& p = add(Operation::kCombine, Layout::kGrouped);
    p.wire = WireType::kInt8, p.hidden = 130, p.ranks_per_node = o.ranks % 3 == 0 ? o.ranks / 3 : o.ranks, p.parts = 2;
  }
  return out;
}

using Pools = std::vector<std::vector<Prepared*>>;

Pools PoolOf(World& world, const Options& o, const std::vector<Problem>& problems, double timeout_s) {
  Pools pool;
  for (const Problem& p : problems) {
    pool.push_back(world.AddAll(p, timeout_s * o.patience));
    if (p.ring_tokens == 0) continue;
    const Prepared& first = *pool.back()[0];
    const Staging& staging = p.operation == Operation::kCombine ? first.combine.staging : first.dispatch.staging;
    Expect(staging.ring_tokens == p.ring_tokens, "not in rounds: " + Name(p));
  }
  return pool;
}
void RunAll(World& world, const Pools& pool, int times, const char* what) {
  for (const auto& ranks : pool) {
    world.Each([&](int rank) {
      for (int i = 0; i < times; ++i) ranks[rank]->LaunchAndVerify(world.states[rank].stream[0]);
    });
    world.Synchronize();
    ExpectSuccess(world, what + Name(ranks[0]->problem));
  }
}

// The last rank does not come to `ranks`: all other ranks name it, and the rows that it owed. Ranks that wait for its
// rows show this, though they also wait for credits of one another. Then everything goes on.
void WithoutTheLast(World& world, const Options& o, const std::vector<Prepared*>& ranks, Step owed) {
  const int last = world.ranks() - 1;
  world.Each([&](int rank) {
    if (rank != last) ranks[rank]->LaunchAndVerify(world.states[rank].stream[0], true);
  });
  if (o.gpus >= o.ranks) ExpectToShow(world, last, owed, LateSeconds(o) * o.patience, Name(ranks[0]->problem));
  world.Synchronize();
  ExpectRight(world, "results that are not poisoned: " + Name(ranks[0]->problem));
  for (int r = 0; r < last; ++r) {
    const Failure f = UnpackFailure(world.FailureOf(r));
    Expect(f.cause == Cause::kTimeout && f.rank == last && (f.step == owed || f.step == Step::kArrival),
           Text("rank %d: ", r) + FailureText(world.FailureOf(r)));
  }
  world.Reset();
}

}  // namespace

std::string Rings(const Options& o) {
  World world(o.ranks, o.gpus);
  std::mt19937 rng(o.seed);
  const std::vector<Problem> problems = RingProblems(o, rng);
  Problem whole = RingProblem(o, rng, Operation::kCombine, Layout::kGrouped);
  whole.ring_tokens = 0;  // between operations in rounds: each uses the half of the memory that these leave
  const Problem dispatch = RingProblem(o, rng, Operation::kDispatch, Layout::kGrouped);
  const Problem combine = RingProblem(o, rng, Operation::kCombine, Layout::kGrouped);
  // Every third rank is inactive, and the last one; all ranks make these calls.
  std::vector<Problem> some = {dispatch, combine};
  for (Problem& p : some) {
    for (int r = 0; r < o.ranks; r += 3) p.members.reset(r);
    p.members.reset(o.ranks - 1);
  }
  // The last rank has no experts: in a combine the other ranks await only its credits.
  Problem credits = combine;
  credits.experts = o.ranks - 1;
  const Pools pool = PoolOf(world, o, problems, 20), without = PoolOf(world, o, some, 20);
  const Pools all = PoolOf(world, o, {dispatch, whole, combine}, 20);
  const bool quick = Quick(o.ranks);
  std::vector<Problem> awaited = {credits};
  if (!quick) awaited.insert(awaited.end(), {combine, dispatch});
  const Pools late = PoolOf(world, o, awaited, LateSeconds(o));
  // Random shapes for `calls` operations, some of one round.
  std::vector<Problem> shapes;
  for (int i = 0; i < (o.calls ? 12 : 0); ++i) {
    Problem p;
    do {
      p = RandomProblem(rng, o.ranks, 4);
    } while (p.operation == Operation::kExchange);
    p.low_latency = false, p.tokens = 1 + static_cast<int>(rng() % 24);
    p.ring_tokens = kRingRounds * (1 + static_cast<int>(rng() % 3));
    if (p.ring_tokens >= p.tokens) p.ring_tokens = 0;
    const int some = 1 + static_cast<int>(rng() % 300);
    p.capacity = p.layout == Layout::kPadded ? p.local_experts() * o.ranks * p.tokens : some;
    shapes.push_back(p);
  }
  const Pools random = PoolOf(world, o, shapes, 20);
  Pools everything = pool;
  for (const Pools* more : {&without, &all, &late, &random})
    everything.insert(everything.end(), more->begin(), more->end());
  world.Start(Largest(everything));
  RunAll(world, pool, 1, "");
  RunAll(world, without, quick ? 1 : 2, "without some ranks: ");
  RunAll(world, all, 1, "with all again: ");
  if (!random.empty()) {
    RunRandom(world, random, o, o.calls, true);
    ExpectSuccess(world, "random operations");
  }
  constexpr Step kOwed[] = {Step::kCredit, Step::kRows, Step::kMetadata};
  for (size_t i = 0; i < late.size(); ++i) {
    WithoutTheLast(world, o, late[i], kOwed[i]);
    RunAll(world, all, 1, "after reset: ");  // in the first operation after one ranks wait for each other's beginning
  }
  // A graph of all of them, replayed.
  const int replays = quick ? 2 : 3;
  std::vector<cudaGraphExec_t> graphs(o.ranks);
  for (const RankState& state : world.states) {  // one after the other: nothing runs
    NATIVE_CHECK(cudaSetDevice(state.device));
    cudaGraph_t graph;
    NATIVE_CHECK(cudaStreamBeginCapture(state.stream[0], cudaStreamCaptureModeThreadLocal));
    for (const auto& ranks : all) ranks[state.rank]->LaunchAndVerify(state.stream[0]);
    NATIVE_CHECK(cudaStreamEndCapture(state.stream[0], &graph));
    NATIVE_CHECK(cudaGraphInstantiate(&graphs[state.rank], graph, 0));
    NATIVE_CHECK(cudaGraphUpload(graphs[state.rank], state.stream[0]));
    NATIVE_CHECK(cudaGraphDestroy(graph));
  }
  world.Synchronize();
  world.Each([&](int rank) {
    for (int i = 0; i < replays; ++i) NATIVE_CHECK(cudaGraphLaunch(graphs[rank], world.states[rank].stream[0]));
    NATIVE_CHECK(cudaStreamSynchronize(world.states[rank].stream[0]));
    NATIVE_CHECK(cudaGraphExecDestroy(graphs[rank]));
  });
  ExpectSuccess(world, "replays");
  return Text("%zu problems of %d rounds; %lld random; without every third rank; the last rank named; %d replays",
              pool.size(), (kTokens + 1) / 2, static_cast<long long>(random.empty() ? 0 : o.calls), replays);
}

}  // namespace native
