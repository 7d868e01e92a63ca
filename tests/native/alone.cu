// Tests of dispatches in which a block counts all slots of its rank for itself. The only rank of a group has kernels of
// its own for them, and for combines (cuda_kernels/core/alone.h): random calls give the right results, and in a group
// that has failed poisoned ones. Several ranks number their rows as senders (cuda_kernels/dispatch/numbers.cuh).
#include <random>
#include <string>

#include "cuda_kernels/core/launch.cuh"
#include "cuda_kernels/dispatch/numbers_plan.h"
#include "tests/native/expectations.h"

namespace native {

std::string Alone(const Options& o) {
  World world(1, 1);
  std::mt19937 rng(o.seed);
  std::vector<std::vector<Prepared*>> pool;
  for (int kind = 0; kind < 36; ++kind) {
    Problem p;
    p.seed = static_cast<uint32_t>(rng()), p.ranks = 1, p.top_k = 1 + static_cast<int>(rng() % 20);
    p.tokens = 1 + static_cast<int>(rng() % (900 / p.top_k)), p.experts = 1 + static_cast<int>(rng() % 70);
    p.operation = kind % 2 ? Operation::kCombine : Operation::kDispatch;
    p.layout = static_cast<Layout>(kind / 2 % 3 == 1 && kind % 2 ? 1 : kind / 2 % 3 == 2 ? 2 : 0);
    p.element = kind % 2 ? static_cast<Element>(kind / 2 % 3) : Element::kF32, p.hidden = kind % 2 ? 8 * (kind + 1) : 4;
    p.weighted = p.layout != Layout::kRanked && kind % 8 != 3, p.alignment = kind % 12 == 0 ? 16 : 1;
    const int rows = p.tokens * (p.layout == Layout::kRanked ? 1 : p.top_k) + p.experts * (p.alignment - 1);
    p.capacity = p.layout == Layout::kPadded ? p.experts * p.tokens : kind % 5 == 3 ? std::max(1, rows / 2) : rows;
    p.blocks = std::min(12, MostBlocks(o)), p.push_blocks = 2;
    if (kind % 9 == 7) p.members.reset(0);
    pool.push_back(world.AddAll(p, 20 * o.patience));
    const Needs& needs = pool.back()[0]->needs();
    Expect(needs.flag_bytes == 0 && needs.data_bytes == 256 && needs.scratch_bytes == 0,
           Text("problem %d needs more memory than every other one", kind));
  }
  const int64_t calls = std::min<int64_t>(o.calls, 20000);
  world.Start(Largest(pool));
  RunRandom(world, pool, o, calls, true);
  ExpectNoFailure(world);
  ExpectRight(world, "some of the calls");
  const uint64_t failure = 1;
  NATIVE_CHECK(cudaMemcpy(&world.states[0].mailbox->failure, &failure, 8, cudaMemcpyHostToDevice));
  for (const auto& ranks : pool) ranks[0]->LaunchAndVerify(world.states[0].stream[0], true);
  world.Synchronize();
  ExpectRight(world, "results of a failed group");
  return Text("%zu problems, %lld calls", pool.size(), static_cast<long long>(calls));
}

// The problems have shares of no slot, of a few, and of more than a block numbers at once, experts that are no multiple
// of the ranks, inactive ranks, and rows that are dropped.
std::string Numbers(const Options& o) {
  World world(o.ranks, o.gpus);
  std::mt19937 rng(o.seed);
  std::vector<std::vector<Prepared*>> pool;
  for (int kind = 0; kind < 24; ++kind) {
    Problem p;
    p.seed = static_cast<uint32_t>(rng()), p.ranks = o.ranks, p.top_k = 1 + static_cast<int>(rng() % 12);
    p.tokens = 1 + static_cast<int>(rng() % (kind % 3 ? 60 : 2600 / p.top_k)), p.hidden = 8;
    p.experts = 1 + static_cast<int>(rng() % (kind % 4 ? 30 : 300)), p.weighted = true;
    p.layout = kind % 5 == 2 ? Layout::kPadded : Layout::kGrouped, p.alignment = kind % 5 == 3 ? 16 : 1;
    p.blocks = 1 + static_cast<int>(rng() % std::min(24, MostBlocks(o)));
    p.push_blocks = 1 + static_cast<int>(rng() % p.blocks), p.slices = kind % 3 ? p.blocks : 1 + p.blocks / 8;
    p.bulk = kind % 2, p.segment_tokens = 7;
    const int rows = p.ranks * p.tokens * std::min(p.top_k, p.local_experts()) + 15 * p.local_experts();
    p.capacity = p.layout == Layout::kPadded ? p.local_experts() * p.ranks * p.tokens : kind % 7 ? rows : rows / 4 + 1;
    if (kind % 8 == 5) p.members.reset(rng() % o.ranks);
    pool.push_back(world.AddAll(p, 20 * o.patience));
    const xen_moe::DispatchParams& made = pool.back()[0]->dispatch;
    Expect(SendersNumber(made.routing, made.schedule), Text("the senders of problem %d number no rows", kind));
  }
  const int64_t calls = std::min<int64_t>(o.calls, 20000);
  world.Start(Largest(pool));
  RunRandom(world, pool, o, calls, true);
  ExpectNoFailure(world);
  ExpectRight(world, "some of the calls");
  Problem p;  // of a rank that numbers its rows, and of one that does not
  p.ranks = o.ranks, p.tokens = 8, p.top_k = 2, p.hidden = 8, p.experts = 2 * o.ranks, p.segment_tokens = 8;
  p.capacity = o.ranks * p.tokens * p.top_k;
  Problem other = p;
  other.solo = true;
  World mixed(o.ranks, o.gpus);
  const auto mine = mixed.AddAll(p, 20 * o.patience), theirs = mixed.AddAll(other, 20 * o.patience);
  mixed.Start(Largest({mine, theirs}));
  mixed.Each([&](int rank) { (rank == 0 ? theirs : mine)[rank]->LaunchAndVerify(mixed.states[rank].stream[0], true); });
  mixed.Synchronize();
  ExpectRight(mixed, "results that are not poisoned");
  ExpectFailure(mixed, Cause::kMismatch);
  return Text("%zu problems, %lld calls", pool.size(), static_cast<long long>(calls));
}

__global__ void NoKernel() {}

// A launch returns its own error: not one that an earlier call of the thread has left, and it leaves none behind.
std::string Errors(const Options& o) {
  using xen_moe::XEN_MOE_VARIANT::LaunchEarly;
  using xen_moe::XEN_MOE_VARIANT::LoadKernel;
  World world(o.ranks, o.gpus);
  const auto pool = Pool(world, o, 24, 5);
  world.Start(Largest(pool));
  world.Each([&](int rank) {
    cudaStream_t stream = world.states[rank].stream[0];
    for (const auto& ranks : pool) {
      const cudaError_t left = cudaSetDevice(1 << 20);
      ranks[rank]->Launch(stream);
      Expect(left != cudaSuccess && cudaGetLastError() == left, "a launch took the error of another call");
      ranks[rank]->Verify(stream, false);
    }
    Expect(LoadKernel(NoKernel, 1 << 30) != cudaSuccess, "a GPU has a GiB of shared memory");
    Expect(cudaGetLastError() == cudaSuccess, "LoadKernel left an error");
    Expect(LaunchEarly(NoKernel, 1, 1 << 30, stream) != cudaSuccess, "a block got a GiB of shared memory");
    Expect(cudaGetLastError() == cudaSuccess, "LaunchEarly left an error");
  });
  world.Synchronize();
  ExpectSuccess(world, "launches after errors");
  return Text("%zu problems", pool.size());
}

}  // namespace native
