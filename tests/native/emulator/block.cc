// Runs a thread block on a host thread: README.md describes the model.
//
// Each thread of the block has a stack, and gives way when it polls memory or waits at a barrier.
#include "block.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

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

[[noreturn]] void Broken(const char* what) {
  std::fprintf(stderr, "emulator: %s\n", what);
  std::abort();
}

namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr int kThreads = 1024;  // of a block, at most
constexpr int kBarriers = 16;

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
// Dynamic shared memory, and where addresses count from.
alignas(256) thread_local char shared_window[kMostShared + 512];

// No thread of a block runs on these. A host thread keeps none between two blocks: there may be hundreds of host
// threads, each stack is two of the 65,530 mappings that Linux gives a process, and few blocks run at one time.
std::mutex stacks_mutex;
std::vector<Stack*>& idle_stacks = *new std::vector<Stack*>;  // blocks may run until the process has ended
thread_local std::vector<Stack*> stacks;                      // of this block

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

void TakeStacks(size_t count) {
  std::lock_guard<std::mutex> lock(stacks_mutex);
  const auto first = idle_stacks.end() - std::min(count, idle_stacks.size());
  stacks.assign(first, idle_stacks.end());
  idle_stacks.erase(first, idle_stacks.end());
}

void ReturnStacks() {
  std::lock_guard<std::mutex> lock(stacks_mutex);
  idle_stacks.insert(idle_stacks.end(), stacks.begin(), stacks.end());
  stacks.clear();
}

}  // namespace

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
  TakeStacks(count);
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
  ReturnStacks();
  block = nullptr;
}

// -- functions that threads call --------------------------------------------------------------------------------------

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

}  // namespace emulator
