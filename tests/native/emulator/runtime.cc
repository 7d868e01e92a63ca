// GPUs, streams and the CUDA runtime's functions: README.md describes the model.
//
// A GPU has a given number of multiprocessors, each of which holds one block; blocks wait for a free one in the order
// in which their kernels reached the GPU. A stream is a host thread that runs its work in order.
#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "block.h"

namespace emulator {
namespace {

constexpr int kGpus = 256;

int Setting(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value ? std::atoi(value) : otherwise;
}
int Multiprocessors() {
  static const int count = std::max(1, Setting("EMULATOR_SMS", 64));
  return count;
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

// -- streams ----------------------------------------------------------------------------------------------------------

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
