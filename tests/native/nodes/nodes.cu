// The kernels across nodes, with several virtual nodes in one process and without JAX.
//   nodes --ranks R --per-node G --gpus N --link peer|network --scenario NAME|all --calls N --seed S --patience F
// `peer` reaches the other nodes by pointer, on GPUs too; `network` goes over network.h, on the emulator alone. One
// line per scenario. Exit status 0: all passed.
#include <algorithm>
#include <bitset>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <string>
#include <thread>

#include "cuda_kernels/node/peer_transport.cuh"
#include "tests/native/nodes/node_operations.cuh"
#ifndef __CUDACC__
#include "tests/native/nodes/network_link.cuh"
#endif

namespace native {
namespace {

// A world whose ranks have no pointers to ranks of other nodes; only the link has them.
class NodeWorld {
 public:
  explicit NodeWorld(const NodeOptions& options) : world(options.ranks, options.gpus), options_(options) {
    for (const RankState& state : world.states) {
      NATIVE_CHECK(cudaSetDevice(state.device));
      expected_.push_back(Words(Signals()));
      counters_.push_back(Words(Signals()));
      tables_.push_back(reinterpret_cast<PeerTable*>(Words(sizeof(PeerTable) / 8)));
      known_.push_back({});
      if (state.rank >= options.gpus) continue;
      Preload<PeerLink>();
#ifndef __CUDACC__
      Preload<NetworkLink>();
#endif
    }
#ifndef __CUDACC__
    Faults faults;
    faults.seed = options.seed, faults.broken = options.broken;
    faults.reorder = faults.duplicate = true, faults.most_delay_us = 100;
    network = std::make_unique<Network>(options.ranks, options.per_node, Signals(), faults);
#endif
  }
  ~NodeWorld() {
#ifndef __CUDACC__
    for (const RankState& state : world.states) {
      cudaSetDevice(state.device);
      cudaDeviceSynchronize();
    }
    network.reset();
#endif
    for (char* p : own_) cudaFree(p);
  }
  std::vector<NodeOperation> Add(Problem problem, int chunk_tokens, double timeout_s) {
    std::vector<NodeOperation> out;
    problem.chunk_tokens = chunk_tokens;
    for (Prepared* prepared : world.AddAll(problem, timeout_s * options_.patience)) {
      NodeOperation o;
      o.prepared = prepared;
      o.Plan(expected_[out.size()]);
      out.push_back(o);
    }
    return out;
  }
  // Makes the memory for the operations of `pool`, and takes away the pointers to other nodes.
  void Start(const std::vector<std::vector<NodeOperation>>& pool) {
    world.Start(NeedsOfAll(pool));
    Part();
  }
  // More memory, for all ranks at once, as the host does it: nothing runs. The next operation that ends goes over to
  // it, or begins with it when it needs that.
  void Grow(const std::vector<std::vector<NodeOperation>>& pool) {
    Synchronize();
    const uint32_t generation = world.Allocate(NeedsOfAll(pool));
    for (const RankState& state : world.states) world.Publish(state.rank, generation);
    Part();
  }
  // Does the host's reset(), which also forgets arrivals from other nodes.
  void Reset() {
    Synchronize();
    world.Reset();
    for (const RankState& state : world.states) {
      NATIVE_CHECK(cudaMemset(expected_[state.rank], 0, Signals() * 8));
      NATIVE_CHECK(cudaMemset(counters_[state.rank], 0, Signals() * 8));
    }
#ifndef __CUDACC__
    network->ClearCounters();
#endif
    Part();
  }
  // Waits until nothing runs, and no message is on its way.
  void Synchronize() {
    world.Synchronize();
#ifndef __CUDACC__
    network->Drain();
#endif
  }
  // Launches every second operation asynchronously, and on every other rank the remaining ones; with `all_in_flight`
  // all of them.
  void Launch(const NodeOperation& o, int rank, bool poisoned = false) {
    const cudaStream_t stream = world.states[rank].stream[0];
    const bool in_flight = all_in_flight.value_or((rank + launched_[rank]++) % 2);
#ifndef __CUDACC__
    if (options_.network) {
      NATIVE_CHECK(LaunchOne(o, NetworkLink{network.get(), rank}, stream, in_flight));
      return o.prepared->Verify(stream, poisoned);
    }
#endif
    NATIVE_CHECK(LaunchOne(o, PeerLink{tables_[rank], rank}, stream, in_flight));
    o.prepared->Verify(stream, poisoned);
  }

  World world;
  std::optional<bool> all_in_flight;
#ifndef __CUDACC__
  std::unique_ptr<Network> network;
#endif

 private:
  uint64_t* Words(size_t count) {
    char* p = nullptr;
    NATIVE_CHECK(cudaMalloc(&p, count * 8));
    NATIVE_CHECK(cudaMemset(p, 0, count * 8));
    own_.push_back(p);
    return reinterpret_cast<uint64_t*>(p);
  }
  int Signals() const { return RailSignals(options_.ranks, options_.ranks / options_.per_node); }
  static Needs NeedsOfAll(const std::vector<std::vector<NodeOperation>>& pool) {
    std::vector<std::vector<Prepared*>> all;
    for (const auto& ranks : pool) all.push_back({ranks[0].prepared});
    return Largest(all);
  }
  // Takes the pointers to other nodes away, and gives them to the links.
  void Part() {
    std::vector<Control> controls(world.ranks());
    for (const RankState& state : world.states) {
      NATIVE_CHECK(cudaMemcpy(&controls[state.rank], state.control, sizeof(Control), cudaMemcpyDeviceToHost));
    }
    for (const RankState& state : world.states) {
      Control& control = controls[state.rank];
      PeerTable& table = known_[state.rank];
      for (int r = 0; r < world.ranks(); ++r) {
        for (int g = 0; g < kGenerations; ++g) {
          if (char* const there = control.memory[g].staging[r]) table.staging[g][r] = there;  // or it was taken before
        }
        table.counters[r] = counters_[r], table.mailbox[r] = world.states[r].mailbox;
#ifndef __CUDACC__
        for (const MemoryTable& memory : control.memory) {
          if (memory.generation == 0 || memory.staging[r] == nullptr) continue;
          network->Register(memory.generation, r, memory.staging[r], 2 * (memory.flag_bytes + memory.data_bytes));
        }
        network->RegisterFailure(r, &world.states[r].mailbox->failure);
        network->RegisterTold(r, world.states[r].mailbox->told);
#endif
        if (r / options_.per_node == state.rank / options_.per_node) continue;
        control.mailbox[r] = nullptr, control.current.staging[r] = nullptr;
        for (MemoryTable& memory : control.memory) memory.staging[r] = nullptr;
      }
      NATIVE_CHECK(cudaMemcpy(tables_[state.rank], &table, sizeof(table), cudaMemcpyHostToDevice));
      NATIVE_CHECK(cudaMemcpy(state.control, &control, sizeof(control), cudaMemcpyHostToDevice));
    }
    world.Synchronize();
  }
  NodeOptions options_;
  int launched_[kMaxRanks] = {};
  std::vector<char*> own_;
  std::vector<uint64_t*> expected_, counters_;
  std::vector<PeerTable*> tables_;
  std::vector<PeerTable> known_;  // contents of the tables
};

using Ranks = std::bitset<kMaxRanks>;
Ranks AllOf(const NodeOptions& o) { return ~Ranks() >> (kMaxRanks - o.ranks); }
Ranks Only(int rank) { return Ranks().set(rank); }
Ranks SomeOf(std::mt19937& rng, const NodeOptions& o) {
  Ranks out;
  for (int word = 0; word < kRankWords; ++word) out |= Ranks(rng()) << 32 * word;
  return out & AllOf(o);
}

// `masks`: the active ranks of each operation in turn; none: all ranks, and no mask is passed.
std::vector<std::vector<NodeOperation>> NodePool(NodeWorld& nodes, const NodeOptions& o, int count, double timeout_s,
                                                 const std::vector<Ranks>& masks = {}) {
  std::mt19937 rng(o.seed + static_cast<uint32_t>(masks.size()));
  std::vector<std::vector<NodeOperation>> pool;
  for (int i = 0; i < count; ++i) {
    const bool few = i % 5 > 2;  // both kinds beside each other
    Problem p = NodeProblem(rng, o, few ? i / 5 * 2 + i % 5 - 3 : i / 5 * 3 + i % 5, few);
    if (!masks.empty()) p.members = masks[i % masks.size()], p.told = true;
    const int sizes[] = {few ? 3 : 1, 7, 16, 32};
    pool.push_back(nodes.Add(p, sizes[rng() % 4], timeout_s));
  }
  return pool;
}

#ifndef __CUDACC__
// Checks that one operation put the necessary bytes on the slow link, and no others.
void ExpectTraffic(NodeWorld& nodes, const NodeOptions& o, const std::vector<NodeOperation>& operation) {
  std::vector<std::vector<int>> topk;
  for (const NodeOperation& one : operation) topk.push_back(one.Experts());
  for (int s = 0; s < o.ranks; ++s) {
    for (int t = 0; t < o.ranks; ++t) {
      const Problem& p = operation[0].prepared->problem;
      const uint64_t went = nodes.network->Between(s, t).bytes;
      const uint64_t wanted = BytesBetween(p, operation[0].low_latency(), topk, s, t);
      Expect(went == wanted, Text("rank %d sent rank %d %d bytes instead of %d: ", s, t, static_cast<int>(went),
                                  static_cast<int>(wanted)) +
                                 Name(p));
    }
  }
}
#endif

std::string Normal(const NodeOptions& o) {
  NodeWorld nodes(o);
  const auto pool = NodePool(nodes, o, o.ranks > 20 ? 4 : 20, 10);
  nodes.Start(pool);
  for (const auto& ranks : pool) {
    for (int repeat = 0; repeat < 2; ++repeat) {
#ifndef __CUDACC__
      nodes.network->ClearTraffic();
#endif
      nodes.world.Each([&](int rank) { nodes.Launch(ranks[rank], rank); });
      nodes.world.Synchronize();
#ifndef __CUDACC__
      if (o.network && nodes.world.FailureOf(0) == 0) ExpectTraffic(nodes, o, ranks);
#endif
    }
    ExpectSuccess(nodes.world, Name(ranks[0].prepared->problem));
  }
  return Text("%zu problems, each twice", pool.size());
}

// One of each operation and kernel, as small as they go, between more ranks than the other scenarios have time for:
// only the ranks that are stored to, awaited and added, and their order, differ then. With all ranks, without every
// third one and the last, whose rails have gaps, and with all again.
std::string Many(const NodeOptions& o) {
  NodeWorld nodes(o);
  std::mt19937 rng(o.seed);
  std::vector<Problem> problems;
  auto add = [&](Operation operation, Layout layout, bool few) -> Problem& {
    Problem p;
    p.ranks = o.ranks, p.ranks_per_node = o.per_node, p.operation = operation, p.layout = layout, p.low_latency = few;
    p.tokens = 3, p.top_k = 4, p.experts = 2 * o.ranks, p.hidden = 64, p.seed = static_cast<uint32_t>(rng());
    p.blocks = 2, p.push_blocks = 1, p.segment_tokens = 2;
    p.capacity = o.ranks * p.tokens * p.local_experts();
    problems.push_back(p);
    return problems.back();
  };
  for (const bool few : {false, true}) {
    add(Operation::kDispatch, few ? Layout::kRanked : Layout::kGrouped, few);
    add(Operation::kCombine, Layout::kGrouped, few);
  }
  add(Operation::kRedispatch, Layout::kRanked, false);
  Problem& quantized = add(Operation::kCombine, Layout::kPadded, false);
  quantized.element = Element::kBf16, quantized.wire = WireType::kFp8, quantized.hidden = 130;
  std::vector<std::vector<NodeOperation>> whole, some;
  for (Problem p : problems) {
    whole.push_back(nodes.Add(p, 2, 20));
    for (int r = 0; r < o.ranks; r += 3) p.members.reset(r);
    p.members.reset(o.ranks - 1);
    some.push_back(nodes.Add(p, 2, 20));
  }
  auto every = whole;
  every.insert(every.end(), some.begin(), some.end());
  nodes.Start(every);
  for (const auto& pool : {whole, some, whole}) {
    for (const auto& one : pool) {
      const Problem& p = one[0].prepared->problem;
      Expect(one[0].low_latency() == p.low_latency, "other kernels than wanted: " + Name(p));
#ifndef __CUDACC__
      nodes.network->ClearTraffic();
#endif
      nodes.world.Each([&](int rank) { nodes.Launch(one[rank], rank); });
      nodes.Synchronize();
      ExpectSuccess(nodes.world, Name(p));
#ifndef __CUDACC__
      if (o.network && p.members.all()) ExpectTraffic(nodes, o, one);
#endif
    }
  }
  return Text("%zu problems, with all, without every third rank, and with all again", problems.size());
}

// `calls` operations out of `pool` on every rank but those of the bit mask `absent`, with random pauses.
void RunNodes(NodeWorld& nodes, const NodeOptions& o, const std::vector<std::vector<NodeOperation>>& pool,
              int64_t calls, const std::string& what, const Ranks& absent = {}) {
  nodes.world.Each([&](int rank) {
    if (absent[rank]) return;
    std::mt19937 same(o.seed + 7), own(o.seed * 31 + rank);
    const cudaStream_t stream = nodes.world.states[rank].stream[0];
    for (int64_t i = 0; i < calls; ++i) {
      if (own() % 64 == 0) Sleep(stream, 1 + own() % 300);
      nodes.Launch(pool[same() % pool.size()][rank], rank);
      if (i % 64 == 63) NATIVE_CHECK(cudaStreamSynchronize(stream));
    }
    NATIVE_CHECK(cudaStreamSynchronize(stream));
  });
  ExpectSuccess(nodes.world, what);
}

std::string Random(const NodeOptions& o) {
  NodeWorld nodes(o);
  const auto pool = NodePool(nodes, o, 24, 20);
  nodes.Start(pool);
  const double start = Now();
  RunNodes(nodes, o, pool, o.calls, "some of the calls");
  return Text("%lld calls on each of %d ranks, %.1f us each", static_cast<long long>(o.calls), o.ranks,
              (Now() - start) * 1e6 / static_cast<double>(o.calls));
}

// A captured graph repeats the launches with the host's numbers of the first time: the device must keep the counters'
// values.
std::string Graph(const NodeOptions& o) {
  NodeWorld nodes(o);
  const auto pool = NodePool(nodes, o, 9, 20);
  nodes.Start(pool);
  std::vector<cudaGraphExec_t> graphs(o.ranks);
  for (const RankState& state : nodes.world.states) {  // one after the other: nothing runs
    NATIVE_CHECK(cudaSetDevice(state.device));
    cudaGraph_t graph;
    NATIVE_CHECK(cudaStreamBeginCapture(state.stream[0], cudaStreamCaptureModeThreadLocal));
    for (const auto& ranks : pool) nodes.Launch(ranks[state.rank], state.rank);
    NATIVE_CHECK(cudaStreamEndCapture(state.stream[0], &graph));
    NATIVE_CHECK(cudaGraphInstantiate(&graphs[state.rank], graph, 0));
    NATIVE_CHECK(cudaGraphUpload(graphs[state.rank], state.stream[0]));
    NATIVE_CHECK(cudaGraphDestroy(graph));
  }
  nodes.world.Synchronize();
  nodes.world.Each([&](int rank) {
    for (int i = 0; i < 4; ++i) {
      NATIVE_CHECK(cudaGraphLaunch(graphs[rank], nodes.world.states[rank].stream[0]));
      NATIVE_CHECK(cudaStreamSynchronize(nodes.world.states[rank].stream[0]));
    }
  });
  ExpectSuccess(nodes.world, "replayed operations");
  for (cudaGraphExec_t graph : graphs) NATIVE_CHECK(cudaGraphExecDestroy(graph));
  return Text("a graph of %zu operations, 4 times", pool.size());
}

// Inactive ranks: some run the program all the same, and one runs nothing, comes back, and dies.
std::string Members(const NodeOptions& o) {
  const Ranks all = AllOf(o), absent = Only(o.ranks - 1);
  NodeWorld nodes(o);
  std::mt19937 rng(o.seed);
  std::vector<Ranks> any, without;
  for (int i = 0; i < 20; ++i) any.push_back(i < 2 ? all : i == 2 ? Ranks() : SomeOf(rng, o));
  for (int i = 0; i < 20; ++i) without.push_back(i < 4 ? all & ~absent : (SomeOf(rng, o) | Only(0)) & ~absent);
  const auto pool = NodePool(nodes, o, 20, 20, any), rest = NodePool(nodes, o, 20, 20, without);
  const auto whole = NodePool(nodes, o, 10, 20), needs = NodePool(nodes, o, 4, 20, {all});
  std::vector<std::vector<NodeOperation>> every = pool;
  for (const auto& more : {rest, whole, needs}) every.insert(every.end(), more.begin(), more.end());
  nodes.Start(every);
  const int64_t calls = std::max<int64_t>(20, o.calls / 4);
  for (const auto& one : pool) RunNodes(nodes, o, {one}, 1, Name(one[0].prepared->problem));
  RunNodes(nodes, o, pool, calls, "calls with changing members");
  RunNodes(nodes, o, rest, calls, "calls without a rank that calls nothing", absent);
  nodes.Reset();  // it comes back
  RunNodes(nodes, o, whole, calls, "calls of all after reset");
  for (const RankState& state : nodes.world.states) {  // its process ends
    NATIVE_CHECK(cudaMemcpy(state.mailbox->dead, &absent, sizeof(state.mailbox->dead), cudaMemcpyHostToDevice));
  }
  RunNodes(nodes, o, rest, calls, "calls without a dead rank", absent);
  for (const size_t kind : {0, 3}) {  // with the kernels of many tokens, and of few
    const double start = Now();
    nodes.world.Each([&](int rank) {
      if (!absent[rank]) nodes.Launch(needs[kind][rank], rank, true);
    });
    ExpectRight(nodes.world, "a result that needs a dead rank is not poisoned");
    for (int r = 0; r < o.ranks - 1; ++r) {
      const Failure f = UnpackFailure(nodes.world.FailureOf(r));
      Expect(f.cause == Cause::kDead && f.rank == o.ranks - 1,
             Text("rank %d: ", r) + FailureText(nodes.world.FailureOf(r)));
    }
    Expect(nodes.world.FailureOf(o.ranks - 1) == 0, "the dead rank was written to");
    Expect(Now() - start < o.patience, Text("it took %.2f s", Now() - start));
    nodes.Reset();
    for (const RankState& state : nodes.world.states) {
      NATIVE_CHECK(cudaMemcpy(state.mailbox->dead, &absent, sizeof(state.mailbox->dead), cudaMemcpyHostToDevice));
    }
  }
  return Text("%lld calls with changing members, as many without a rank that calls nothing, is back, is dead",
              static_cast<long long>(calls));
}

// More memory between operations, more often than there are tables, and a reset in between, whose old signals no rank
// takes for new ones.
std::string Growth(const NodeOptions& o) {
  NodeWorld nodes(o);
  const auto pool = NodePool(nodes, o, 20, 20);
  std::mt19937 rng(o.seed);
  const std::vector<std::vector<NodeOperation>> hasty = {nodes.Add(NodeProblem(rng, o, 0), 16, 0.2),
                                                         nodes.Add(NodeProblem(rng, o, 0, true), 16, 0.2)};
  std::vector<std::vector<NodeOperation>> known(hasty);
  known.push_back(pool[0]);
  nodes.Start(known);
  RunNodes(nodes, o, {pool[0]}, 6, "the first operations");
  for (int step = 1; step <= kGenerations + 1; ++step) {
    known.insert(known.end(), pool.begin() + 3 * step, pool.begin() + 3 * step + 3);
    nodes.Grow(known);
    const std::vector<std::vector<NodeOperation>> now(known.begin() + (step % 2 ? 2 : 3 * step), known.end());
    RunNodes(nodes, o, now, 12, Text("operations after growth %d", step));
    if (step % 3 != 2) continue;
    nodes.world.Each([&](int rank) {  // a signal too many: the ranks of the other nodes never begin it
      if (rank < o.per_node) nodes.Launch(hasty[step / 3][rank], rank, true);
    });
    nodes.Reset();
    ExpectRight(nodes.world, "results that are not poisoned");
    RunNodes(nodes, o, now, 12, "operations after a reset");
  }
  return Text("%d growths and two resets", kGenerations + 1);
}

// A rank never comes: every rank of every node names it, and no result looks like one that came about.
std::string Absent(const NodeOptions& o) {
  for (int kind = 0; kind < 4; ++kind) {
    NodeWorld nodes(o);
    std::mt19937 rng(o.seed);
    const bool few = kind % 2;
    const Problem p = NodeProblem(rng, o, few ? kind / 2 : kind, few);  // a dispatch, then a combine
    const std::vector<std::vector<NodeOperation>> pool = {nodes.Add(p, 16, 0.4)};
    Expect(pool[0][0].low_latency() == few, "other kernels than wanted");
    nodes.Start(pool);
    nodes.world.Each([&](int rank) { nodes.Launch(pool[0][rank], rank); });
    nodes.world.Synchronize();
    ExpectSuccess(nodes.world, "the operation before");
    const int absent = o.ranks - 1;
    if (kind >= 2) {  // stopped in the middle, while it waited for the other node
      const uint64_t word = PackWaiting(2, Step::kRows, absent - o.per_node);
      NATIVE_CHECK(cudaMemcpy(&nodes.world.states[absent].mailbox->progress, &word, 8, cudaMemcpyHostToDevice));
    }
    const double start = Now();
    nodes.world.Each([&](int rank) {
      for (int i = 0; rank != absent && i < 20; ++i) nodes.Launch(pool[0][rank], rank, true);
    });
    ExpectRight(nodes.world, "results that are not poisoned");
    Expect(Now() - start < 2 * 0.4 * o.patience + 5, Text("20 operations took %.2f s", Now() - start));
    for (int r = 0; r < o.ranks; ++r) {
      const Failure f = UnpackFailure(nodes.world.FailureOf(r));
      if (r == absent) continue;
      Expect(f.cause == Cause::kTimeout && f.rank == absent,
             Text("rank %d: ", r) + FailureText(nodes.world.FailureOf(r)));
    }
  }
  return "dispatch and combine, of many and of few tokens, the last rank named by all others, stopped or not begun";
}

// All ranks of the last node run another operation: only the chunks' headers can show it.
std::string Mismatch(const NodeOptions& o) {
  for (int few = 0; few <= 1; ++few) {
    NodeWorld nodes(o);
    std::mt19937 rng(o.seed);
    Problem p = NodeProblem(rng, o, 0, few), other = p;
    other.site = 7;
    const std::vector<std::vector<NodeOperation>> pool = {nodes.Add(p, 16, 20), nodes.Add(other, 16, 20)};
    nodes.Start(pool);
    const double start = Now();
    nodes.world.Each([&](int rank) { nodes.Launch(pool[rank >= o.ranks - o.per_node][rank], rank, true); });
    ExpectRight(nodes.world, "results that are not poisoned");
    Expect(Now() - start < 10 * o.patience, Text("took %.2f s", Now() - start));
    for (int r = 0; r < o.ranks; ++r) {
      const Failure f = UnpackFailure(nodes.world.FailureOf(r));
      Expect(f.cause == Cause::kMismatch, Text("rank %d: ", r) + FailureText(nodes.world.FailureOf(r)));
    }
  }
  return "named by all, with many tokens and with few";
}

#ifndef __CUDACC__
// All chunks of an operation arrive after those of the next one, though the network keeps all of its promises.
std::string Overtaken(const NodeOptions& o) {
  if (!o.network) return "left out: a link by pointer keeps the order";
  const Ranks all = AllOf(o), absent = Only(o.ranks - 1);
  NodeWorld nodes(o);
  std::vector<std::vector<NodeOperation>> pool = NodePool(nodes, o, 10, 20);
  for (const auto& one : NodePool(nodes, o, 4, 20, {all, all & ~absent})) pool.push_back(one);
  nodes.Start(pool);
  nodes.network->Overtake(10000);
  for (const auto& one : pool) RunNodes(nodes, o, {one}, 6, Name(one[0].prepared->problem));  // equal in pairs
  return Text("%zu problems, 6 times each", pool.size());
}

// While rows of few tokens are on their way an operation in flight keeps one multiprocessor at most, for a warp; a
// whole one keeps all that it has blocks for.
std::string Apart(const NodeOptions& o) {
  if (!o.network) return "left out: a link by pointer holds nothing back";
  NodeWorld nodes(o);
  std::mt19937 rng(o.seed);
  std::vector<std::vector<NodeOperation>> pool;
  for (int kind = 0; kind < 2; ++kind) {  // a dispatch, then a combine
    Problem p = NodeProblem(rng, o, kind, true);
    p.push_blocks = p.slices = 1, p.blocks = Multiprocessors(0) + 2;  // those that receive fill the GPU
    pool.push_back(nodes.Add(p, 32, 20));
  }
  nodes.Start(pool);
  for (const auto& one : pool) RunNodes(nodes, o, {one}, 1, "the operation before");
  const cudaStream_t side = nodes.world.states[0].side;
  for (const auto& one : pool) {
    for (const bool in_flight : {true, false}) {
      const std::string what = (in_flight ? "in flight: " : "whole: ") + Name(one[0].prepared->problem);
      nodes.all_in_flight = in_flight;
      nodes.network->Hold(true);
      nodes.world.Each([&](int rank) { nodes.Launch(one[rank], rank); });
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      NATIVE_CHECK(cudaSetDevice(nodes.world.states[0].device));
      Sleep(side, 1);
      const double start = Now(), limit = in_flight ? o.patience : 0.3;
      while (cudaStreamQuery(side) != cudaSuccess && Now() - start < limit) std::this_thread::yield();
      const bool ran = cudaStreamQuery(side) == cudaSuccess;
      const bool waits = cudaStreamQuery(nodes.world.states[0].stream[0]) == cudaErrorNotReady;
      cudaGetLastError();
      nodes.network->Hold(false);
      nodes.Synchronize();
      ExpectSuccess(nodes.world, what);
      Expect(waits, "it ended without what was held back, " + what);
      Expect(ran == in_flight, std::string(ran ? "another kernel ran beside it, " : "no other kernel ran, ") + what);
    }
  }
  return "a kernel ran beside a dispatch and a combine in flight that waited, and beside whole ones none";
}

// A rank receives its chunks late, and is left out from the next operation on: all other ranks go on, and no rank sends
// it anything further.
std::string Left(const NodeOptions& o) {
  if (!o.network) return "left out: a link by pointer has sent what it was given";
  const Ranks all = AllOf(o), slow = Only(o.ranks - 1);
  NodeWorld nodes(o);
  const auto with = NodePool(nodes, o, 5, 20, {all});
  auto without = NodePool(nodes, o, 20, 20, {all & ~slow});
  auto data_bytes = [](const std::vector<NodeOperation>& one) { return one[0].prepared->needs().data_bytes; };
  std::sort(without.begin(), without.end(),
            [&](const auto& a, const auto& b) { return data_bytes(a) > data_bytes(b); });
  without.resize(8);  // operations that take the most room: they write where the previous ones have sent from
  std::vector<std::vector<NodeOperation>> every = with;
  every.insert(every.end(), without.begin(), without.end());
  nodes.Start(every);
  RunNodes(nodes, o, {with[0]}, 1, "the operation before");
  nodes.network->Delay(o.ranks - 1, 1000);
  for (size_t i = 0; i < with.size(); ++i) {
    nodes.world.Each([&](int rank) {
      nodes.Launch(with[i][rank], rank);
      for (const auto& one : without) nodes.Launch(one[rank], rank);
      NATIVE_CHECK(cudaStreamSynchronize(nodes.world.states[rank].stream[0]));
    });
    nodes.Synchronize();
    ExpectSuccess(nodes.world, Name(with[i][0].prepared->problem));
  }
  return Text("%zu operations, %zu without the slow rank behind each", with.size(), without.size());
}

// Node 1 waits for node 0, which waits for the last node: all name the last one. The chunks that node 0 awaits first
// arrive, but so late that it gives up after node 1 would.
std::string Chain(const NodeOptions& o) {
  if (!o.network) return "left out: a link by pointer cannot be cut";
  Expect(o.ranks >= 3 * o.per_node, "it takes three nodes");
  const double seconds = 0.4;
  for (int few = 0; few <= 1; ++few) {
    NodeWorld nodes(o);
    std::mt19937 rng(o.seed);
    Problem p = NodeProblem(rng, o, 0, few);
    p.tokens = std::max(p.tokens, 8);
    const std::vector<std::vector<NodeOperation>> pool = {nodes.Add(p, 7, seconds)};
    Expect(pool[0][0].low_latency() == few, "other kernels than wanted");
    nodes.Start(pool);
    RunNodes(nodes, o, pool, 1, "the operation before");
    const int culprit = o.ranks - o.per_node;  // and all of its node
    nodes.network->Starve(culprit, 0, static_cast<int>(0.7 * seconds * o.patience * 1000));
    nodes.world.Each([&](int rank) {
      const bool starved = rank < (few ? 1 : o.per_node);  // few tokens come straight to the other ranks of its node
      for (int i = 0; i < (rank < culprit ? 5 : 1); ++i) nodes.Launch(pool[0][rank], rank, starved || i > 0);
    });
    nodes.world.Synchronize();
    ExpectRight(nodes.world, "results that are not poisoned");
    for (int r = 0; r < culprit; ++r) {
      const Failure f = UnpackFailure(nodes.world.FailureOf(r));
      Expect(f.cause == Cause::kTimeout && f.rank >= culprit,
             Text("rank %d: ", r) + FailureText(nodes.world.FailureOf(r)));
    }
  }
  return "all named the last node, with many tokens and with few";
}

// The network no longer carries anything from or to a rank. Both ends of an exchange are late for each other: the
// rank's rail, and with few tokens all ranks of the other nodes.
std::string Dead(const NodeOptions& o) {
  if (!o.network) return "left out: a link by pointer cannot be cut";
  for (int few = 0; few <= 1; ++few) {
    NodeWorld nodes(o);
    std::mt19937 rng(o.seed);
    const std::vector<std::vector<NodeOperation>> pool = {nodes.Add(NodeProblem(rng, o, 0, few), 16, 0.4)};
    nodes.Start(pool);
    const int dead = o.ranks - 1;
    nodes.world.Each([&](int rank) { nodes.Launch(pool[0][rank], rank); });
    nodes.world.Synchronize();
    ExpectNoFailure(nodes.world);  // they have met: it is not that, which fails
    ExpectRight(nodes.world, "the operation before");
    nodes.network->Kill(dead);
    nodes.world.Each([&](int rank) {
      // With few tokens those of its node still have all that the first one needs.
      const bool whole = few && rank != dead && rank / o.per_node == dead / o.per_node;
      for (int i = 0; i < 5; ++i) nodes.Launch(pool[0][rank], rank, !whole || i > 0);
    });
    nodes.world.Synchronize();
    ExpectRight(nodes.world, "results that are not poisoned");
    for (int r = 0; r < o.ranks; ++r) {
      const Failure f = UnpackFailure(nodes.world.FailureOf(r));
      const bool end =
          few ? f.rank == dead || f.rank / o.per_node != dead / o.per_node : f.rank % o.per_node == dead % o.per_node;
      Expect(f.cause == Cause::kTimeout && end, Text("rank %d: ", r) + FailureText(nodes.world.FailureOf(r)));
    }
  }
  return "all gave up, naming an end of what no longer came through, with many tokens and with few";
}
#endif

struct NodeScenario {
  const char* name;
  std::string (*run)(const NodeOptions&);
};
const NodeScenario kScenarios[] = {
    {"normal", Normal},     {"random", Random},       {"graph", Graph},   {"absent", Absent}, {"many", Many},
    {"mismatch", Mismatch}, {"members", Members},     {"growth", Growth},
#ifndef __CUDACC__
    {"dead", Dead},         {"overtaken", Overtaken}, {"left", Left},     {"apart", Apart},   {"chain", Chain},
#endif
};

int Refuse(const char* what) {
  std::fprintf(stderr, "nodes: %s\n", what);
  return 2;
}

}  // namespace
}  // namespace native

int main(int argc, char** argv) {
  using namespace native;
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  NodeOptions o;
  o.calls = 300;
  std::string wanted = "all";
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--ranks") {
      o.ranks = std::atoi(argv[i + 1]);
    } else if (name == "--per-node") {
      o.per_node = std::atoi(argv[i + 1]);
    } else if (name == "--gpus") {
      o.gpus = std::atoi(argv[i + 1]);
    } else if (name == "--link") {
      o.network = value == "network";
      if (!o.network && value != "peer") return Refuse("--link: peer or network");
    } else if (name == "--scenario") {
      wanted = value;
    } else if (name == "--calls") {
      o.calls = std::atoll(argv[i + 1]);
    } else if (name == "--seed") {
      o.seed = static_cast<uint32_t>(std::atoll(argv[i + 1]));
    } else if (name == "--patience") {
      o.patience = std::atof(argv[i + 1]);
    } else if (name == "--broken") {  // rules that the network does not keep: network.h
      o.broken = static_cast<uint32_t>(std::atoi(argv[i + 1]));
    } else {
      return Refuse(("unknown option " + name).c_str());
    }
  }
  if (argc % 2 == 0) return Refuse("options come as pairs");
  if (o.ranks < 2 || o.ranks > kRanks || o.per_node < 1 || o.ranks % o.per_node) return Refuse("--ranks, --per-node");
#ifdef __CUDACC__
  if (o.network) return Refuse("--link network: on the emulator alone");
#endif
  bool passed = true, found = false;
  for (const NodeScenario& scenario : kScenarios) {
    if (wanted != "all" && wanted != scenario.name) continue;
    found = true;
    std::string text;
    bool good = true;
    const double start = Now();
    try {
      text = scenario.run(o);
    } catch (const std::exception& e) {
      good = false;
      text = e.what();
    }
    std::printf("%-12s %-6s %7.2f s  %s\n", scenario.name, good ? "passed" : "FAILED", Now() - start, text.c_str());
    std::fflush(stdout);
    passed &= good;
  }
  if (!found) return Refuse(("unknown scenario " + wanted).c_str());
  return passed ? 0 : 1;
}
