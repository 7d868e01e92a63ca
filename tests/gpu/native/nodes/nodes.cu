// The kernels across nodes, with several virtual nodes in one process and without JAX.
//   nodes --ranks R --per-node G --gpus N --link peer|network --scenario NAME|all --calls N --seed S --patience F
// `peer` reaches the other nodes by pointer, on GPUs too; `network` goes over network.h, on the emulator alone. One
// line per scenario. Exit status 0: all passed.
#include <algorithm>
#include <cstdlib>
#include <string>

#include "cuda_kernels/peer_transport.cuh"
#include "tests/gpu/native/nodes/node_operations.cuh"
#ifndef __CUDACC__
#include "tests/gpu/native/nodes/network_link.cuh"
#endif

namespace native {
namespace {

// A world whose ranks have no pointers to those of other nodes, but for what the link is given.
class NodeWorld {
 public:
  explicit NodeWorld(const NodeOptions& options) : world(options.ranks, options.gpus), options_(options) {
    for (const RankState& state : world.states) {
      NATIVE_CHECK(cudaSetDevice(state.device));
      expected_.push_back(Words(kRailSignals));
      counters_.push_back(Words(kRailSignals));
      tables_.push_back(reinterpret_cast<PeerTable*>(Words(sizeof(PeerTable) / 8)));
      if (state.rank < options.gpus) Preload<PeerLink>();
    }
#ifndef __CUDACC__
    Faults faults;
    faults.seed = options.seed, faults.broken = options.broken;
    faults.reorder = faults.duplicate = true, faults.most_delay_us = 100;
    network = std::make_unique<Network>(options.ranks, options.per_node, kRailSignals, faults);
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
  std::vector<NodeOperation> Add(const Problem& problem, int chunk_tokens, double timeout_s) {
    std::vector<NodeOperation> out;
    for (Prepared* prepared : world.AddAll(problem, timeout_s * options_.patience)) {
      NodeOperation o;
      o.prepared = prepared;
      o.Plan(chunk_tokens, expected_[out.size()]);
      out.push_back(o);
    }
    return out;
  }
  // Makes the memory for the operations of `pool`, and takes away the pointers to other nodes.
  void Start(const std::vector<std::vector<NodeOperation>>& pool) {
    std::vector<std::vector<Prepared*>> all;
    for (const auto& ranks : pool) all.push_back({ranks[0].prepared});
    world.Start(Largest(all));
    std::vector<Control> controls(world.ranks());
    for (const RankState& state : world.states) {
      NATIVE_CHECK(cudaMemcpy(&controls[state.rank], state.control, sizeof(Control), cudaMemcpyDeviceToHost));
    }
    for (const RankState& state : world.states) {
      Control& control = controls[state.rank];
      PeerTable table{};
      for (int r = 0; r < world.ranks(); ++r) {
        for (int g = 0; g < kGenerations; ++g) table.staging[g][r] = control.memory[g].staging[r];
        table.counters[r] = counters_[r], table.mailbox[r] = world.states[r].mailbox;
#ifndef __CUDACC__
        const MemoryTable& memory = control.current;
        network->Register(memory.generation, r, memory.staging[r], 2 * (memory.flag_bytes + memory.data_bytes));
        network->RegisterFailure(r, &world.states[r].mailbox->failure);
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
  void Launch(const NodeOperation& o, int rank, bool poisoned = false) {
    const cudaStream_t stream = world.states[rank].stream[0];
#ifndef __CUDACC__
    if (options_.network) {
      NATIVE_CHECK(LaunchOne(o, NetworkLink{network.get(), rank}, stream));
      return o.prepared->Verify(stream, poisoned);
    }
#endif
    NATIVE_CHECK(LaunchOne(o, PeerLink{tables_[rank], rank}, stream));
    o.prepared->Verify(stream, poisoned);
  }

  World world;
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
  NodeOptions options_;
  std::vector<char*> own_;
  std::vector<uint64_t*> expected_, counters_;
  std::vector<PeerTable*> tables_;
};

std::vector<std::vector<NodeOperation>> NodePool(NodeWorld& nodes, const NodeOptions& o, int count, double timeout_s) {
  std::mt19937 rng(o.seed);
  std::vector<std::vector<NodeOperation>> pool;
  for (int i = 0; i < count; ++i) {
    const Problem p = NodeProblem(rng, o, i);
    const int sizes[] = {1, 7, 16, 32};
    pool.push_back(nodes.Add(p, sizes[rng() % 4], timeout_s));
  }
  return pool;
}

#ifndef __CUDACC__
// What one operation put on the slow link is what had to go there, and nothing else.
void ExpectTraffic(NodeWorld& nodes, const NodeOptions& o, const std::vector<NodeOperation>& operation) {
  std::vector<std::vector<int>> topk;
  for (const NodeOperation& one : operation) topk.push_back(one.Experts());
  for (int s = 0; s < o.ranks; ++s) {
    for (int t = 0; t < o.ranks; ++t) {
      const Problem& p = operation[0].prepared->problem;
      const uint64_t went = nodes.network->Between(s, t).bytes;
      const uint64_t wanted = BytesBetween(p, operation[0].rails.plan.chunk_tokens, topk, s, t);
      Expect(went == wanted, Text("rank %d sent rank %d %d bytes instead of %d: ", s, t, static_cast<int>(went),
                                  static_cast<int>(wanted)) +
                                 Name(p));
    }
  }
}
#endif

std::string Normal(const NodeOptions& o) {
  NodeWorld nodes(o);
  const auto pool = NodePool(nodes, o, 20, 10);
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
    ExpectNoFailure(nodes.world);
    ExpectRight(nodes.world, Name(ranks[0].prepared->problem));
  }
  return Text("%zu problems, each twice", pool.size());
}

std::string Random(const NodeOptions& o) {
  NodeWorld nodes(o);
  const auto pool = NodePool(nodes, o, 24, 20);
  nodes.Start(pool);
  const double start = Now();
  nodes.world.Each([&](int rank) {
    std::mt19937 same(o.seed + 7), own(o.seed * 31 + rank);
    const cudaStream_t stream = nodes.world.states[rank].stream[0];
    for (int64_t i = 0; i < o.calls; ++i) {
      if (own() % 64 == 0) Sleep(stream, 1 + own() % 300);
      nodes.Launch(pool[same() % pool.size()][rank], rank);
      if (i % 64 == 63) NATIVE_CHECK(cudaStreamSynchronize(stream));
    }
    NATIVE_CHECK(cudaStreamSynchronize(stream));
  });
  ExpectNoFailure(nodes.world);
  ExpectRight(nodes.world, "some of the calls");
  return Text("%lld calls on each of %d ranks, %.1f us each", static_cast<long long>(o.calls), o.ranks,
              (Now() - start) * 1e6 / static_cast<double>(o.calls));
}

// A captured graph repeats the launches with the host's numbers of the first time: what counters stand at must be kept
// on the device.
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
  ExpectNoFailure(nodes.world);
  ExpectRight(nodes.world, "replayed operations");
  for (cudaGraphExec_t graph : graphs) NATIVE_CHECK(cudaGraphExecDestroy(graph));
  return Text("a graph of %zu operations, 4 times", pool.size());
}

// A rank never comes: every rank of every node names it, and no result looks like one that came about.
std::string Absent(const NodeOptions& o) {
  std::string names;
  for (int kind = 0; kind < 3; kind += 2) {
    NodeWorld nodes(o);
    std::mt19937 rng(o.seed);
    const std::vector<std::vector<NodeOperation>> pool = {nodes.Add(NodeProblem(rng, o, kind), 16, 0.4)};
    nodes.Start(pool);
    nodes.world.Each([&](int rank) { nodes.Launch(pool[0][rank], rank); });
    nodes.world.Synchronize();
    ExpectNoFailure(nodes.world);
    ExpectRight(nodes.world, "the operation before");
    const int absent = o.ranks - 1;
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
  return "dispatch and combine, the last rank named by all others";
}

// All ranks of the last node run another operation: only what the chunks say can show it.
std::string Mismatch(const NodeOptions& o) {
  NodeWorld nodes(o);
  std::mt19937 rng(o.seed);
  Problem p = NodeProblem(rng, o, 0), other = p;
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
  return "named by all";
}

#ifndef __CUDACC__
// The network no longer carries anything from or to a rank. Both ends of its rail are late for each other.
std::string Dead(const NodeOptions& o) {
  if (!o.network) return "left out: a link by pointer cannot be cut";
  NodeWorld nodes(o);
  std::mt19937 rng(o.seed);
  const std::vector<std::vector<NodeOperation>> pool = {nodes.Add(NodeProblem(rng, o, 0), 16, 0.4)};
  nodes.Start(pool);
  const int dead = o.ranks - 1;
  nodes.network->Kill(dead);
  nodes.world.Each([&](int rank) {
    for (int i = 0; i < 5; ++i) nodes.Launch(pool[0][rank], rank, true);
  });
  ExpectRight(nodes.world, "results that are not poisoned");
  for (int r = 0; r < o.ranks; ++r) {
    const Failure f = UnpackFailure(nodes.world.FailureOf(r));
    const bool end = f.rank % o.per_node == dead % o.per_node;
    Expect(f.cause == Cause::kTimeout && end, Text("rank %d: ", r) + FailureText(nodes.world.FailureOf(r)));
  }
  return "all gave up, naming an end of its rail";
}
#endif

struct NodeScenario {
  const char* name;
  std::string (*run)(const NodeOptions&);
};
const NodeScenario kScenarios[] = {{"normal", Normal}, {"random", Random},     {"graph", Graph},
                                   {"absent", Absent}, {"mismatch", Mismatch},
#ifndef __CUDACC__
                                   {"dead", Dead}
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
