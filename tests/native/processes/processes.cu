// The kernels across nodes with one process per rank: stores by pointer inside a virtual node and NCCL's puts between
// them, over the network of tcp_rma.h. Without JAX.
//   processes --nccl libnccl.so.2 --plugin libxen_moe_tcp_rma.so --ranks R --per-node G --gpus N --scenario NAME|all
//             --faults LIST --calls N --seed S --patience F --limit SECONDS --log FOLDER
// Ranks share a GPU where there are fewer GPUs than ranks. `--faults`: XEN_MOE_RMA of tcp_rma.h. `--log`: NCCL's own
// words, a file for each rank. Each scenario has processes of its own. On the nodes of a cluster, without --plugin and
// with --rank r --address HOST:PORT of rank 0, it is one rank of one scenario, over NCCL's own network. One line per
// scenario. Exit status 0: all passed.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "ffi/devices.h"
#include "tests/native/processes/process_world.h"

namespace native {
namespace {

// Operations of many tokens and of few beside each other.
std::vector<ProcessOperation> Pool(ProcessWorld& world, const ProcessOptions& o, int count, double timeout_s) {
  std::mt19937 rng(o.seed);
  std::vector<ProcessOperation> pool;
  for (int i = 0; i < count; ++i) {
    const bool few = i % 5 > 2;
    const Problem p = NodeProblem(rng, o, few ? i / 5 * 2 + i % 5 - 3 : i / 5 * 3 + i % 5, few);
    const int sizes[] = {few ? 3 : 1, 7, 16, 32};
    pool.push_back(world.Add(p, sizes[rng() % 4], std::min(timeout_s, o.limit_s / 4)));
  }
  return pool;
}
void ExpectGood(ProcessWorld& world, const std::string& what) {
  const uint32_t wrong = world.Wrong();
  Expect(world.Failure() == 0, what + ": " + FailureText(world.Failure()));
  Expect(wrong == 0, Text("%u wrong vectors: ", wrong) + what);
}

// A put with a signal to the rank of this place on each other node, as the kernels do it, with no kernel around it.
__global__ void ProbeKernel(NcclLink link, char* staging, int per_node, uint64_t limit_ns, uint64_t* result) {
  const int rank = link.comm.rank, ranks = link.comm.nRanks, node = rank / per_node;
  uint64_t* const words = reinterpret_cast<uint64_t*>(staging);
  for (int other = rank % per_node; other < ranks; other += per_node) {
    if (other == rank) continue;
    uint64_t* const own = words + 2 * other;
    own[0] = 1000 + rank, own[1] = other;
    __threadfence_system();
    if (!link.Reserve(other)) result[0] = 1;
    link.PutSignal(1, other, 1024 + 16 * rank, 16 * other, 16, ChunkSignals(kSmallGroup) + node * kMaxChunks);
  }
  uint64_t start = NowNs();
  for (int other = rank % per_node; other < ranks; other += per_node) {
    if (other == rank) continue;
    while (link.Count(ChunkSignals(kSmallGroup) + other / per_node * kMaxChunks) < 1) {
      if (NowNs() - start > limit_ns) {
        result[0] = 2, result[1] = other;
        return;
      }
    }
    const uint64_t* const came = words + 128 + 2 * other;
    if (LoadRelaxedSystem(came) != static_cast<uint64_t>(1000 + other)) result[0] = 3, result[1] = other;
    if (LoadRelaxedSystem(came + 1) != static_cast<uint64_t>(rank)) result[0] = 4, result[1] = other;
  }
  result[2] = NowNs() - start;
  start = NowNs();
  while (link.Pending() >= 0) {
    if (NowNs() - start > limit_ns) {
      result[0] = 5, result[1] = link.Pending();
      return;
    }
  }
}

// NCCL starts, and one put reaches every other node.
std::string Start(const ProcessOptions& o, ProcessWorld& world) {
  Pool(world, o, 1, 10);
  world.Start();
  uint64_t* result = nullptr;
  NATIVE_CHECK(cudaHostAlloc(&result, 64, cudaHostAllocMapped | cudaHostAllocPortable));
  std::memset(result, 0, 64);
  ProbeKernel<<<1, 1, 0, world.state.stream[0]>>>(world.link, world.staging(), o.per_node, 5000000000ull, result);
  NATIVE_CHECK(cudaGetLastError());
  world.Synchronize();
  static const char* const what[] = {"",           "no room", "no signal from", "wrong data from", "wrong data from",
                                     "never done:"};
  Expect(result[0] == 0, Text("rank %d: %s rank %d", o.rank, what[result[0] % 6], static_cast<int>(result[1])));
  world.AllGather();
  return world.started() + Text("; a put and its signal after %.0f us", result[2] * 1e-3);
}

// Runs every kind of operation in every layout and others at random, each twice; checks the bytes on the network.
std::string RunNormal(const ProcessOptions& o, ProcessWorld& world, const std::vector<ProcessOperation>& pool) {
  uint64_t bytes = 0;
  int few = 0;
  bool first = true;
  for (const ProcessOperation& one : pool) {
    few += one.operation.low_latency();
    for (int repeat = 0; repeat < 2; ++repeat) {
      std::vector<RmaTraffic> before;
      for (int t = 0; t < o.ranks; ++t) before.push_back(world.Sent(t));
      world.AllGather();
      world.Launch(one);
      world.Synchronize();
      world.AllGather();
      ExpectGood(world, Name(one.problem()));
      for (int t = 0; t < o.ranks; ++t) {
        if (!world.counts()) break;
        const uint64_t went = world.Sent(t).bytes - before[t].bytes;
        uint64_t wanted = BytesBetween(one.problem(), one.operation.low_latency(), one.experts, o.rank, t);
        // In the first one the ranks meet: a put without a payload takes a word along (nccl_transport.cuh).
        if (first && t / o.per_node != o.rank / o.per_node) wanted += sizeof(Mailbox::unread);
        Expect(went == wanted, Text("rank %d sent rank %d %d bytes instead of %d: ", o.rank, t, static_cast<int>(went),
                                    static_cast<int>(wanted)) +
                                   Name(one.problem()));
        bytes += went;
      }
      first = false;
    }
  }
  return Text("%zu problems, %d of few tokens, each twice; ", pool.size(), few) +
         (world.counts() ? Text("%llu bytes from this rank to other nodes, as many as must", bytes + 0ull)
                         : "bytes not counted: NCCL's own network");
}

std::string RunRandom(const ProcessOptions& o, ProcessWorld& world, const std::vector<ProcessOperation>& pool) {
  std::mt19937 same(o.seed + 7), own(o.seed * 31 + o.rank);
  const double start = Now();
  for (int64_t i = 0; i < o.calls; ++i) {
    if (own() % 64 == 0) Sleep(world.state.stream[0], 1 + own() % 300);
    world.Launch(pool[same() % pool.size()]);
    if (i % 64 == 63) world.Synchronize();
  }
  ExpectGood(world, "some of the calls");
  const double took = Now() - start;
  world.AllGather();
  return Text("%lld calls on each of %d ranks, %.1f us each", static_cast<long long>(o.calls), o.ranks,
              took * 1e6 / static_cast<double>(o.calls));
}

// The device must keep the counters' values: a graph repeats the host's numbers.
std::string RunGraph(const ProcessOptions&, ProcessWorld& world, const std::vector<ProcessOperation>& pool) {
  const cudaStream_t stream = world.state.stream[0];
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  NATIVE_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  const size_t count = std::min<size_t>(9, pool.size());
  for (size_t i = 0; i < count; ++i) world.Launch(pool[i]);
  NATIVE_CHECK(cudaStreamEndCapture(stream, &graph));
  NATIVE_CHECK(cudaGraphInstantiate(&replay, graph, 0));
  NATIVE_CHECK(cudaGraphUpload(replay, stream));
  world.Synchronize();
  world.AllGather();
  for (int i = 0; i < 4; ++i) {
    NATIVE_CHECK(cudaGraphLaunch(replay, stream));
    NATIVE_CHECK(cudaStreamSynchronize(stream));
  }
  ExpectGood(world, "replayed operations");
  world.AllGather();
  return Text("a graph of %zu operations, 4 times", count);
}

using RunPool = std::string (*)(const ProcessOptions&, ProcessWorld&, const std::vector<ProcessOperation>&);
template <RunPool... kRun>
std::string OnPool(const ProcessOptions& o, ProcessWorld& world) {
  const auto pool = Pool(world, o, 20, 20);
  world.Start();
  std::string text;
  ((text += (text.empty() ? "" : "; ") + kRun(o, world, pool)), ...);
  return text;
}

// All other ranks name `culprit` for a time-out, or an end of its rail, and no result looks like one that came about.
void ExpectNamed(ProcessWorld& world, const ProcessOptions& o, int culprit, bool rail) {
  const uint32_t wrong = world.Wrong();
  const Failure f = UnpackFailure(world.Failure());
  Expect(world.Failure() != 0, Text("rank %d does not know of the failure", o.rank));
  const bool named = rail ? f.rank % o.per_node == culprit % o.per_node : f.rank == culprit;
  Expect(f.cause == Cause::kTimeout && named, Text("rank %d: ", o.rank) + FailureText(world.Failure()));
  Expect(wrong == 0, Text("%u vectors of failed results that are not poisoned", wrong));
}

// Starts with one operation of all ranks, which must be good.
void StartWell(ProcessWorld& world, const ProcessOperation& one) {
  world.Start();
  world.Launch(one);
  ExpectGood(world, "the operation before");
  world.AllGather();
}

// Number of ranks of other nodes whose awaited rank this process knows.
uint64_t HeardOfRanks(const ProcessWorld& world, const ProcessOptions& o) {
  uint64_t told[kMaxRanks], heard = 0;
  NATIVE_CHECK(cudaMemcpy(told, world.state.mailbox->told, sizeof(told), cudaMemcpyDeviceToHost));
  for (int r = 0; r < o.ranks; ++r) heard += r / o.per_node != o.rank / o.per_node && ProgressWaits(told[r]);
  return heard;
}

// The last rank never comes. Those that wait for it tell other nodes so.
std::string Absent(const ProcessOptions& o, ProcessWorld& world) {
  std::mt19937 rng(o.seed);
  const ProcessOperation one = world.Add(NodeProblem(rng, o, 0), 16, 0.4);
  StartWell(world, one);
  const double start = Now();
  if (o.rank != o.ranks - 1) {
    for (int i = 0; i < 20; ++i) world.Launch(one, true);
    ExpectNamed(world, o, o.ranks - 1, false);
  }
  const double took = Now() - start;
  Expect(took < 2 * 0.4 * o.patience + 5, Text("20 operations took %.2f s", took));
  uint64_t heard = 0;
  for (const uint64_t of_rank : world.AllGather(HeardOfRanks(world, o))) heard += of_rank;
  // With two ranks, one rank is left, which has no rank to tell.
  Expect(heard > 0 || o.ranks == 2, "no rank was told for which rank other ranks wait");
  return Text("the last rank named by all others after %.2f s; ranks of which another node heard that they waited: %d",
              took, static_cast<int>(heard));
}

// The last node runs another operation: only the chunks' headers can show it.
std::string Mismatch(const ProcessOptions& o, ProcessWorld& world) {
  std::mt19937 rng(o.seed);
  const Problem p = NodeProblem(rng, o, 0);
  Problem other = p;
  other.site = 7;
  const ProcessOperation here = world.Add(p, 16, 20), there = world.Add(other, 16, 20);
  world.Start();
  const double start = Now();
  world.Launch(o.rank >= o.ranks - o.per_node ? there : here, true);
  const uint32_t wrong = world.Wrong();
  const Failure f = UnpackFailure(world.Failure());
  Expect(f.cause == Cause::kMismatch, Text("rank %d: ", o.rank) + FailureText(world.Failure()));
  Expect(wrong == 0, "results that are not poisoned");
  Expect(Now() - start < 10 * o.patience, Text("took %.2f s", Now() - start));
  world.AllGather();
  return "named by all";
}

// Nothing comes from or to the last rank any more: both ends of its rail are late for each other.
std::string Cut(const ProcessOptions& o, ProcessWorld& world) {
  if (!world.counts()) return "left out: NCCL's own network cannot be cut";
  std::mt19937 rng(o.seed);
  const ProcessOperation one = world.Add(NodeProblem(rng, o, 0), 16, 0.4);
  StartWell(world, one);
  if (o.rank == o.ranks - 1) world.Cut();
  world.AllGather();
  const double start = Now();
  for (int i = 0; i < 100; ++i) world.Launch(one, true);
  ExpectNamed(world, o, o.ranks - 1, true);
  const double took = Now() - start;
  world.AllGather();
  return Text("all gave up, naming an end of its rail, after %.2f s", took);
}

// The process of the last rank is killed in the middle of its operations.
std::string Killed(const ProcessOptions& o, ProcessWorld& world) {
  std::mt19937 rng(o.seed);
  const ProcessOperation one = world.Add(NodeProblem(rng, o, 0), 16, 1);
  StartWell(world, one);
  const int victim = o.ranks - 1;
  if (o.rank == victim) {
    for (int i = 0; i < 5; ++i) world.Launch(one);
    kill(getpid(), SIGKILL);
  }
  const double start = Now();
  for (int i = 0; i < 20; ++i) world.LaunchUnchecked(one);
  world.Synchronize();
  const double took = Now() - start;
  const Failure f = UnpackFailure(world.Failure());
  Expect(f.cause == Cause::kTimeout && f.rank == victim, Text("rank %d: ", o.rank) + FailureText(world.Failure()));
  Expect(took < 2 * 1.5 * o.patience + 5, Text("it took %.2f s", took));
  return Text("named by all others after %.2f s", took);
}

// Bytes a second of a network that `--faults` makes slow, or 0.
double RateOf(const ProcessOptions& o) {
  const size_t at = o.faults.find("bytes_per_s=");
  return at == std::string::npos ? 0 : std::atof(o.faults.c_str() + at + 12);
}
// Operations of realistic sizes over a slow network, which hides all other work.
std::string Throttled(const ProcessOptions& o, ProcessWorld& world) {
  const double rate = RateOf(o);
  if (rate <= 0) return "left out: the network is not slow (--faults bytes_per_s=...)";
  std::string text;
  std::vector<ProcessOperation> pool;
  for (const Operation operation : {Operation::kDispatch, Operation::kCombine}) {
    Problem p;
    p.operation = operation, p.element = Element::kBf16, p.ranks = o.ranks, p.ranks_per_node = o.per_node;
    p.tokens = 256, p.top_k = 4, p.experts = 8 * o.ranks, p.hidden = 7168;
    p.capacity = o.ranks * p.tokens * std::min(p.top_k, p.local_experts());
    p.blocks = 24, p.push_blocks = 12, p.slices = 4, p.segment_tokens = 40, p.seed = o.seed;
    pool.push_back(world.Add(p, 32, 20));
  }
  world.Start();
  bool slow = false;
  for (const ProcessOperation& one : pool) {
    const Problem& p = one.problem();
    double best = 1e9;
    uint64_t bytes = 0, rows = 0;
    for (int t = 0; t < o.ranks; ++t) {
      const uint64_t there = BytesBetween(p, one.operation.low_latency(), one.experts, o.rank, t);
      bytes += there, rows += there / (p.hidden * 2);
    }
    for (int repeat = 0; repeat < 3; ++repeat) {
      world.AllGather();
      const double start = Now();
      world.Launch(one);
      world.Synchronize();
      const std::vector<uint64_t> took = world.AllGather(static_cast<uint64_t>(1e9 * (Now() - start)));
      best = std::min(best, 1e-9 * *std::max_element(took.begin(), took.end()));
      ExpectGood(world, Name(p));
    }
    // The rank that has most to send sets the pace.
    const std::vector<uint64_t> all = world.AllGather(bytes);
    const uint64_t most = *std::max_element(all.begin(), all.end());
    const double ratio = best / (most / rate);
    slow |= ratio > 1.15;
    text +=
        Text("%s%s: %.1f ms for %.2f MB of the busiest rank at %.0f MB/s, %.3f of the link's time; %.4f of the rows",
             text.empty() ? "" : "; ", p.operation == Operation::kDispatch ? "dispatch" : "combine", best * 1e3,
             most * 1e-6, rate * 1e-6, ratio, static_cast<double>(bytes) / (rows * p.hidden * 2.0));
  }
  Expect(!slow, text);
  return text;
}

struct ProcessScenario {
  const char* name;
  std::string (*run)(const ProcessOptions&, ProcessWorld&);
  bool kills = false;  // the last rank
};
const ProcessScenario kScenarios[] = {{"start", Start},
                                      {"normal", OnPool<RunNormal>},
                                      {"graph", OnPool<RunGraph>},
                                      {"random", OnPool<RunRandom>},
                                      {"together", OnPool<RunNormal, RunGraph, RunRandom>},
                                      {"absent", Absent},
                                      {"mismatch", Mismatch},
                                      {"cut", Cut},
                                      {"killed", Killed, true},
                                      {"throttled", Throttled}};

// Runs one rank's part. Returns true if it passed, and its report.
bool RunRank(const ProcessScenario& scenario, const ProcessOptions& o, Rendezvous* rendezvous, std::string* text) {
  try {
    auto* const world = new ProcessWorld(o, rendezvous);  // stays: others may use its memory until the process ends
    *text = scenario.run(o, *world);
    return true;
  } catch (const MemoryError& e) {
    *text = e.message;
  } catch (const std::exception& e) {
    *text = e.what();
  }
  return false;
}
void Print(const char* scenario, bool passed, double took, const std::string& text) {
  std::printf("%-12s %-6s %7.2f s  %s\n", scenario, passed ? "passed" : "FAILED", took, text.c_str());
  std::fflush(stdout);
}

// A child. Never returns: the exit handlers of CUDA and NCCL may wait for other processes.
[[noreturn]] void Child(const ProcessScenario& scenario, const ProcessOptions& o, Shared* shared) {
  Shared::Report& report = shared->reports[o.rank];
  const std::unique_ptr<Rendezvous> rendezvous = RendezvousInMemory(shared, o.rank, o.ranks);
  std::string text;
  report.passed = RunRank(scenario, o, rendezvous.get(), &text);
  std::snprintf(report.text, sizeof(report.text), "%s", text.c_str());
  report.finished = 1;
  if (!report.passed) shared->ended = 1;
  while (!shared->ended) usleep(1000);  // other ranks may still read this rank's memory
  _exit(report.passed ? 0 : 1);
}

// All ranks, on this host.
bool RunAll(const ProcessScenario& scenario, ProcessOptions o) {
  void* const memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  Expect(memory != MAP_FAILED, "no shared memory");
  Shared* const shared = new (memory) Shared{};
  const double start = Now();
  std::vector<pid_t> processes;
  for (o.rank = 0; o.rank < o.ranks; ++o.rank) {
    const pid_t process = fork();
    if (process == 0) Child(scenario, o, shared);
    processes.push_back(process);
  }
  std::vector<int> status(processes.size(), -1);
  std::vector<bool> gone(processes.size());
  auto victim = [&](int r) { return scenario.kills && r == o.ranks - 1; };
  auto finished = [&] {
    bool all = true;
    for (int r = 0; r < o.ranks; ++r) {
      if (!gone[r] && waitpid(processes[r], &status[r], WNOHANG) == processes[r]) {
        gone[r] = true;
        if (!shared->reports[r].finished && !victim(r)) shared->ended = 1;  // no rank waits for it
      }
      all &= gone[r] || shared->reports[r].finished == 1;
    }
    return all;
  };
  bool in_time = false;
  while (!(in_time = finished()) && Now() - start < o.limit_s) usleep(2000);
  const double took = Now() - start;
  shared->ended = 1;
  auto all_gone = [&] { return std::all_of(gone.begin(), gone.end(), [](bool b) { return b; }); };
  for (const double until = Now() + 2; in_time && Now() < until && !all_gone(); finished()) usleep(2000);
  std::string failed;
  for (int r = 0; r < o.ranks; ++r) {
    const Shared::Report& report = shared->reports[r];
    const bool killed = gone[r] && WIFSIGNALED(status[r]) && WTERMSIG(status[r]) == SIGKILL;
    if (victim(r) ? !killed : !report.passed) {
      failed += Text(" [rank %d: ", r);
      failed += report.finished ? "" : gone[r] ? Text("it ended with status %d at: ", status[r]) : "no answer at: ";
      failed += report.text;
      failed += "]";
    }
    if (gone[r]) continue;
    kill(processes[r], SIGKILL);
    waitpid(processes[r], &status[r], 0);
  }
  Print(scenario.name, failed.empty(), took, failed.empty() ? shared->reports[0].text : failed);
  munmap(memory, sizeof(Shared));
  return failed.empty();
}

// Runs this rank alone: the other ranks were started beside it, here or on other hosts.
[[noreturn]] void RunOne(const ProcessScenario& scenario, const ProcessOptions& o) {
  const double start = Now();
  std::string text;
  bool passed = false;
  try {
    const std::unique_ptr<Rendezvous> rendezvous = RendezvousOverTcp(o.address, o.rank, o.ranks, o.limit_s);
    passed = RunRank(scenario, o, rendezvous.get(), &text);
    if (passed && !scenario.kills)
      rendezvous->AllGather(0, o.limit_s);  // other ranks may still read this rank's memory
  } catch (const std::exception& e) {
    passed = false;
    text = e.what();
  }
  if (o.rank == 0 || !passed) Print(scenario.name, passed, Now() - start, Text("[rank %d] ", o.rank) + text);
  _exit(passed ? 0 : 1);
}

int Usage(const std::string& what) {
  std::fprintf(stderr, "processes: %s\n", what.c_str());
  return 2;
}

}  // namespace
}  // namespace native

int main(int argc, char** argv) {
  using namespace native;
  ProcessOptions o;
  o.ranks = 2, o.per_node = 1, o.gpus = 1, o.calls = 300;
  std::string wanted = "all";
  if (argc % 2 == 0) return Usage("options come as pairs");
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--nccl") {
      o.nccl = value;
    } else if (name == "--plugin") {
      o.plugin = value;
    } else if (name == "--faults") {
      o.faults = value;
    } else if (name == "--log") {
      o.log = value;
    } else if (name == "--address") {
      o.address = value;
    } else if (name == "--rank") {
      o.rank = std::atoi(argv[i + 1]);
    } else if (name == "--ranks") {
      o.ranks = std::atoi(argv[i + 1]);
    } else if (name == "--per-node") {
      o.per_node = std::atoi(argv[i + 1]);
    } else if (name == "--gpus") {
      o.gpus = std::atoi(argv[i + 1]);
    } else if (name == "--scenario") {
      wanted = value;
    } else if (name == "--calls") {
      o.calls = std::atoll(argv[i + 1]);
    } else if (name == "--seed") {
      o.seed = static_cast<uint32_t>(std::atoll(argv[i + 1]));
    } else if (name == "--patience") {
      o.patience = std::atof(argv[i + 1]);
    } else if (name == "--limit") {
      o.limit_s = std::atof(argv[i + 1]);
    } else {
      return Usage("unknown option " + name);
    }
  }
  if (o.ranks < 2 || o.ranks > kRanks || o.per_node < 1 || o.ranks % o.per_node || o.ranks == o.per_node) {
    return Usage("--ranks, --per-node: two nodes of as many ranks at least");
  }
  if (o.gpus < 1) return Usage("--gpus: one at least");
  if (o.plugin.empty() && !o.faults.empty()) return Usage("--faults: they are --plugin's");
  if (o.rank >= o.ranks || o.rank >= 0 != !o.address.empty()) return Usage("--rank and --address: both or none");
  if (o.rank >= 0 && wanted == "all") return Usage("--rank: one --scenario for each start");
  if (wanted == "throttled" && RateOf(o) <= 0) return Usage("--scenario throttled: --faults bytes_per_s=...");
  bool passed = true, found = false;
  for (const ProcessScenario& scenario : kScenarios) {
    if (wanted != "all" && wanted != scenario.name) continue;
    found = true;
    if (o.rank >= 0) RunOne(scenario, o);
    passed &= RunAll(scenario, o);
  }
  if (!found) return Usage("unknown scenario " + wanted);
  return passed ? 0 : 1;
}
