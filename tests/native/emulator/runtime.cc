// Runs thread blocks on host threads: README.md describes the model.
//
// A block runs on one host thread; each of its threads has a stack, and gives way when it polls memory or waits at a
// barrier. A GPU has a given number of multiprocessors, each of which holds one block; blocks wait for a free one in
// the order in which their kernels reached the GPU. A stream is a host thread that runs its work in order.
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_runtime.h"

thread_local uint3 threadIdx, blockIdx;
thread_local dim3 gridDim, blockDim;

#ifdef __x86_64__
using Context = void*;  // the top of a stack: registers that a callee keeps, and where to go on
extern "C" void EmulatorSwitch(Context* from, const Context* to);
asm(R"(
.text
EmulatorSwitch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov (%rsi), %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
#else  // with two system calls
using Context = ucontext_t;
void EmulatorSwitch(Context* from, const Context* to) { swapcontext(from, to); }
#endif

namespace emulator {
namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr int kThreads = 1024;  // of a block, at most
constexpr int kBarriers = 16;
constexpr int kGpus = 256;

int Setting(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value ? std::atoi(value) : otherwise;
}
int Multiprocessors() {
  static const int count = std::max(1, Setting("EMULATOR_SMS", 64));
  return count;
}

[[noreturn]] void Broken(const char* what) {
  std::fprintf(stderr, "emulator: %s\n", what);
  std::abort();
}

// -- a block ----------------------------------------------------------------------------------------------------------

using Threads = uint64_t[kThreads / 64];  // of a block, a bit each

struct Gate {
  int arrived = 0, count = 0, count_before = 0;
  uint64_t opened = 0;
  Threads waiting = {};
};
// Lanes that talk to each other, by the mask that they name.
struct Lanes {
  unsigned mask = 0;
  Gate gate;
  uint64_t values[2][32];
};
struct Copy {
  void* to;
  const void* from;
  size_t bytes, zeros;
};
enum class State { kNew, kReady, kPolls, kSleeps, kWaits, kEnded };
// Where a thread of a block runs, one after the other.
struct Stack {
  char* memory;
  Context context;
};
struct Fiber {
  State state = State::kNew;
  Stack* stack = nullptr;
  uint64_t wakes = 0;
  bool together = false;                  // nothing but a __syncwarp since the last line
  std::vector<std::vector<Copy>> copies;  // groups under way; the last is not committed
};
// Lines that eight lanes are storing or loading: lane i's nth part belongs to the nth line there.
struct Line {
  char bytes[128];
  int parts = 0;  // stored, or taken
};
struct Lines {
  uint64_t begun[8] = {}, first = 0;  // parts that each lane has passed; the number of lines.front()
  std::deque<Line> lines;
};
using LinesAt = std::map<std::pair<int, uintptr_t>, Lines>;  // (eight lanes, address)
struct Block {
  std::vector<Fiber> fibers;
  LinesAt stored, loaded;
  std::vector<std::vector<std::unique_ptr<Lanes>>> warps;
  Gate barriers[kBarriers];
  Threads ready = {};  // those that neither wait at a gate nor have ended
  int current = 0, alive = 0;
  const std::function<void()>* body = nullptr;
  Context scheduler;
  std::minstd_rand random;
};

thread_local Block* block = nullptr;
constexpr int kMostShared = 232448;
alignas(
    256) thread_local char shared_window[kMostShared + 512];  // dynamic shared memory, and where addresses count from

thread_local std::vector<Stack*> stacks;  // of this host thread, that no thread of a block runs on

void GiveWay(State state) {
  Fiber& fiber = block->fibers[block->current];
  fiber.state = state;
  EmulatorSwitch(&fiber.stack->context, &block->scheduler);
}

void Open(Gate& gate) {
  gate.arrived = 0;
  ++gate.opened;
  for (size_t word = 0; word < (block->warps.size() + 1) / 2; ++word) {
    block->ready[word] |= gate.waiting[word];
    gate.waiting[word] = 0;
  }
}

void WaitAt(Gate& gate, int wanted) {
  if (++gate.arrived == wanted) return Open(gate);
  const int word = block->current / 64;
  const uint64_t bit = uint64_t{1} << block->current % 64;
  gate.waiting[word] |= bit;
  block->ready[word] &= ~bit;
  GiveWay(State::kWaits);
}

void RunThread() {
  Block& b = *block;
  (*b.body)();
  AwaitCopies(0);
  b.ready[b.current / 64] &= ~(uint64_t{1} << b.current % 64);
  --b.alive;
  if (b.alive == 0 && !b.stored.empty()) Broken("only some lanes of a line have stored their part");
  Gate& all = b.barriers[0];  // those that wait for the whole block wait for those that have not ended
  if (all.arrived && all.arrived == b.alive) Open(all);
  stacks.push_back(b.fibers[b.current].stack);
  GiveWay(State::kEnded);
}
void Entry() {
  for (;;) RunThread();
}

Stack* MakeStack() {
  static thread_local size_t made = 0;
  void* at = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED || mprotect(at, 4096, PROT_NONE)) Broken("no memory for a thread's stack");
  auto* stack = new Stack{static_cast<char*>(at), {}};
  // Tops of stacks that are a power of two apart would share a few lines of the caches.
  const size_t bytes = kStackBytes - made++ % 64 * 832;
#ifdef __x86_64__
  void** top = reinterpret_cast<void**>(stack->memory + bytes) - 2;
  *top = reinterpret_cast<void*>(&Entry);
  stack->context = top - 6;
#else
  getcontext(&stack->context);
  stack->context.uc_stack.ss_sp = stack->memory;
  stack->context.uc_stack.ss_size = bytes;
  stack->context.uc_link = nullptr;
  makecontext(&stack->context, Entry, 0);
#endif
  return stack;
}

void Resume(Block& b, int thread) {
  Fiber& fiber = b.fibers[thread];
  b.current = thread;
  threadIdx = {static_cast<unsigned>(thread), 0, 0};
  if (fiber.state == State::kNew) {
    if (stacks.empty()) stacks.push_back(MakeStack());
    fiber.stack = stacks.back();
    stacks.pop_back();
  }
  fiber.state = State::kReady;
  EmulatorSwitch(&b.scheduler, &fiber.stack->context);
}

void RunBlock(dim3 grid, unsigned index, dim3 threads, const std::function<void()>& body, unsigned seed) {
  const int count = static_cast<int>(threads.x);
  if (count > kThreads) Broken("a block has at most 1024 threads");
  Block b;
  b.fibers.resize(count);
  b.warps.resize((count + 31) / 32);
  b.alive = count;
  for (int thread = 0; thread < count; ++thread) b.ready[thread / 64] |= uint64_t{1} << thread % 64;
  b.body = &body;
  b.random.seed(seed);
  block = &b;
  gridDim = grid, blockDim = threads;
  blockIdx = {index, 0, 0};
  std::memset(shared_window, 0xA5, 4096);  // unwritten memory holds arbitrary values
  int idle = 0;
  while (b.alive) {
    bool went_on = false, sleeps_only = true;
    const uint64_t now = NowNs();
    const int first = static_cast<int>(b.random() % count);
    // From a random one on to the end, then from the beginning.
    for (int at = first; at < first + count;) {
      const int thread = at < count ? at : at - count;
      const uint64_t left = b.ready[thread / 64] >> thread % 64;
      const int skipped = left ? __builtin_ctzll(left) : 64 - thread % 64;
      if (skipped) {
        at = std::min(at + skipped, at < count ? count : first + count);
        continue;
      }
      ++at;
      Fiber& fiber = b.fibers[thread];
      if (fiber.state == State::kSleeps && now < fiber.wakes) continue;
      const bool polled = fiber.state == State::kPolls;
      Resume(b, thread);
      went_on |= !polled || fiber.state != State::kPolls;
      sleeps_only = false;
    }
    if (sleeps_only) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    } else if (went_on) {
      idle = 0;
    } else if (++idle < 8) {
      std::this_thread::yield();
    } else {  // the longer it waits, the less it takes from blocks that have work
      std::this_thread::sleep_for(std::chrono::microseconds(std::min(20 << std::min((idle - 8) / 8, 4), 320)));
    }
  }
  block = nullptr;
}

// -- a GPU ------------------------------------------------------------------------------------------------------------

struct Kernel {
  dim3 grid, threads;
  std::function<void()> body;
  unsigned started = 0, ended = 0;
};
struct Gpu {
  std::mutex mutex;
  std::condition_variable changed;
  int free = Multiprocessors();
  std::deque<Kernel*> waiting;  // kernels with blocks that have not started
  unsigned blocks = 0;
};
Gpu& GpuOf(int device) {
  static Gpu* const gpus = new Gpu[kGpus];
  return gpus[device];
}

// Host threads that run blocks, one for each block that runs at a time.
struct Workers {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> work;
  int idle = 0;
  void Do(std::function<void()> f) {
    std::lock_guard<std::mutex> lock(mutex);
    work.push_back(std::move(f));
    if (static_cast<int>(work.size()) > idle) std::thread([this] { RunWork(); }).detach();
    changed.notify_one();
  }
  void RunWork() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      ++idle;
      changed.wait(lock, [&] { return !work.empty(); });
      --idle;
      const std::function<void()> f = std::move(work.front());
      work.pop_front();
      lock.unlock();
      f();
      lock.lock();
    }
  }
};
Workers& AllWorkers() {
  static Workers* const workers = new Workers;
  return *workers;
}

// With the GPU's mutex: starts blocks where multiprocessors are free.
void StartBlocks(Gpu& gpu) {
  static const unsigned seed = static_cast<unsigned>(Setting("EMULATOR_SEED", 1));
  while (gpu.free > 0 && !gpu.waiting.empty()) {
    Kernel* kernel = gpu.waiting.front();
    const unsigned index = kernel->started++;
    if (kernel->started == kernel->grid.x) gpu.waiting.pop_front();
    --gpu.free;
    const unsigned own = seed + 7919u * ++gpu.blocks;
    AllWorkers().Do([&gpu, kernel, index, own] {
      RunBlock(kernel->grid, index, kernel->threads, kernel->body, own);
      std::lock_guard<std::mutex> lock(gpu.mutex);
      ++gpu.free;
      ++kernel->ended;
      StartBlocks(gpu);
      gpu.changed.notify_all();
    });
  }
}
void RunKernel(int device, Kernel kernel) {
  Gpu& gpu = GpuOf(device);
  std::unique_lock<std::mutex> lock(gpu.mutex);
  gpu.waiting.push_back(&kernel);
  StartBlocks(gpu);
  gpu.changed.wait(lock, [&] { return kernel.ended == kernel.grid.x; });
}

}  // namespace

// -- functions that threads call
// ----------------------------------------------------------------------------------------

uint64_t NowNs() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}
void Poll() { GiveWay(State::kPolls); }
void Pause(uint64_t ns) {
  block->fibers[block->current].wakes = NowNs() + ns;
  GiveWay(State::kSleeps);
}
void Shake() {
  if (block->random() % 8 == 0) GiveWay(State::kReady);
}
std::mutex& LineMutex(uintptr_t line) {
  static std::mutex mutexes[64];
  return mutexes[line / 128 % 64];
}
Line& NextLine(LinesAt& all, const void* p, bool load, std::pair<int, uintptr_t>* key, int* part) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(p);
  *key = {static_cast<int>(threadIdx.x) / 8, at / 128 * 128};
  *part = static_cast<int>(at / 16 % 8);
  if (*part != static_cast<int>(threadIdx.x % 8)) Broken("a lane moves another part of a line than its own");
  bool& together = block->fibers[block->current].together;
  if (!together) Broken("a line is moved without a __syncwarp before it: lanes that are apart would tear it");
  together = false;
  Lines& lines = all[*key];
  const uint64_t number = lines.begun[*part]++;
  if (number == lines.first + lines.lines.size()) {
    lines.lines.emplace_back();
    if (load) {
      std::lock_guard<std::mutex> lock(LineMutex(key->second));
      std::memcpy(lines.lines.back().bytes, reinterpret_cast<const void*>(key->second), 128);
    }
  }
  return lines.lines[number - lines.first];
}
void EndLine(LinesAt& all, const std::pair<int, uintptr_t>& key) {
  Lines& lines = all[key];
  while (!lines.lines.empty() && lines.lines.front().parts == 8) lines.lines.pop_front(), ++lines.first;
  if (lines.lines.empty()) all.erase(key);
}
void SyncWarp(unsigned mask) {
  Exchange(mask, 0);
  if (mask == 0xFFFFFFFFu) block->fibers[block->current].together = true;
}
uint4 LoadLinePart(const uint4* p) {
  Poll();
  std::pair<int, uintptr_t> key;
  int part;
  Line& line = NextLine(block->loaded, p, true, &key, &part);
  uint4 v;
  std::memcpy(&v, line.bytes + 16 * part, 16);
  if (++line.parts == 8) EndLine(block->loaded, key);
  return v;
}
void StoreLinePart(uint4* p, uint4 v) {
  Shake();
  std::pair<int, uintptr_t> key;
  int part;
  Line& line = NextLine(block->stored, p, false, &key, &part);
  std::memcpy(line.bytes + 16 * part, &v, 16);
  if (++line.parts < 8) return;
  {
    std::lock_guard<std::mutex> lock(LineMutex(key.second));
    std::memcpy(reinterpret_cast<void*>(key.second), line.bytes, 128);
  }
  EndLine(block->stored, key);
}
void* DynamicShared() { return shared_window; }
char* SharedWindow() { return shared_window; }
void Barrier(int id, int threads) {
  if (id >= kBarriers) Broken("there are 16 barriers");
  WaitAt(block->barriers[id], threads ? threads : block->alive);
}
int Count(int predicate) {
  Gate& gate = block->barriers[0];
  if (gate.arrived == 0) gate.count = 0;
  gate.count += predicate != 0;
  if (gate.arrived + 1 == block->alive) gate.count_before = gate.count;
  WaitAt(gate, block->alive);
  return gate.count_before;
}
int Vote(int predicate, bool all) { return all ? Count(!predicate) == 0 : Count(predicate) != 0; }
const uint64_t* Exchange(unsigned mask, uint64_t value) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = Lane();
  const int lanes = std::min(32, static_cast<int>(blockDim.x) - 32 * warp);
  if (lanes < 32) mask &= (1u << lanes) - 1;
  if (!(mask >> lane & 1)) Broken("a lane is not in the mask that it names");
  auto& groups = block->warps[warp];
  Lanes* group = nullptr;
  for (const auto& g : groups) {
    if (g->mask == mask) group = g.get();
  }
  if (!group) {
    groups.push_back(std::make_unique<Lanes>());
    group = groups.back().get();
    group->mask = mask;
  }
  uint64_t* values = group->values[group->gate.opened & 1];
  values[lane] = value;
  WaitAt(group->gate, __builtin_popcount(mask));
  return values;
}

// Asynchronous copies are made when a thread waits for them, not before: a thread that forgets to wait reads old
// values.
void CopyLater(void* to, const void* from, size_t bytes, size_t taken) {
  Fiber& fiber = block->fibers[block->current];
  if (fiber.copies.empty()) fiber.copies.emplace_back();
  fiber.copies.back().push_back({to, from, bytes, taken});
}
void CommitCopies() {
  Fiber& fiber = block->fibers[block->current];
  if (fiber.copies.empty()) fiber.copies.emplace_back();
  fiber.copies.emplace_back();
}
void AwaitCopies(int groups_left) {
  auto& copies = block->fibers[block->current].copies;
  while (!copies.empty() && static_cast<int>(copies.size()) - 1 > groups_left) {
    for (const Copy& c : copies.front()) {
      std::memcpy(c.to, c.from, c.zeros);
      std::memset(static_cast<char*>(c.to) + c.zeros, 0, c.bytes - c.zeros);
    }
    copies.erase(copies.begin());
  }
}

// -- streams ----------------------------------------------------------------------------------------------------------

namespace {

using Task = std::function<void()>;
thread_local int current_gpu = 0;

struct Stream {
  int gpu;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Task> tasks;
  bool busy = false, ends = false;
  std::vector<Task>* captured = nullptr;
  std::thread thread;

  explicit Stream(int gpu) : gpu(gpu), thread([this] { RunWork(); }) {}
  ~Stream() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      ends = true;
    }
    changed.notify_all();
    thread.join();
  }
  void RunWork() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return ends || !tasks.empty(); });
      if (tasks.empty()) return;
      const Task task = std::move(tasks.front());
      tasks.pop_front();
      busy = true;
      lock.unlock();
      task();
      lock.lock();
      busy = false;
      changed.notify_all();
    }
  }
  void Put(Task task) {
    std::lock_guard<std::mutex> lock(mutex);
    if (captured) {
      captured->push_back(std::move(task));
    } else {
      tasks.push_back(std::move(task));
      changed.notify_all();
    }
  }
  bool Idle() {
    std::lock_guard<std::mutex> lock(mutex);
    return tasks.empty() && !busy;
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return tasks.empty() && !busy; });
  }
};
struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, done = 0, ns = 0;  // ns: when it was reached
  void Wait(uint64_t number) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return done >= number; });
  }
};
struct Graph {
  std::vector<Task> tasks;
};

std::mutex streams_mutex;
std::set<Stream*> streams;

Stream* Of(cudaStream_t stream) {
  if (stream) return reinterpret_cast<Stream*>(stream);
  static std::mutex mutex;
  static Stream* defaults[kGpus] = {};
  std::lock_guard<std::mutex> lock(mutex);
  Stream*& own = defaults[current_gpu];
  if (!own) {
    own = new Stream(current_gpu);
    std::lock_guard<std::mutex> all(streams_mutex);
    streams.insert(own);
  }
  return own;
}

// Words that a running kernel polls are written whole.
void CopyWords(void* to, const void* from, size_t bytes) {
  if (bytes == 4) {
    __atomic_store_n(static_cast<uint32_t*>(to), *static_cast<const uint32_t*>(from), __ATOMIC_SEQ_CST);
  } else if (bytes == 8) {
    __atomic_store_n(static_cast<uint64_t*>(to), *static_cast<const uint64_t*>(from), __ATOMIC_SEQ_CST);
  } else {
    std::memcpy(to, from, bytes);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
  }
}

// Dynamic shared memory that kernels have asked for, by GPU. CUDA requires the request beyond 48 KiB together with
// static memory, which is smaller here than on a GPU (fewer threads); so the emulator always requires it.
std::mutex granted_mutex;
std::map<std::pair<int, const void*>, size_t> granted;

}  // namespace

thread_local cudaError_t last_error = cudaSuccess;
cudaError_t Refused(cudaError_t e) { return last_error = e; }

cudaError_t Grant(const void* kernel, int shared_bytes) {
  if (shared_bytes > kMostShared) return Refused(cudaErrorInvalidValue);
  std::lock_guard<std::mutex> lock(granted_mutex);
  granted[{current_gpu, kernel}] = static_cast<size_t>(shared_bytes);
  return cudaSuccess;
}

cudaError_t Launch(dim3 grid, dim3 threads, size_t shared_bytes, cudaStream_t stream, const void* kernel,
                   std::function<void()> body) {
  if (static_cast<int>(shared_bytes) > kMostShared) return Refused(cudaErrorInvalidValue);
  {
    std::lock_guard<std::mutex> lock(granted_mutex);
    if (granted[{current_gpu, kernel}] < shared_bytes) {
      Broken("a kernel is launched with dynamic shared memory that it was not granted on this GPU");
    }
  }
  if (grid.y * grid.z * threads.y * threads.z != 1) Broken("grids and blocks have one dimension");
  Stream* const to = Of(stream);
  to->Put([=] { RunKernel(to->gpu, Kernel{grid, threads, body}); });
  return cudaSuccess;
}

}  // namespace emulator

using namespace emulator;

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaGetDeviceCount(int* count) { return *count = kGpus, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kGpus) return Refused(cudaErrorInvalidValue);
  return current_gpu = device, cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) { return *device = current_gpu, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? Multiprocessors() : kMostShared;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t error) {
  thread_local char text[32];
  std::snprintf(text, sizeof(text), "error %d", static_cast<int>(error));
  return text;
}
cudaError_t cudaDeviceSynchronize() {
  std::vector<Stream*> own;
  {
    std::lock_guard<std::mutex> lock(streams_mutex);
    for (Stream* s : streams) {
      if (s->gpu == current_gpu) own.push_back(s);
    }
  }
  for (Stream* s : own) s->Wait();
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** p, size_t bytes) {
  const size_t whole = (bytes + 255) / 256 * 256;
  *p = std::aligned_alloc(256, whole);
  std::memset(*p, 0xA5, whole);
  return cudaSuccess;
}
cudaError_t cudaFree(void* p) { return std::free(p), cudaSuccess; }
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) { return cudaMalloc(p, bytes); }
cudaError_t cudaFreeHost(void* p) { return std::free(p), cudaSuccess; }
cudaError_t cudaMemset(void* p, int value, size_t bytes) { return std::memset(p, value, bytes), cudaSuccess; }
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
  Of(stream)->Put([=] { std::memset(p, value, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  if (kind != cudaMemcpyHostToDevice) {
    Of(stream)->Put([=] { CopyWords(to, from, bytes); });
    return cudaSuccess;
  }
  const auto copy =
      std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
  Of(stream)->Put([=] { CopyWords(to, copy->data(), bytes); });  // pageable memory is read before the call returns
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  Stream* const made = new Stream(current_gpu);
  std::lock_guard<std::mutex> lock(streams_mutex);
  streams.insert(made);
  return *stream = reinterpret_cast<cudaStream_t>(made), cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Stream* const s = Of(stream);
  s->Wait();
  {
    std::lock_guard<std::mutex> lock(streams_mutex);
    streams.erase(s);
  }
  return delete s, cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return Of(stream)->Wait(), cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return Of(stream)->Idle() ? cudaSuccess : Refused(cudaErrorNotReady);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return *status = Of(stream)->captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone, cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return *event = reinterpret_cast<cudaEvent_t>(new Event), cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  const uint64_t from = reinterpret_cast<Event*>(begin)->ns, to = reinterpret_cast<Event*>(end)->ns;
  return *ms = static_cast<float>(to - from) * 1e-6f, cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete reinterpret_cast<Event*>(event), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Stream* const s = Of(stream);
  if (s->captured) return Refused(cudaErrorStreamCaptureUnsupported);  // a graph here is one chain
  Event* const e = reinterpret_cast<Event*>(event);
  std::unique_lock<std::mutex> lock(e->mutex);
  const uint64_t number = ++e->recorded;
  lock.unlock();
  s->Put([=] {
    std::lock_guard<std::mutex> lock(e->mutex);
    e->done = std::max(e->done, number);
    e->ns = emulator::NowNs();
    e->changed.notify_all();
  });
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Event* const e = reinterpret_cast<Event*>(event);
  return e->Wait(e->recorded), cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Event* const e = reinterpret_cast<Event*>(event);
  const uint64_t number = e->recorded;
  Of(stream)->Put([=] { e->Wait(number); });
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  return Of(stream)->captured = new std::vector<Task>, cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Stream* const s = Of(stream);
  if (!s->captured) return Refused(cudaErrorInvalidValue);
  *graph = reinterpret_cast<cudaGraph_t>(new Graph{std::move(*s->captured)});
  delete std::exchange(s->captured, nullptr);
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  return *count = reinterpret_cast<Graph*>(graph)->tasks.size(), cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  return *exec = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph))), cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  for (const Task& task : reinterpret_cast<Graph*>(exec)->tasks) Of(stream)->Put(task);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete reinterpret_cast<Graph*>(graph), cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return delete reinterpret_cast<Graph*>(exec), cudaSuccess; }
