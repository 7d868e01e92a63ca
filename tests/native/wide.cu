#include <string>

#include "tests/native/expectations.h"

namespace native {
namespace {

// One of each operation, layout and kind of row, as small as possible: only the ranks that are stored to, awaited and
// added, and their order, may differ from a group of few ranks.
std::vector<Problem> SmallProblems(const Options& o) {
  std::mt19937 rng(o.seed);
  const int R = o.ranks;
  std::vector<Problem> out;
  auto add = [&](Operation operation, Layout layout, bool low_latency) -> Problem& {
    Problem p;
    p.ranks = R, p.seed = static_cast<uint32_t>(rng()), p.operation = operation, p.layout = layout;
    p.tokens = 3, p.top_k = 4, p.experts = 2 * R, p.hidden = 64, p.low_latency = low_latency;
    p.blocks = 2, p.push_blocks = 1, p.segment_tokens = 2;
    p.capacity = layout == Layout::kPadded ? p.local_experts() * R * p.tokens : R * p.tokens * p.local_experts();
    out.push_back(p);
    return out.back();
  };
  const bool all = R <= 20;  // of more not every combination: it takes too long, and the kernels are the same ones
  for (const Operation operation : {Operation::kDispatch, Operation::kRedispatch, Operation::kCombine}) {
    for (const Layout layout : {Layout::kGrouped, Layout::kRanked, Layout::kPadded}) {
      if (!all && (static_cast<int>(operation) + 2) % 3 != static_cast<int>(layout)) continue;
      add(operation, layout, false);
      if (operation != Operation::kRedispatch) add(operation, layout, true);
    }
  }
  for (const WireType wire : {WireType::kFp8, WireType::kMxfp4}) {  // of odd sizes, dropped, in parts
    Problem& p = add(Operation::kDispatch, Layout::kGrouped, false);
    p.element = Element::kBf16, p.wire = wire, p.hidden = 130, p.alignment = 4, p.capacity = R;
    p.solo = true, p.parts = 2;
  }
  {
    Problem& p = add(Operation::kDispatch, Layout::kRanked, false);
    p.element = Element::kByte, p.scaled = true, p.hidden = 256, p.slices = 2, p.blocks = 3;
  }
  for (const WireType wire : {WireType::kNative, WireType::kFp8, WireType::kMxfp4}) {
    Problem& p = add(Operation::kCombine, Layout::kGrouped, false);
    p.element = Element::kBf16, p.wire = wire, p.hidden = 256;
  }
  {
    Problem& p = add(Operation::kCombine, Layout::kGrouped, false);
    p.wire = WireType::kInt8, p.hidden = 130, p.ranks_per_node = R % 3 == 0 ? R / 3 : R;
  }
  for (const int kind : {0, 1, 2, 3}) {  // all_to_all, ragged_all_to_all, all_gather, all_gather through lines
    const bool ragged = kind == 1;
    if (!all && kind < 3) continue;  // R blocks on each of R ranks
    Problem p;
    p.ranks = R, p.seed = static_cast<uint32_t>(rng()), p.operation = Operation::kExchange, p.ragged = ragged;
    p.tokens = 2, p.hidden = 20, p.chunk_bytes = 16, p.ring_chunks = 1, p.lanes = kind == 2 ? kBlockLanes : 1;
    p.capacity = R * p.tokens + (ragged ? 1 : 0);
    p.gather = kind >= 2, p.low_latency = kind == 3;
    if (p.low_latency) p.hidden = 48, p.lanes = 2;
    out.push_back(p);
  }
  return out;
}

// Returns true if the blocks of all ranks of a GPU are resident together, which ranks that share a GPU need.
bool Resident(const Options& o, const Problem& p) {
  const int sharing = (o.ranks + o.gpus - 1) / o.gpus;
  return p.operation != Operation::kExchange || sharing == 1 ||
         sharing * (p.low_latency ? p.lanes : p.ranks * p.lanes / (p.gather ? kBlockLanes : 1)) <= Multiprocessors(0);
}

std::vector<std::vector<Prepared*>> PoolOf(World& world, const Options& o, const std::vector<Problem>& problems,
                                           double timeout_s) {
  std::vector<std::vector<Prepared*>> pool;
  for (const Problem& p : problems) {
    if (Resident(o, p)) pool.push_back(world.AddAll(p, timeout_s * o.patience));
  }
  return pool;
}
void RunAll(World& world, const Options& o, const std::vector<std::vector<Prepared*>>& pool, const char* what) {
  for (const auto& ranks : pool) {
    world.Each([&](int rank) {
      for (int i = 0; i < (o.ranks > 20 ? 1 : 2); ++i) ranks[rank]->LaunchAndVerify(world.states[rank].stream[0]);
    });
    world.Synchronize();
    ExpectSuccess(world, what + Name(ranks[0]->problem));
  }
}

}  // namespace

std::string Wide(const Options& o) {
  World world(o.ranks, o.gpus);
  const std::vector<Problem> problems = SmallProblems(o);
  const auto pool = PoolOf(world, o, problems, 20);
  // Every third rank is inactive, and the last one; all ranks make these calls. One problem is for the last rank alone,
  // which never comes to it.
  std::vector<Problem> some = {problems[0], problems[1], problems.front()}, other = {problems[0]};
  some[2].operation = Operation::kCombine;
  for (Problem& p : some) {
    for (int r = 0; r < o.ranks; r += 3) p.members.reset(r);
    p.members.reset(o.ranks - 1);
  }
  other[0].site = 7;
  const auto without = PoolOf(world, o, some, 20), mismatched = PoolOf(world, o, other, 20);
  const auto whole = PoolOf(world, o, {problems[0], problems[1]}, 20),
             late = PoolOf(world, o, {problems[0]}, LateSeconds(o));
  auto all = pool;
  for (const auto* more : {&without, &mismatched, &whole, &late}) all.insert(all.end(), more->begin(), more->end());
  world.Start(Largest(all));
  RunAll(world, o, pool, "");
  RunAll(world, o, without, "without some ranks: ");
  RunAll(world, o, whole, "with all again: ");  // the ranks that were inactive join
  // The last rank does not come, and all name it.
  const int last = o.ranks - 1;
  world.Each([&](int rank) {
    if (rank != last) late[0][rank]->LaunchAndVerify(world.states[rank].stream[0], true);
  });
  world.Synchronize();
  ExpectRight(world, "results that are not poisoned");
  for (int r = 0; r < last; ++r) {
    const Failure f = UnpackFailure(world.FailureOf(r));
    Expect(f.cause == Cause::kTimeout && f.rank == last, Text("rank %d: ", r) + FailureText(world.FailureOf(r)));
  }
  world.Reset();
  RunAll(world, o, whole, "after reset: ");
  // The last rank runs another operation, and all say so.
  world.Each([&](int rank) {
    (rank == last ? mismatched : whole)[0][rank]->LaunchAndVerify(world.states[rank].stream[0], true);
  });
  world.Synchronize();
  ExpectRight(world, "results that are not poisoned");
  const Failure f = ExpectFailure(world, Cause::kMismatch);
  Expect(f.rank == last, FailureText(world.FailureOf(0)));
  return Text("%zu problems; without every third rank; the last rank named when it is absent or odd", pool.size());
}

}  // namespace native
