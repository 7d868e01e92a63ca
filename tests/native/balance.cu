#include <string>

#include "tests/native/expectations.h"

namespace native {

// Combines by home and moved weights: random ones of each, then all of them in random order.
std::string Balance(const Options& o) {
  World world(o.ranks, o.gpus);
  std::mt19937 rng(o.seed);
  std::vector<std::vector<Prepared*>> pool;
  int combines = 0, moves = 0, left_out = 0;
  while (combines < 18 || moves < 12) {
    Problem p = RandomProblem(rng, o.ranks, std::min(16, MostBlocks(o)));
    if (!(p.by_home && combines < 18) && !(p.by_table && moves < 12)) continue;
    (p.by_home ? combines : moves) += 1;
    if (p.by_home && combines % 3 == 0) p.top_k = combines % 2 ? 8 : 33;  // the second word of a token's slots
    if (p.by_home && p.layout == Layout::kGrouped && combines % 3 == 0) p.capacity = o.ranks * p.tokens * p.top_k;
    if ((p.by_home ? combines : moves) % 4 == 0) p.members.reset(o.ranks - 1), ++left_out;
    pool.push_back(world.AddAll(p, 20 * o.patience));
  }
  world.Start(Largest(pool));
  for (const auto& ranks : pool) {
    world.Each([&](int rank) { ranks[rank]->LaunchAndVerify(world.states[rank].stream[0]); });
    world.Synchronize();
    ExpectSuccess(world, Name(ranks[0]->problem));
  }
  const auto calls = static_cast<long long>(std::min<int64_t>(o.calls, 400));
  RunRandom(world, pool, o, calls, true);
  ExpectSuccess(world, "random operations");
  return Text("%d combines by home, %d moves, %d of both without a rank; %lld calls", combines, moves, left_out, calls);
}

}  // namespace native
