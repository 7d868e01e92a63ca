#include <algorithm>
#include <cstdio>
#include <exception>
#include <iterator>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "tests/native/world.h"

namespace native {

using namespace xen_moe;

void Check(int error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(static_cast<cudaError_t>(error)));
}

namespace {

std::mutex allocations_mutex;
// Ranks of one GPU that were seen to have a queue each, on an H200. The emulator has one for every stream.
#ifdef __CUDACC__
constexpr int kRanksWithAQueue = 9;
#else
constexpr int kRanksWithAQueue = kMaxRanks;
#endif
bool queues_shared = false;      // in the world at hand
std::vector<char*> allocations;  // freed with the world

char* Device(uint64_t bytes) {
  char* p = nullptr;
  NATIVE_CHECK(cudaMalloc(&p, bytes ? bytes : 16));
  NATIVE_CHECK(cudaMemset(p, 0, bytes ? bytes : 16));
  std::lock_guard<std::mutex> lock(allocations_mutex);
  allocations.push_back(p);
  return p;
}
char* Upload(const Bytes& bytes) {
  char* p = Device(bytes.size());
  if (!bytes.empty()) NATIVE_CHECK(cudaMemcpy(p, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
  return p;
}

__global__ void SleepKernel(uint64_t ns) {
  uint64_t start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    __nanosleep(1000);
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - start < ns);
}

__global__ void OccupyKernel(const volatile int* stop, uint64_t most_ns) {
  extern __shared__ char room[];
  room[threadIdx.x] = 0;
  if (threadIdx.x > 0) return;  // one thread keeps the room, and does not drown the bus in polls
  uint64_t start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    __nanosleep(2000);
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (!*stop && now - start < most_ns);
}

// Makes the driver set up a stream, with local memory: it does so at a first launch, and may wait for the GPU to be
// idle.
__global__ void WarmKernel(int* out, int n) {
  int local[512];
  for (int i = 0; i < 512; ++i) local[i] = i * n;
  for (int i = 0; i < n; ++i) local[(i * 37 + threadIdx.x) % 512] += local[i % 512];
  if (n < 0) *out = local[threadIdx.x];
}

// Counts vectors that differ from `expected` where `mask` (null: everywhere) says so, and writes `initial` back.
__global__ void VerifyKernel(uint4* arena, const uint4* expected, const uint4* mask, const uint4* initial,
                             uint64_t vectors, uint32_t* wrong) {
  for (uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x; i < vectors;
       i += uint64_t{gridDim.x} * blockDim.x) {
    const uint4 a = arena[i], e = expected[i], m = mask ? mask[i] : make_uint4(~0u, ~0u, ~0u, ~0u);
    if (((a.x ^ e.x) & m.x) | ((a.y ^ e.y) & m.y) | ((a.z ^ e.z) & m.z) | ((a.w ^ e.w) & m.w)) atomicAdd(wrong, 1u);
    arena[i] = initial[i];
  }
}

// Counts one if `arena` is neither `expected` where `mask` says so nor `poisoned` everywhere, and writes `initial`
// back.
__global__ void VerifyEitherKernel(uint4* arena, const uint4* expected, const uint4* mask, const uint4* poisoned,
                                   const uint4* initial, uint64_t vectors, uint32_t* wrong) {
  bool right = true, failed = true;
  for (uint64_t i = threadIdx.x; i < vectors; i += blockDim.x) {
    const uint4 a = arena[i], e = expected[i], m = mask[i], p = poisoned[i];
    right &= !(((a.x ^ e.x) & m.x) | ((a.y ^ e.y) & m.y) | ((a.z ^ e.z) & m.z) | ((a.w ^ e.w) & m.w));
    failed &= !((a.x ^ p.x) | (a.y ^ p.y) | (a.z ^ p.z) | (a.w ^ p.w));
    arena[i] = initial[i];
  }
  right = __syncthreads_and(right);
  failed = __syncthreads_and(failed);
  if (threadIdx.x == 0 && !right && !failed) atomicAdd(wrong, 1u);
}

}  // namespace

void Sleep(cudaStream_t stream, double microseconds) {
  SleepKernel<<<1, 1, 0, stream>>>(static_cast<uint64_t>(microseconds * 1e3));
  NATIVE_CHECK(cudaGetLastError());
}
int Multiprocessors(int device) {
  int n = 0;
  NATIVE_CHECK(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device));
  return n;
}
void Occupy(cudaStream_t stream, int leave, const int* stop, double most_s) {
  int device = 0, bytes = 0;
  NATIVE_CHECK(cudaGetDevice(&device));
  NATIVE_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  NATIVE_CHECK(cudaFuncSetAttribute(OccupyKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  OccupyKernel<<<Multiprocessors(device) - leave, 1024, bytes, stream>>>(stop, static_cast<uint64_t>(most_s * 1e9));
  NATIVE_CHECK(cudaGetLastError());
}

void RunThreads(const std::vector<RankState>& states, void (*call)(void*, int), void* context) {
  std::vector<std::thread> threads;
  std::exception_ptr failed;
  std::mutex mutex;
  for (const RankState& state : states) {
    threads.emplace_back([&, rank = state.rank, device = state.device] {
      try {
        NATIVE_CHECK(cudaSetDevice(device));
        call(context, rank);
      } catch (...) {
        std::lock_guard<std::mutex> lock(mutex);
        if (!failed) failed = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (failed) std::rethrow_exception(failed);
}

Prepared::Prepared(const Problem& p, const RankCase& c, const RankState& rank, uint32_t call_id, uint64_t timeout_ns)
    : problem(p), wrong_(rank.wrong) {
  NATIVE_CHECK(cudaSetDevice(rank.device));
  for (const Bytes& input : c.inputs) inputs_.push_back(input.empty() ? nullptr : Upload(input));
  // Outputs lie in one arena with borders between them.
  constexpr uint64_t kBorder = 256;
  Bytes expected(kBorder, kFill), mask(kBorder, 0xFF), poisoned(kBorder, kFill), borders(kBorder, 0xFF);
  std::vector<uint64_t> at;
  for (const Output& output : c.outputs) {
    at.push_back(expected.size());
    expected.insert(expected.end(), output.expected.begin(), output.expected.end());
    mask.insert(mask.end(), output.mask.begin(), output.mask.end());
    poisoned.insert(poisoned.end(), output.expected.size(), output.poison);
    borders.insert(borders.end(), output.expected.size(), 0);
    const uint64_t to = (expected.size() + 255) / 256 * 256 + kBorder;
    expected.resize(to, kFill), mask.resize(to, 0xFF), poisoned.resize(to, kFill), borders.resize(to, 0xFF);
  }
  bytes_ = expected.size();
  const Bytes initial(bytes_, kFill);
  expected_ = Upload(expected), mask_ = Upload(mask), poisoned_ = Upload(poisoned), borders_ = Upload(borders);
  arena_ = Upload(initial), initial_ = Upload(initial);
  auto out = [&](size_t i) { return i < at.size() && !c.outputs[i].expected.empty() ? arena_ + at[i] : nullptr; };

  Call call{};
  call.control = rank.control, call.mailbox = rank.mailbox, call.timeout_ns = timeout_ns, call.call_id = call_id;
  call.begun = rank.begun, call.begin = call_id;
  Bytes active;
  for (int i = 0; i < p.ranks; ++i) active.push_back(p.members[i]);
  if (p.told || std::count(active.begin(), active.end(), 0)) {
    call.active = reinterpret_cast<const bool*>(Upload(active));
  }
  Routing r{};
  r.ranks = p.ranks, r.rank = rank.rank, r.tokens = p.tokens, r.top_k = p.top_k, r.slots = p.slots();
  r.experts = p.experts, r.local_experts = p.local_experts(), r.hidden = p.hidden, r.capacity = p.capacity;
  r.alignment = p.alignment, r.ranks_per_node = p.per_node(), r.layout = p.layout;
  const RingLimits rings = p.ring_tokens ? RingLimits{0, p.ring_tokens} : RingLimits();
  Schedule s{};
  s.blocks = p.blocks, s.push_blocks = p.push_blocks, s.layout_blocks = p.slices, s.parts = p.parts;
  s.part_elements = ((p.hidden + p.parts - 1) / p.parts + 255) / 256 * 256;
  s.segment_tokens = p.segment_tokens;
  s.bulk = p.bulk, s.chunk_tokens = p.chunk_tokens;
  s.solo_layout = p.solo && SoloLayoutBytes(r, s) <= SoloLayoutLimit();
  s.low_latency = p.low_latency && WhyNotLowLatency(r, p.operation, p.element, p.wire, p.chunk_tokens) == nullptr;
  if (p.operation == Operation::kExchange) {
    ExchangeParams& e = exchange;
    e.call = call;
    e.ranks = p.ranks, e.rank = rank.rank, e.poison = 0xFF, e.chunk_bytes = p.chunk_bytes;
    const bool rows = p.ragged || p.gather;  // an all_to_all moves a unit for each rank
    e.gather = p.gather, e.low_latency = p.low_latency, e.round = p.round;
    e.ring_chunks = p.ring_chunks, e.lanes = p.lanes;
    e.unit_bytes = rows || p.by_table ? p.hidden : p.hidden * p.tokens;
    e.operand_units = p.gather ? p.tokens : rows ? p.ranks * p.tokens : p.ranks;
    e.output_units = rows ? p.capacity : p.ranks;
    e.operand = inputs_[0], e.output = out(0);
    if (p.by_table) {
      e.by_table = true, e.lost = kLost, e.sources = Input(1);
      e.operand_units = p.tokens, e.output_units = p.capacity;
    }
    if (p.ragged) e.input_offsets = Input(1), e.send_sizes = Input(2), e.output_offsets = Input(3);
    PlanExchange(&e, p.ragged);
    Describe(&e, p.ragged, static_cast<uint32_t>(p.element), p.site);
  } else if (p.operation == Operation::kCombine) {
    CombineParams& k = combine;
    k.call = call, k.routing = r, k.schedule = s, k.element = p.element;
    k.wire = p.wire, k.ue8m0 = p.ue8m0;
    k.by_home = p.by_home;
    k.staging = s.low_latency ? PlanLowLatency(r, p.operation, p.element, false)
                : p.by_home   ? PlanHomeStaging(r, s, p.element)
                              : PlanStaging(r, s, p.element, p.wire, false, rings);
    k.y = inputs_[0], k.topk_idx = Input(1), k.positions = Input(2), k.weights = reinterpret_cast<float*>(inputs_[3]);
    if (p.by_home) k.home = Input(4), k.topk_weights = reinterpret_cast<float*>(inputs_[5]);
    k.out = out(0);
    Describe(&k, k.weights != nullptr, static_cast<uint32_t>(p.element), p.site);
  } else {
    DispatchParams& d = dispatch;
    d.call = call, d.routing = r, d.schedule = s, d.element = p.element;
    d.wire = p.wire, d.ue8m0 = p.ue8m0;
    d.staging = s.low_latency ? PlanLowLatency(r, p.operation, p.element, p.scaled)
                              : PlanStaging(r, s, p.element, p.wire, p.scaled, rings);
    d.known_positions = p.operation == Operation::kRedispatch;
    d.x = inputs_[0], d.scales = reinterpret_cast<float*>(inputs_[1]), d.topk_idx = Input(2);
    d.rows = out(0), d.row_scales = reinterpret_cast<float*>(out(1));
    if (d.known_positions) {
      d.positions = Input(3), d.recv_counts = Input(4);
    } else {
      d.topk_weights = reinterpret_cast<float*>(inputs_[3]);
      d.positions = reinterpret_cast<int*>(out(2)), d.recv_counts = reinterpret_cast<int*>(out(3));
      d.weights = reinterpret_cast<float*>(out(4)), d.local_idx = reinterpret_cast<int*>(out(5));
      d.clean_topk_idx = reinterpret_cast<int*>(out(6));
    }
    Describe(&d, p.scaled, static_cast<uint32_t>(p.element), p.site);
  }
}

const Call& Prepared::call() const {
  if (problem.operation == Operation::kExchange) return exchange.call;
  return problem.operation == Operation::kCombine ? combine.call : dispatch.call;
}
void Prepared::Launch(cudaStream_t stream) const {
  if (problem.operation == Operation::kExchange) {
    NATIVE_CHECK(LaunchExchange(exchange, stream));
  } else if (problem.operation == Operation::kCombine) {
    NATIVE_CHECK(LaunchCombine(combine, stream));
  } else {
    NATIVE_CHECK(LaunchDispatch(dispatch, stream));
  }
}
// A kernel that waits for the one before it in its stream may stand in front of another stream's in a queue of the
// GPU. Ranks that share a GPU wait for each other's kernels, so where there are more of them than were seen to have a
// queue each, nothing is put behind an operation before it has ended.
void Prepared::AwaitIfQueuesAreShared(cudaStream_t stream) const {
  if (!queues_shared) return;
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  NATIVE_CHECK(cudaStreamIsCapturing(stream, &capturing));
  if (capturing == cudaStreamCaptureStatusNone) NATIVE_CHECK(cudaStreamSynchronize(stream));
}
void Prepared::Verify(cudaStream_t stream, bool poisoned) const {
  AwaitIfQueuesAreShared(stream);
  VerifyKernel<<<8, 256, 0, stream>>>(reinterpret_cast<uint4*>(arena_),
                                      reinterpret_cast<const uint4*>(poisoned ? poisoned_ : expected_),
                                      reinterpret_cast<const uint4*>(poisoned ? nullptr : mask_),
                                      reinterpret_cast<const uint4*>(initial_), bytes_ / 16, wrong_);
  NATIVE_CHECK(cudaGetLastError());
}
void Prepared::VerifyEither(cudaStream_t stream) const {
  VerifyEitherKernel<<<1, 512, 0, stream>>>(reinterpret_cast<uint4*>(arena_), reinterpret_cast<const uint4*>(expected_),
                                            reinterpret_cast<const uint4*>(mask_),
                                            reinterpret_cast<const uint4*>(poisoned_),
                                            reinterpret_cast<const uint4*>(initial_), bytes_ / 16, wrong_);
  NATIVE_CHECK(cudaGetLastError());
}
void Prepared::VerifyBorders(cudaStream_t stream) const {
  VerifyKernel<<<8, 256, 0, stream>>>(reinterpret_cast<uint4*>(arena_), reinterpret_cast<const uint4*>(initial_),
                                      reinterpret_cast<const uint4*>(borders_),
                                      reinterpret_cast<const uint4*>(initial_), bytes_ / 16, wrong_);
  NATIVE_CHECK(cudaGetLastError());
}

World::World(int ranks, int gpus, uint32_t epochs_done) {
  queues_shared = ranks > kRanksWithAQueue * gpus;
  for (int i = 0; i < gpus; ++i) {
    NATIVE_CHECK(cudaSetDevice(i));
    for (int j = 0; j < gpus; ++j) {
      if (i == j) continue;
      const cudaError_t e = cudaDeviceEnablePeerAccess(j, 0);
      if (e != cudaErrorPeerAccessAlreadyEnabled) NATIVE_CHECK(e);
      cudaGetLastError();
    }
    NATIVE_CHECK(PreloadKernels(kSmallGroup));
    if (ranks > kSmallGroup) NATIVE_CHECK(PreloadKernels(ranks));
    // The harness's own kernels too: a first launch could wait for a kernel that spins.
    cudaFuncAttributes attributes;
    NATIVE_CHECK(cudaFuncGetAttributes(&attributes, SleepKernel));
    NATIVE_CHECK(cudaFuncGetAttributes(&attributes, OccupyKernel));
    NATIVE_CHECK(cudaFuncGetAttributes(&attributes, VerifyKernel));
    NATIVE_CHECK(cudaFuncGetAttributes(&attributes, VerifyEitherKernel));
  }
  for (int r = 0; r < ranks; ++r) {
    RankState state;
    state.rank = r, state.device = r % gpus;
    NATIVE_CHECK(cudaSetDevice(state.device));
    state.control = reinterpret_cast<Control*>(Device(sizeof(Control)));
    state.mailbox = reinterpret_cast<Mailbox*>(Device(sizeof(Mailbox)));
    state.wrong = reinterpret_cast<uint32_t*>(Device(sizeof(uint32_t)));
    state.begun = reinterpret_cast<uint32_t*>(Device(sizeof(uint32_t)));
    NATIVE_CHECK(cudaHostAlloc(&state.error, sizeof(ErrorRecord), cudaHostAllocMapped | cudaHostAllocPortable));
    std::memset(static_cast<void*>(state.error), 0, sizeof(ErrorRecord));
    states.push_back(state);
  }
  // All first streams, then all second ones: streams share a GPU's queues when there are more, and kernels of ranks
  // that wait for each other must not.
  for (int i = 0; i <= kStreams; ++i) {
    for (RankState& state : states) {
      NATIVE_CHECK(cudaSetDevice(state.device));
      cudaStream_t& stream = i < kStreams ? state.stream[i] : state.side;
      NATIVE_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      WarmKernel<<<1, 64, 0, stream>>>(nullptr, 64);
      NATIVE_CHECK(cudaGetLastError());
      NATIVE_CHECK(cudaStreamSynchronize(stream));
    }
  }
  for (const RankState& state : states) {
    Control control{};
    for (const RankState& other : states) control.mailbox[other.rank] = other.mailbox;
    control.error = state.error;
    control.epoch = epochs_done;
    NATIVE_CHECK(cudaMemcpy(state.control, &control, sizeof(control), cudaMemcpyHostToDevice));
  }
}

World::~World() {
  for (const RankState& state : states) {
    cudaSetDevice(state.device);
    cudaDeviceSynchronize();
  }
  for (const RankState& state : states) {
    for (cudaStream_t stream : state.stream) cudaStreamDestroy(stream);
    cudaStreamDestroy(state.side);
    cudaFreeHost(state.error);
  }
  std::lock_guard<std::mutex> lock(allocations_mutex);
  for (char* p : allocations) cudaFree(p);
  allocations.clear();
}

uint32_t World::Allocate(const Needs& needs) {
  std::vector<MemoryTable> tables(states.size());
  const uint32_t generation = static_cast<uint32_t>(generations_.size()) + 1;
  std::vector<char*> staging;
  for (const RankState& state : states) {
    NATIVE_CHECK(cudaSetDevice(state.device));
    staging.push_back(Device(2 * (needs.flag_bytes + needs.data_bytes)));
    tables[state.rank].scratch = Device(needs.scratch_bytes);
    NATIVE_CHECK(cudaDeviceSynchronize());
  }
  for (MemoryTable& table : tables) {
    for (size_t i = 0; i < staging.size(); ++i) table.staging[i] = staging[i];
    table.flag_bytes = needs.flag_bytes, table.data_bytes = needs.data_bytes;
    table.scratch_bytes = needs.scratch_bytes, table.generation = generation;
  }
  generations_.push_back(tables);
  return generation;
}

void World::Publish(int rank, uint32_t generation) {
  const RankState& state = states[rank];
  NATIVE_CHECK(cudaSetDevice(state.device));
  const MemoryTable& table = generations_[generation - 1][rank];
  NATIVE_CHECK(cudaMemcpyAsync(&state.control->memory[generation % kGenerations], &table, sizeof(table),
                               cudaMemcpyHostToDevice, state.side));
  NATIVE_CHECK(cudaMemcpyAsync(&state.control->newest, &generation, 4, cudaMemcpyHostToDevice, state.side));
  NATIVE_CHECK(cudaStreamSynchronize(state.side));
}

void World::Start(const Needs& needs) {
  const uint32_t generation = Allocate(needs);
  for (const RankState& state : states) {
    Publish(state.rank, generation);
    NATIVE_CHECK(cudaMemcpy(&state.control->current, &generations_[generation - 1][state.rank], sizeof(MemoryTable),
                            cudaMemcpyHostToDevice));
  }
}

void World::Reset() {
  const uint64_t leave = PackFailure({Cause::kReset, Operation::kDispatch, Step::kArrival, 0, 0, 0});
  for (const RankState& state : states) {
    uint64_t now = 0;
    NATIVE_CHECK(cudaSetDevice(state.device));
    NATIVE_CHECK(cudaMemcpyAsync(&now, &state.mailbox->failure, 8, cudaMemcpyDeviceToHost, state.side));
    NATIVE_CHECK(cudaStreamSynchronize(state.side));
    if (now == 0) NATIVE_CHECK(cudaMemcpyAsync(&state.mailbox->failure, &leave, 8, cudaMemcpyHostToDevice, state.side));
    NATIVE_CHECK(cudaStreamSynchronize(state.side));
  }
  Synchronize();
  std::vector<Control> controls(states.size());
  uint32_t epoch = 0;
  for (const RankState& state : states) {
    Control& control = controls[state.rank];
    NATIVE_CHECK(cudaMemcpy(&control, state.control, sizeof(control), cudaMemcpyDeviceToHost));
    if (state.rank == 0 || EpochBefore(epoch, control.epoch)) epoch = control.epoch;
  }
  epoch = NextEpoch(NextEpoch(epoch));
  for (const RankState& state : states) {
    Control& control = controls[state.rank];
    NATIVE_CHECK(cudaSetDevice(state.device));
    Control fresh{};
    for (int i = 0; i < kMaxRanks; ++i) fresh.mailbox[i] = control.mailbox[i];
    for (int i = 0; i < kGenerations; ++i) fresh.memory[i] = control.memory[i];
    fresh.error = control.error, fresh.newest = control.newest, fresh.epoch = epoch;
    const MemoryTable& table = generations_.back()[state.rank];
    fresh.current = table;
    NATIVE_CHECK(cudaMemset(table.staging[state.rank], 0, 2 * (table.flag_bytes + table.data_bytes)));
    NATIVE_CHECK(cudaMemset(state.mailbox, 0, sizeof(Mailbox)));
    NATIVE_CHECK(cudaMemcpy(state.control, &fresh, sizeof(fresh), cudaMemcpyHostToDevice));
    std::memset(static_cast<void*>(state.error), 0, sizeof(ErrorRecord));
  }
  Synchronize();
}

void World::LeaveOldFlags(int count) {
  for (const RankState& state : states) {
    NATIVE_CHECK(cudaSetDevice(state.device));
    const MemoryTable& table = generations_.back()[state.rank];
    Control control{};
    NATIVE_CHECK(cudaMemcpy(&control, state.control, sizeof(control), cudaMemcpyDeviceToHost));
    std::vector<uint32_t> old[2];  // by half
    uint32_t epoch = NextEpoch(NextEpoch(control.epoch));
    for (int i = 0; i < 2 * count; ++i) epoch = NextEpoch(epoch), old[epoch & 1].push_back(epoch);
    for (int half = 0; half < 2; ++half) {
      std::vector<uint32_t> flags(table.flag_bytes / 4);
      for (size_t i = 0; i < flags.size(); ++i) flags[i] = old[half][i % count];
      char* const to = table.staging[state.rank] + half * (table.flag_bytes + table.data_bytes);
      NATIVE_CHECK(cudaMemcpy(to, flags.data(), table.flag_bytes, cudaMemcpyHostToDevice));
    }
    for (size_t i = 0; i < std::size(control.started); ++i) control.started[i] = old[i & 1][i / 2 % count];
    NATIVE_CHECK(cudaMemcpy(state.control, &control, sizeof(control), cudaMemcpyHostToDevice));
  }
}

void World::Synchronize() {
  for (const RankState& state : states) {
    NATIVE_CHECK(cudaSetDevice(state.device));
    NATIVE_CHECK(cudaDeviceSynchronize());
  }
}
uint64_t World::Wrong() {
  Synchronize();
  uint64_t sum = 0;
  for (const RankState& state : states) {
    uint32_t wrong = 0;
    NATIVE_CHECK(cudaMemcpy(&wrong, state.wrong, 4, cudaMemcpyDeviceToHost));
    sum += wrong;
  }
  return sum;
}
Bytes World::Staged(int rank) {
  const MemoryTable& table = generations_.back()[rank];
  Bytes out(2 * (table.flag_bytes + table.data_bytes));
  NATIVE_CHECK(cudaMemcpyAsync(out.data(), table.staging[rank], out.size(), cudaMemcpyDeviceToHost, states[rank].side));
  NATIVE_CHECK(cudaStreamSynchronize(states[rank].side));
  return out;
}
std::string World::Picture() {
  std::string out;
  for (const RankState& state : states) {
    Control control{};
    Mailbox mailbox{};
    NATIVE_CHECK(cudaMemcpy(&control, state.control, sizeof(control), cudaMemcpyDeviceToHost));
    NATIVE_CHECK(cudaMemcpy(&mailbox, state.mailbox, sizeof(mailbox), cudaMemcpyDeviceToHost));
    char text[200];
    std::snprintf(text, sizeof(text), " [rank %d: epoch %u owner %u shows %016llx failure %016llx hears", state.rank,
                  control.epoch, control.owner, static_cast<unsigned long long>(mailbox.progress),
                  static_cast<unsigned long long>(mailbox.failure));
    out += text;
    for (int r = 0; r < ranks(); ++r) {
      out += " " + std::to_string(AnnouncedEpoch(mailbox.announcements[0][r])) + "/" +
             std::to_string(AnnouncedEpoch(mailbox.announcements[1][r]));
    }
    out += "]";
  }
  return out;
}
void World::ClearWrong() {
  for (const RankState& state : states) NATIVE_CHECK(cudaMemset(state.wrong, 0, 4));
}

Prepared* World::Add(const Problem& problem, const RankCase& c, int rank, uint32_t call_id, double timeout_s) {
  const uint64_t ns = static_cast<uint64_t>(timeout_s * 1e9);
  prepared_.push_back(std::make_unique<Prepared>(problem, c, states[rank], call_id, ns));
  return prepared_.back().get();
}
std::vector<Prepared*> World::AddAll(const Problem& problem, double timeout_s, uint32_t call_id) {
  const std::vector<RankCase> cases = Reference(problem);
  if (call_id == 0) call_id = next_call_++;
  std::vector<Prepared*> out;
  for (int r = 0; r < ranks(); ++r) out.push_back(Add(problem, cases[r], r, call_id, timeout_s));
  return out;
}

}  // namespace native
