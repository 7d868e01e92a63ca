// Times dispatch and combine between virtual nodes whose link carries a given number of bytes a second out of each GPU
// (paced_link.cuh), without JAX: how well the kernels hide the slow link.
//   paced --ranks R --per-node G --gpus N --rate GB/s --tokens T --hidden H --chunk-tokens C --blocks B --repeats N
//         --pacer-blocks P --seconds S --json FILE --mode operations|link-only
// For every case one line: the time of an operation (back to back, the slowest rank), the slow link's time (the bytes
// that the pacer has counted out of a rank, the most of any, by the rate), the time of the same operation where all
// ranks are one node (what NVLink and the GPU take), the ratio of the first to the larger of the two others, and the
// bytes that left a rank for each token and element. "groups M": tokens choose their experts on M nodes at most, as
// group-limited gating does. --rate 0: no limit. --mode link-only: no operations, only puts like theirs, so that the
// pacer's own time is known. Results are compared bit for bit with those of one node. Exit status 0: all were
// equal.
#include <algorithm>
#include <cstdlib>
#include <string>

#include "tests/native/nodes/node_operations.cuh"
#include "tests/native/nodes/paced_link.cuh"

namespace native {
namespace {

struct PacedOptions {
  int ranks = 4, per_node = 2, gpus = 4, tokens = 4096, hidden = 7168, chunk_tokens = 16, blocks = 96, repeats = 5;
  int top_k = 8, experts = 256, pacer_blocks = 8;
  double rate = 50, seconds = 60;
  bool link_only = false;
  const char* json = nullptr;
};

__global__ void FillRows(uint16_t* p, size_t n) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < n; i += size_t{gridDim.x} * blockDim.x) {
    uint64_t h = (i + 1) * 0x9E3779B97F4A7C15ull;
    h = (h ^ h >> 31) * 0xBF58476D1CE4E5B9ull;
    p[i] = static_cast<uint16_t>((h >> 40 & 0x80FF) | (0x3F00 + (h >> 20 & 0x7F)));
  }
}
__global__ void CountDifferent(const uint4* a, const uint4* b, size_t n, uint32_t* wrong) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < n; i += size_t{gridDim.x} * blockDim.x) {
    if ((a[i].x ^ b[i].x) | (a[i].y ^ b[i].y) | (a[i].z ^ b[i].z) | (a[i].w ^ b[i].w)) atomicAdd(wrong, 1u);
  }
}

// Buffers that an operation of one rank reads and writes. The same inputs for one node and for several.
struct Arrays {
  char *x = nullptr, *rows = nullptr, *out = nullptr;
  float *scales = nullptr, *row_scales = nullptr, *weights = nullptr, *row_weights = nullptr;
  int *idx = nullptr, *positions = nullptr, *counts = nullptr;
};

class Paced {
 public:
  explicit Paced(const PacedOptions& options) : o_(options), whole_(o_.ranks, o_.gpus), cut_(o_.ranks, o_.gpus) {
    NATIVE_CHECK(cudaHostAlloc(&stop_, sizeof(int), cudaHostAllocMapped | cudaHostAllocPortable));
    for (const RankState& state : cut_.states) {
      NATIVE_CHECK(cudaSetDevice(state.device));
      if (state.rank < o_.gpus) {
        cudaFuncAttributes a;  // loaded before any of them spins
        NATIVE_CHECK((PreloadNodeCombine<__nv_bfloat16, WireType::kNative, PacedLink>()));
        NATIVE_CHECK(cudaFuncGetAttributes(&a, PacerKernel));
        NATIVE_CHECK(cudaFuncGetAttributes(&a, LinkOnlyKernel));
        NATIVE_CHECK((PreloadNodeDispatch<CopyCodec<int4>, PacedLink>()));
      }
      expected_.push_back(New<uint64_t>(kRailSignals)), counters_.push_back(New<uint64_t>(kRailSignals));
      tables_.push_back(New<PeerTable>(1)), queues_.push_back(New<PostQueue>(1));
      wrong_.push_back(New<uint32_t>(1));
      const size_t rows = static_cast<size_t>(Capacity()), T = o_.tokens, H = o_.hidden;
      for (std::vector<Arrays>* arrays : {&one_, &several_}) {
        Arrays a;
        a.rows = New<char>(rows * H * 2), a.out = New<char>(T * H * 2);
        a.row_scales = New<float>(rows * ScaleBlocks()), a.row_weights = New<float>(rows);
        a.positions = New<int>(o_.ranks * T * o_.top_k), a.counts = New<int>(o_.experts);
        if (arrays == &one_) {
          a.x = New<char>(T * H * 2), a.idx = New<int>(T * o_.top_k);
          a.scales = New<float>(T * ScaleBlocks()), a.weights = New<float>(T * o_.top_k);
          FillRows<<<256, 256>>>(reinterpret_cast<uint16_t*>(a.x), T * H);
          FillRows<<<256, 256>>>(reinterpret_cast<uint16_t*>(a.weights), T * o_.top_k * 2);
          FillRows<<<256, 256>>>(reinterpret_cast<uint16_t*>(a.scales), T * ScaleBlocks() * 2);
        } else {
          const Arrays& same = one_[state.rank];
          a.x = same.x, a.idx = same.idx, a.scales = same.scales, a.weights = same.weights;
        }
        arrays->push_back(a);
      }
      cudaStream_t stream;
      NATIVE_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      pacers_.push_back(stream);
      cudaEvent_t event;
      for (std::vector<cudaEvent_t>* events : {&begin_, &end_}) {
        NATIVE_CHECK(cudaEventCreate(&event));
        events->push_back(event);
      }
      NATIVE_CHECK(cudaDeviceSynchronize());
    }
    const Needs needs = Largest();
    whole_.Start(needs), cut_.Start(needs);
    Cut();
  }
  ~Paced() {
    *stop_ = 1;
    cut_.Synchronize();
    for (char* p : own_) cudaFree(p);
    cudaFreeHost(stop_);
  }

  // Tokens choose their experts on `groups` nodes at most. Random, and another choice each time.
  void Route(int groups) {
    std::mt19937 rng(++seed_);
    const int nodes = o_.ranks / o_.per_node, of_node = o_.experts / nodes;
    for (int r = 0; r < o_.ranks; ++r) {
      std::vector<int> idx;
      for (int t = 0; t < o_.tokens; ++t) {
        std::vector<int> node(nodes), experts;
        for (int n = 0; n < nodes; ++n) node[n] = n;
        std::shuffle(node.begin(), node.end(), rng);
        for (int n = 0; n < std::min(groups, nodes); ++n) {
          for (int e = 0; e < of_node; ++e) experts.push_back(node[n] * of_node + e);
        }
        for (int k = 0; k < o_.top_k; ++k) {
          std::swap(experts[k], experts[k + rng() % (experts.size() - k)]);
          idx.push_back(experts[k]);
        }
      }
      NATIVE_CHECK(cudaMemcpy(one_[r].idx, idx.data(), idx.size() * 4, cudaMemcpyHostToDevice));
    }
  }

  struct Times {
    double paced = 0, link = 0, whole = 0;  // us
    uint64_t bytes = 0;                     // out of a rank, the most of any, in one operation
    uint32_t different = 0;
  };
  // The puts of an operation whose tokens choose their experts on `groups` nodes, with no kernel that makes or takes
  // them: as many bytes in each as there are on average.
  Times RunLinkAlone(int kind, int groups) {
    Times out;
    for (uint64_t* counters : counters_) NATIVE_CHECK(cudaMemset(counters, 0, kRailSignals * 8));
    for (PostQueue* queue : queues_) NATIVE_CHECK(cudaMemset(&queue->bytes, 0, 8));
    cut_.Synchronize();
    std::vector<uint64_t> rounds(o_.ranks);
    StartPacers();
    operations_ = 0;
    out.paced = Time(
        [&](int rank) {
          RailParams rails{};
          kind == 2 ? static_cast<void>(Combine(rank, true, &rails))
                    : static_cast<void>(Dispatch(rank, kind == 1, true, &rails));
          const PacedLink link{PeerLink{tables_[rank], rank}, queues_[rank]};
          const uint64_t round = ++rounds[rank];
          auto share = [&](uint64_t bytes) { return bytes * groups / rails.plan.nodes / 16 * 16; };
          LinkOnlyKernel<<<std::min(32, o_.blocks), kThreads, 0, cut_.states[rank].stream[0]>>>(
              rails.plan, link, share(rails.plan.lead_bytes), share(rails.plan.chunk_bytes), round);
          return static_cast<int>(cudaGetLastError());
        },
        cut_);
    StopPacers();
    for (uint64_t* counters : counters_) NATIVE_CHECK(cudaMemset(counters, 0, kRailSignals * 8));
    for (uint64_t* expected : expected_) NATIVE_CHECK(cudaMemset(expected, 0, kRailSignals * 8));
    CountBytes(&out);
    return out;
  }
  // `kind`: 0 dispatch, 1 dispatch of bytes with scales, 2 combine of the rows of the last dispatch.
  Times Run(int kind) {
    Times out;
    out.whole = Time([&](int rank) { return Launch(kind, rank, false); }, whole_);
    ExpectNone(whole_, "one node");
    for (PostQueue* queue : queues_) NATIVE_CHECK(cudaMemset(&queue->bytes, 0, 8));
    StartPacers();
    operations_ = 0;
    out.paced = Time([&](int rank) { return Launch(kind, rank, true); }, cut_);
    StopPacers();
    ExpectNone(cut_, "several nodes");
    CountBytes(&out);
    out.different = Compare(kind);
    return out;
  }

 private:
  void CountBytes(Times* out) const {
    for (PostQueue* queue : queues_) {
      uint64_t bytes = 0;
      NATIVE_CHECK(cudaMemcpy(&bytes, &queue->bytes, 8, cudaMemcpyDeviceToHost));
      out->bytes = std::max(out->bytes, bytes / std::max<uint64_t>(1, operations_));
    }
    if (o_.rate > 0) out->link = static_cast<double>(out->bytes) / (o_.rate * 1e3);
  }
  void ExpectNone(const World& world, const char* which) const {
    for (int r = 0; r < world.ranks(); ++r) {
      Expect(world.FailureOf(r) == 0, Text("%s, rank %d: ", which, r) + FailureText(world.FailureOf(r)));
    }
  }
  int ScaleBlocks() const { return (o_.hidden + kScaleBlock - 1) / kScaleBlock; }
  int Capacity() const { return o_.tokens * o_.top_k * 3 / 2; }
  template <class T>
  T* New(size_t n) {
    char* p = nullptr;
    NATIVE_CHECK(cudaMalloc(&p, std::max<size_t>(16, n * sizeof(T))));
    NATIVE_CHECK(cudaMemset(p, 0, std::max<size_t>(16, n * sizeof(T))));
    own_.push_back(p);
    return reinterpret_cast<T*>(p);
  }

  Routing RoutingOf(int rank, bool nodes) const {
    Routing r{};
    r.ranks = o_.ranks, r.rank = rank, r.tokens = o_.tokens, r.top_k = r.slots = o_.top_k, r.experts = o_.experts;
    r.local_experts = o_.experts / o_.ranks, r.hidden = o_.hidden, r.capacity = Capacity(), r.alignment = 1;
    r.ranks_per_node = nodes ? o_.per_node : o_.ranks, r.layout = Layout::kGrouped;
    return r;
  }
  Schedule ScheduleOf(bool combine, bool nodes) const {
    Schedule s{};
    s.blocks = nodes ? o_.blocks : std::min(64, o_.blocks), s.parts = 1;
    s.push_blocks = std::max(1, s.blocks / (combine ? 2 : 4));
    s.part_elements = (o_.hidden + 255) / 256 * 256;
    const int counting = (s.blocks - s.push_blocks) * kWarps;
    s.segment_tokens = std::max(32 / o_.top_k, (o_.ranks * o_.tokens + counting - 1) / counting);
    const int segments = o_.ranks * ((o_.tokens + s.segment_tokens - 1) / s.segment_tokens);
    s.layout_blocks = combine ? 1 : std::max(1, std::min(s.blocks - s.push_blocks, (segments + 15) / 16));
    s.chunk_tokens = nodes ? o_.chunk_tokens : 0;
    return s;
  }
  Call CallOf(const World& world, int rank) const {
    Call call{};
    call.control = world.states[rank].control, call.mailbox = world.states[rank].mailbox;
    call.timeout_ns = 20000000000ull, call.call_id = 1;
    return call;
  }
  DispatchParams Dispatch(int rank, bool bytes, bool nodes, RailParams* rails) const {
    const Arrays& a = (nodes ? several_ : one_)[rank];
    DispatchParams p{};
    p.call = CallOf(nodes ? cut_ : whole_, rank), p.routing = RoutingOf(rank, nodes);
    p.schedule = ScheduleOf(false, nodes), p.element = bytes ? Element::kByte : Element::kBf16;
    p.x = a.x, p.scales = bytes ? a.scales : nullptr, p.topk_idx = a.idx, p.topk_weights = a.weights;
    p.rows = a.rows, p.row_scales = bytes ? a.row_scales : nullptr, p.positions = a.positions;
    p.recv_counts = a.counts, p.weights = a.row_weights;
    p.staging = PlanStaging(p.routing, p.schedule, p.element, p.wire, bytes);
    if (nodes) {
      rails->plan = PlanRail(p.routing, Operation::kDispatch, o_.chunk_tokens, p.schedule, false, &p.staging);
      rails->expected = expected_[rank];
    }
    Describe(&p, bytes, 0, bytes ? 1 : 2);
    return p;
  }
  // The values are rows of x once more: the rows of a bf16 dispatch.
  CombineParams Combine(int rank, bool nodes, RailParams* rails) const {
    const Arrays& a = (nodes ? several_ : one_)[rank];
    CombineParams p{};
    p.call = CallOf(nodes ? cut_ : whole_, rank), p.routing = RoutingOf(rank, true);  // the same order of sums
    p.schedule = ScheduleOf(true, nodes), p.element = Element::kBf16;
    p.y = a.rows, p.topk_idx = a.idx, p.positions = a.positions, p.weights = a.row_weights, p.out = a.out;
    p.staging = PlanStaging(p.routing, p.schedule, p.element, p.wire, false);
    if (nodes) {
      rails->plan = PlanRail(p.routing, Operation::kCombine, o_.chunk_tokens, p.schedule, false, &p.staging);
      rails->expected = expected_[rank];
    }
    Describe(&p, true, 0, 3);
    return p;
  }
  int Launch(int kind, int rank, bool nodes) {
    const cudaStream_t stream = (nodes ? cut_ : whole_).states[rank].stream[0];
    const PacedLink link{PeerLink{tables_[rank], rank}, queues_[rank]};
    RailParams rails{};
    if (kind == 2) {
      const CombineParams p = Combine(rank, nodes, &rails);
      if (!nodes) return LaunchCombine(p, stream);
      return LaunchNodeCombine<__nv_bfloat16, WireType::kNative>(p, rails, link, stream);
    }
    const DispatchParams p = Dispatch(rank, kind == 1, nodes, &rails);
    if (!nodes) return LaunchDispatch(p, stream);
    return LaunchNodeDispatch<CopyCodec<int4>>(p, rails, link, stream);
  }
  Needs Largest() const {
    Needs most;
    for (int kind = 0; kind < 3; ++kind) {
      for (const bool nodes : {false, true}) {
        RailParams rails{};
        const Needs n =
            kind == 2 ? Combine(0, nodes, &rails).call.needs : Dispatch(0, kind == 1, nodes, &rails).call.needs;
        most.flag_bytes = std::max(most.flag_bytes, n.flag_bytes);
        most.data_bytes = std::max(most.data_bytes, n.data_bytes);
        most.scratch_bytes = std::max(most.scratch_bytes, n.scratch_bytes);
      }
    }
    return most;
  }

  // Takes the pointers to other nodes away, and gives them to the link.
  void Cut() {
    std::vector<Control> controls(o_.ranks);
    for (int r = 0; r < o_.ranks; ++r) {
      NATIVE_CHECK(cudaMemcpy(&controls[r], cut_.states[r].control, sizeof(Control), cudaMemcpyDeviceToHost));
    }
    for (int r = 0; r < o_.ranks; ++r) {
      Control& control = controls[r];
      PeerTable table{};
      for (int i = 0; i < o_.ranks; ++i) {
        for (int g = 0; g < kGenerations; ++g) table.staging[g][i] = control.memory[g].staging[i];
        table.counters[i] = counters_[i], table.mailbox[i] = cut_.states[i].mailbox;
        if (i / o_.per_node == r / o_.per_node) continue;
        control.mailbox[i] = nullptr, control.current.staging[i] = nullptr;
        for (MemoryTable& memory : control.memory) memory.staging[i] = nullptr;
      }
      NATIVE_CHECK(cudaMemcpy(tables_[r], &table, sizeof(table), cudaMemcpyHostToDevice));
      NATIVE_CHECK(cudaMemcpy(cut_.states[r].control, &control, sizeof(control), cudaMemcpyHostToDevice));
    }
    cut_.Synchronize();
  }

  void StartPacers() {
    *stop_ = 0;
    for (int r = 0; r < o_.ranks; ++r) {
      NATIVE_CHECK(cudaSetDevice(cut_.states[r].device));
      uint32_t posted = 0;  // those that copied before have taken numbers that never came
      NATIVE_CHECK(cudaMemcpy(&posted, &queues_[r]->posted, 4, cudaMemcpyDeviceToHost));
      NATIVE_CHECK(cudaMemcpy(&queues_[r]->taken, &posted, 4, cudaMemcpyHostToDevice));
      PacerKernel<<<o_.pacer_blocks, kPacerThreads, 0, pacers_[r]>>>(queues_[r], tables_[r], r, posted, o_.rate, stop_);
      NATIVE_CHECK(cudaGetLastError());
    }
  }
  void StopPacers() {
    *reinterpret_cast<volatile int*>(stop_) = 1;
    for (int r = 0; r < o_.ranks; ++r) NATIVE_CHECK(cudaStreamSynchronize(pacers_[r]));
  }
  // us of an operation, back to back: the slowest rank's, the median of the repetitions.
  template <class F>
  double Time(F launch, World& world) {
    const int inner = o_.tokens > 1000 ? 6 : 2;
    std::vector<double> times;
    for (int repeat = 0; repeat < o_.repeats; ++repeat) {
      world.Each([&](int rank) {
        const cudaStream_t stream = world.states[rank].stream[0];
        for (int i = 0; i <= inner; ++i) {
          if (i == 1) NATIVE_CHECK(cudaEventRecord(begin_[rank], stream));
          NATIVE_CHECK(launch(rank));
        }
        NATIVE_CHECK(cudaEventRecord(end_[rank], stream));
        NATIVE_CHECK(cudaStreamSynchronize(stream));
      });
      operations_ += inner + 1;
      float slowest = 0;
      for (int r = 0; r < o_.ranks; ++r) {
        float ms = 0;
        NATIVE_CHECK(cudaEventElapsedTime(&ms, begin_[r], end_[r]));
        slowest = std::max(slowest, ms);
      }
      times.push_back(slowest * 1e3 / inner);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }
  uint32_t Compare(int kind) {
    uint32_t sum = 0;
    for (int r = 0; r < o_.ranks; ++r) {
      NATIVE_CHECK(cudaSetDevice(cut_.states[r].device));
      NATIVE_CHECK(cudaMemset(wrong_[r], 0, 4));
      auto compare = [&](const void* a, const void* b, size_t bytes) {
        CountDifferent<<<256, 256>>>(static_cast<const uint4*>(a), static_cast<const uint4*>(b), bytes / 16, wrong_[r]);
        NATIVE_CHECK(cudaGetLastError());
      };
      const size_t T = o_.tokens, H = o_.hidden, rows = Capacity();
      if (kind == 2) {
        compare(one_[r].out, several_[r].out, T * H * 2);
      } else {
        compare(one_[r].rows, several_[r].rows, rows * H * (kind == 1 ? 1 : 2));
        compare(one_[r].positions, several_[r].positions, o_.ranks * T * o_.top_k * 4);
        compare(one_[r].row_weights, several_[r].row_weights, rows * 4);
        if (kind == 1) compare(one_[r].row_scales, several_[r].row_scales, rows * ScaleBlocks() * 4);
      }
      NATIVE_CHECK(cudaDeviceSynchronize());
      uint32_t wrong = 0;
      NATIVE_CHECK(cudaMemcpy(&wrong, wrong_[r], 4, cudaMemcpyDeviceToHost));
      sum += wrong;
    }
    return sum;
  }

  const PacedOptions o_;
  World whole_, cut_;
  std::vector<char*> own_;
  std::vector<uint64_t*> expected_, counters_;
  std::vector<PeerTable*> tables_;
  std::vector<PostQueue*> queues_;
  std::vector<uint32_t*> wrong_;
  std::vector<Arrays> one_, several_;
  std::vector<cudaStream_t> pacers_;
  std::vector<cudaEvent_t> begin_, end_;
  int* stop_ = nullptr;
  uint64_t operations_ = 0;
  uint32_t seed_ = 0;
};

int Usage(const char* what) {
  std::fprintf(stderr, "paced: %s\n", what);
  return 2;
}

}  // namespace
}  // namespace native

int main(int argc, char** argv) {
  using namespace native;
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  PacedOptions o;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    const char* const value = argv[i + 1];
    auto is = [&](const char* option, int* to) { return name == option && ((*to = std::atoi(value)), true); };
    if (is("--ranks", &o.ranks) || is("--per-node", &o.per_node) || is("--gpus", &o.gpus) ||
        is("--tokens", &o.tokens) || is("--hidden", &o.hidden) || is("--chunk-tokens", &o.chunk_tokens) ||
        is("--blocks", &o.blocks) || is("--repeats", &o.repeats) || is("--pacer-blocks", &o.pacer_blocks)) {
      continue;
    }
    if (name == "--rate") {
      o.rate = std::atof(value);
    } else if (name == "--mode") {
      o.link_only = std::string(value) == "link-only";
      if (!o.link_only && std::string(value) != "operations") return Usage("--mode: operations or link-only");
    } else if (name == "--seconds") {
      o.seconds = std::atof(value);
    } else if (name == "--json") {
      o.json = value;
    } else {
      return Usage(("unknown option " + name).c_str());
    }
  }
  const int nodes = o.per_node < 1 ? 0 : o.ranks / o.per_node;
  if (argc % 2 == 0) return Usage("options come as pairs");
  if (o.ranks < 2 || o.ranks > kRanks || nodes < 2 || o.ranks % o.per_node || o.experts % o.ranks) {
    return Usage("--ranks, --per-node: two nodes or more, of equal size, and a divisor of 256 ranks");
  }
  if (o.pacer_blocks < 2) return Usage("--pacer-blocks: the card's and one that copies, at least");
  if (o.rate < 0) return Usage("--rate: GB/s, or 0 for no limit");
  if (o.hidden % 8 || o.hidden < 8) return Usage("--hidden: a multiple of 8");
  const double start = Now();
  bool equal = true;
  std::string json;
  try {
    Paced paced(o);
    const char* const names[] = {"dispatch bf16", "dispatch fp8", "combine bf16"};
    for (int groups = nodes; groups >= 1; groups = groups > 2 ? 2 : groups - 1) {
      paced.Route(groups);
      for (const int kind : {1, 0, 2}) {  // combine takes the rows of the bf16 dispatch
        if (Now() - start > o.seconds) break;
        const Paced::Times t = o.link_only ? paced.RunLinkAlone(kind, groups) : paced.Run(kind);
        const double ratio = t.paced / std::max({t.link, t.whole, 1e-3});
        std::printf(
            "%-13s %dx%d groups %d chunk %2d blocks %3d: %8.1f us, link %8.1f us, one node %8.1f us, ratio %.3f, %llu "
            "bytes a rank%s\n",
            names[kind], nodes, o.per_node, groups, o.chunk_tokens, o.blocks, t.paced, t.link, t.whole, ratio,
            static_cast<unsigned long long>(t.bytes), t.different ? ", DIFFERENT" : "");
        std::fflush(stdout);
        equal &= t.different == 0;
        json += Text(
            "%s{\"operation\": \"%s\", \"groups\": %d, \"us\": %.2f, \"link_us\": %.2f, \"one_node_us\": %.2f, "
            "\"ratio\": %.4f, \"bytes\": %llu, \"different\": %u}",
            json.empty() ? "" : ", ", names[kind], groups, t.paced, t.link, t.whole, ratio,
            static_cast<unsigned long long>(t.bytes), t.different);
      }
    }
  } catch (const std::exception& e) {
    std::printf("FAILED %s\n", e.what());
    return 1;
  }
  if (std::FILE* file = o.json ? std::fopen(o.json, "w") : nullptr) {
    std::fprintf(file,
                 "{\"ranks\": %d, \"per_node\": %d, \"gpus\": %d, \"rate_gb_s\": %.1f, \"tokens\": %d, \"hidden\": %d, "
                 "\"chunk_tokens\": %d, \"blocks\": %d, \"mode\": \"%s\", \"cases\": [%s]}\n",
                 o.ranks, o.per_node, o.gpus, o.rate, o.tokens, o.hidden, o.chunk_tokens, o.blocks,
                 o.link_only ? "link-only" : "operations", json.c_str());
    std::fclose(file);
  }
  return equal ? 0 : 1;
}
