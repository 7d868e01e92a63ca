// GPUs through the CUDA runtime. Memory comes from the driver's virtual memory functions: unlike cudaMalloc and
// cudaFree they do not wait for running kernels. Such a kernel may wait for a launch that the calling thread has yet to
// make.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstring>
#include <future>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "cuda_kernels/core/cuda_error.h"
#include "cuda_kernels/core/params.h"
#include "cuda_kernels/experts/quantized_rows.h"
#include "cuda_kernels/kernels.h"
#include "ffi/devices.h"

namespace xen_moe {
namespace {

constexpr double kCopySeconds = 30.0;  // a GPU that takes longer for a copy of a few MiB has stopped

std::string Mib(uint64_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

void Check(cudaError_t e, const std::string& what) {
  if (Taken(e) == cudaSuccess) return;
  Refuse(what + ": " + cudaGetErrorString(e));
}

struct DeviceGuard {
  int saved = 0;
  explicit DeviceGuard(int ordinal) {
    Taken(cudaGetDevice(&saved));
    Check(cudaSetDevice(ordinal), "cudaSetDevice(" + std::to_string(ordinal) + ")");
  }
  ~DeviceGuard() { Taken(cudaSetDevice(saved)); }
};

// The driver's functions, found at run time, because the module must load on machines without a driver.
struct Driver {
  decltype(&cuMemGetAllocationGranularity) granularity;
  decltype(&cuMemCreate) create;
  decltype(&cuMemRelease) release;
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) unreserve;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;
  decltype(&cuStreamWaitValue32) wait_value;

  static const Driver& Get() {
    static const Driver driver = [] {
      Driver d;
      Find("cuMemGetAllocationGranularity", &d.granularity);
      Find("cuMemCreate", &d.create);
      Find("cuMemRelease", &d.release);
      Find("cuMemAddressReserve", &d.reserve);
      Find("cuMemAddressFree", &d.unreserve);
      Find("cuMemMap", &d.map);
      Find("cuMemUnmap", &d.unmap);
      Find("cuMemSetAccess", &d.set_access);
      Find("cuStreamWaitValue32", &d.wait_value);
      return d;
    }();
    return driver;
  }

 private:
  template <class F>
  static void Find(const char* name, F* f) {
    cudaDriverEntryPointQueryResult found;
    void* address = nullptr;
    Check(cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &found), name);
    if (found != cudaDriverEntryPointSuccess)
      Refuse(std::string("the driver has no ") + name + ": update it to 525 or later");
    *f = reinterpret_cast<F>(address);
  }
};

void Check(CUresult e, const std::string& what) {
  if (e == CUDA_SUCCESS) return;
  if (e == CUDA_ERROR_OUT_OF_MEMORY) {
    throw MemoryError{true, "xen_moe_jax: " + what +
                                ": not enough GPU memory for the symmetric workspace. JAX preallocates most of it: "
                                "lower XLA_CLIENT_MEM_FRACTION, or lower num_tokens or hidden"};
  }
  Refuse(what + ": CUDA driver error " + std::to_string(static_cast<int>(e)));
}

class Cuda final : public Devices {
 public:
  void Prepare(const std::vector<int>& ordinals, int ranks, int nodes, bool across) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (int ordinal : ordinals) {
      if (gpus_.count(ordinal)) continue;
      DeviceGuard guard(ordinal);
      Gpu gpu;
      Check(cudaFree(nullptr), "creating the CUDA context of GPU " + std::to_string(ordinal));
      Check(cudaStreamCreateWithFlags(&gpu.stream, cudaStreamNonBlocking), "cudaStreamCreate");
      int lowest = 0, highest = 0;  // a free SM runs a block of an asynchronous operation before a block of a matmul
      Check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
      Check(cudaStreamCreateWithPriority(&gpu.flights, cudaStreamNonBlocking, highest), "cudaStreamCreate");
      Check(cudaMalloc(reinterpret_cast<void**>(&gpu.begun), sizeof(uint32_t)), "cudaMalloc");
      Check(cudaMemsetAsync(gpu.begun, 0, sizeof(uint32_t), gpu.stream), "cudaMemset");
      Check(cudaStreamSynchronize(gpu.stream), "cudaStreamSynchronize");
      Check(cudaDeviceGetAttribute(&gpu.sms, cudaDevAttrMultiProcessorCount, ordinal), "cudaDeviceGetAttribute");
      Check(static_cast<cudaError_t>(PreloadKernels(kSmallGroup)), "loading the kernels");
      Check(static_cast<cudaError_t>(PreloadQuantizedRows()), "loading the kernels of quantized weights");
      Check(static_cast<cudaError_t>(PeerKernelsFor(kSmallGroup).preload()), "loading the kernels across nodes");
      gpus_[ordinal] = gpu;
    }
    for (int ordinal : ordinals) {
      if (ranks <= kSmallGroup || (nodes > 1 && across)) continue;
      if (!(nodes > 1 ? large_across_ : large_).insert(ordinal).second) continue;
      DeviceGuard guard(ordinal);
      if (nodes == 1) {
        Check(static_cast<cudaError_t>(PreloadKernels(ranks)), "loading the kernels for many ranks");
      } else {
        Check(static_cast<cudaError_t>(PeerKernelsFor(ranks).preload()),
              "loading the kernels across nodes for many ranks");
      }
    }
    if (page_left_ == 0) AddPage();
  }

  int Select(int ordinal) override {
    int before = 0;
    Check(cudaGetDevice(&before), "cudaGetDevice");
    Check(cudaSetDevice(ordinal), "cudaSetDevice(" + std::to_string(ordinal) + ")");
    return before;
  }

  int SmCount(int ordinal) override { return Find(ordinal).sms; }

  void CheckPeerAccess(int from, int to) override {
    int can = 0;
    Check(cudaDeviceCanAccessPeer(&can, from, to), "cudaDeviceCanAccessPeer");
    if (can) return;
    Refuse("GPU " + std::to_string(from) + " cannot access the memory of GPU " + std::to_string(to) +
           ": the ranks of one axis need NVLink or PCIe peer access between all of them. Use "
           "KernelConfig(backend='reference') on this machine, or a mesh axis over GPUs that `nvidia-smi topo -p2p r` "
           "lists as OK");
  }

  char* Allocate(int ordinal, uint64_t bytes, const std::vector<int>& readers) override {
    const Driver& driver = Driver::Get();
    DeviceGuard guard(ordinal);
    const std::string what = "GPU " + std::to_string(ordinal) + ", " + Mib(bytes);
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = ordinal;
    size_t unit = 0;
    Check(driver.granularity(&unit, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED), what);
    Block block;
    block.bytes = (bytes + unit - 1) / unit * unit;
    Check(driver.create(&block.handle, block.bytes, &properties, 0), what);
    CUresult e = driver.reserve(&block.address, block.bytes, 0, 0, 0);
    if (e != CUDA_SUCCESS) {
      driver.release(block.handle);
      Check(e, what);
    }
    e = driver.map(block.address, block.bytes, 0, block.handle, 0);
    if (e == CUDA_SUCCESS) {
      std::vector<CUmemAccessDesc> access;
      for (int reader : readers) {
        CUmemAccessDesc one{};
        one.location = properties.location;
        one.location.id = reader;
        one.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        access.push_back(one);
      }
      e = driver.set_access(block.address, block.bytes, access.data(), access.size());
      if (e != CUDA_SUCCESS) driver.unmap(block.address, block.bytes);
    }
    if (e != CUDA_SUCCESS) {
      driver.unreserve(block.address, block.bytes);
      driver.release(block.handle);
      Check(e, what);
    }
    char* memory = reinterpret_cast<char*>(block.address);
    std::lock_guard<std::mutex> lock(mutex_);
    blocks_[memory] = block;
    return memory;
  }

  void Free(int, char* memory) override {
    Block block;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = blocks_.find(memory);
      if (found == blocks_.end()) return;
      block = found->second;
      blocks_.erase(found);
    }
    const Driver& driver = Driver::Get();
    driver.unmap(block.address, block.bytes);
    driver.unreserve(block.address, block.bytes);
    driver.release(block.handle);
  }

  // Takes memory out of pages that were pinned before: pinning waits for running kernels, so Prepare pins the first
  // page.
  Pinned AllocatePinned(uint64_t bytes) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (bytes > kPage) Refuse("pinned memory of " + std::to_string(bytes) + " bytes: at most " + std::to_string(kPage));
    auto slot = free_slots_.lower_bound(bytes);
    if (slot != free_slots_.end()) {
      const Pinned memory = slot->second;
      free_slots_.erase(slot);
      std::memset(memory.host, 0, bytes);
      return memory;
    }
    bytes = (bytes + 255) / 256 * 256;
    if (page_left_ < bytes) AddPage();
    const Pinned memory = page_;
    page_.host += bytes;
    page_.device += bytes;
    page_left_ -= bytes;
    slots_[memory.host] = bytes;
    return memory;
  }
  void FreePinned(const Pinned& memory) override {
    std::lock_guard<std::mutex> lock(mutex_);
    free_slots_.emplace(slots_.at(memory.host), memory);
  }

  void Write(int ordinal, void* to, const void* from, uint64_t bytes) override {
    Copy(ordinal, [&](cudaStream_t s) { return cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, s); });
  }
  void Read(int ordinal, void* to, const void* from, uint64_t bytes) override {
    Copy(ordinal, [&](cudaStream_t s) { return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, s); });
  }
  void Zero(int ordinal, void* to, uint64_t bytes) override {
    Copy(ordinal, [&](cudaStream_t s) { return cudaMemsetAsync(to, 0, bytes, s); });
  }

  bool Idle(int ordinal, double seconds) override {
    // cudaDeviceSynchronize has no limit, so another thread calls it. That thread goes on alone when the time is up.
    auto done = std::make_shared<std::promise<bool>>();
    std::future<bool> result = done->get_future();
    std::thread([done, ordinal] {
      const bool ok = cudaSetDevice(ordinal) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess;
      done->set_value(ok);
    }).detach();
    return result.wait_for(std::chrono::duration<double>(seconds)) == std::future_status::ready && result.get();
  }

  void* Fork(int ordinal, void* stream) override {
    const cudaStream_t flights = Find(ordinal).flights;
    const cudaEvent_t here = TakeEvent(ordinal);
    cudaError_t e = cudaEventRecord(here, static_cast<cudaStream_t>(stream));
    if (e == cudaSuccess) e = cudaStreamWaitEvent(flights, here);
    GiveEvent(ordinal, here);  // the event can be recorded again: the wait above is for this record
    Check(e, "starting a flight on GPU " + std::to_string(ordinal));
    return flights;
  }
  Beginning NextBeginning(int ordinal) override {
    std::lock_guard<std::mutex> lock(mutex_);
    Gpu& gpu = gpus_.at(ordinal);
    return {gpu.begun, ++gpu.beginnings};
  }
  void AwaitBeginning(int ordinal, void* stream, const Beginning& beginning) override {
    Check(Driver::Get().wait_value(static_cast<CUstream>(stream), reinterpret_cast<CUdeviceptr>(beginning.word),
                                   beginning.number, CU_STREAM_WAIT_VALUE_GEQ),
          "starting a flight on GPU " + std::to_string(ordinal));
  }
  void* Mark(int ordinal) override {
    const cudaEvent_t mark = TakeEvent(ordinal);
    Check(cudaEventRecord(mark, Find(ordinal).flights), "starting a flight on GPU " + std::to_string(ordinal));
    return mark;
  }
  void Join(int ordinal, void* stream, void* mark) override {
    const cudaEvent_t event = static_cast<cudaEvent_t>(mark);
    const cudaError_t e =
        stream == nullptr ? cudaSuccess : cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), event);
    GiveEvent(ordinal, event);
    Check(e, "finishing a flight on GPU " + std::to_string(ordinal));
  }

 private:
  struct Gpu {
    cudaStream_t stream = nullptr;
    cudaStream_t flights = nullptr;
    int sms = 0;
    uint32_t* begun = nullptr;  // device memory: the number of the last flight that has begun
    uint32_t beginnings = 0;    // how many numbers NextBeginning has given out
  };
  struct Block {
    CUmemGenericAllocationHandle handle = 0;
    CUdeviceptr address = 0;
    size_t bytes = 0;
  };

  Gpu Find(int ordinal) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = gpus_.find(ordinal);
    if (found == gpus_.end()) Refuse("GPU " + std::to_string(ordinal) + " was not prepared");
    return found->second;
  }

  cudaEvent_t TakeEvent(int ordinal) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      std::vector<cudaEvent_t>& free = free_events_[ordinal];
      if (!free.empty()) {
        const cudaEvent_t event = free.back();
        free.pop_back();
        return event;
      }
    }
    DeviceGuard guard(ordinal);
    cudaEvent_t event = nullptr;
    Check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    return event;
  }
  void GiveEvent(int ordinal, cudaEvent_t event) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_events_[ordinal].push_back(event);
  }

  void AddPage() {
    void* host = nullptr;
    void* device = nullptr;
    Check(cudaHostAlloc(&host, kPage, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
    Check(cudaHostGetDevicePointer(&device, host, 0), "cudaHostGetDevicePointer");
    std::memset(host, 0, kPage);
    page_ = {static_cast<char*>(host), static_cast<char*>(device)};
    page_left_ = kPage;
  }

  template <class Enqueue>
  void Copy(int ordinal, Enqueue enqueue) {
    const cudaStream_t stream = Find(ordinal).stream;
    DeviceGuard guard(ordinal);
    Check(enqueue(stream), "copying to or from GPU " + std::to_string(ordinal));
    const auto began = std::chrono::steady_clock::now();
    while (const cudaError_t e = Taken(cudaStreamQuery(stream))) {
      if (e != cudaErrorNotReady) Check(e, "copying to or from GPU " + std::to_string(ordinal));
      if (std::chrono::steady_clock::now() - began > std::chrono::duration<double>(kCopySeconds)) {
        Refuse("GPU " + std::to_string(ordinal) + " did not finish a small copy within 30 s");
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  std::mutex mutex_;
  std::map<int, Gpu> gpus_;
  std::set<int> large_, large_across_;  // GPUs on which the kernels for many ranks are loaded: of one node, of several
  std::map<char*, Block> blocks_;
  static constexpr uint64_t kPage = 256 * 1024;
  Pinned page_;  // the unused end of the newest page, `page_left_` bytes
  uint64_t page_left_ = 0;
  std::map<int, std::vector<cudaEvent_t>> free_events_;
  std::map<char*, uint64_t> slots_;             // bytes of each piece of pinned memory that was given out
  std::multimap<uint64_t, Pinned> free_slots_;  // pieces that were given back, by bytes
};

}  // namespace

Devices& CudaDevices() {
  static Cuda* cuda = new Cuda;  // never destroyed: at exit the driver may end first
  return *cuda;
}

}  // namespace xen_moe
