#include "ffi/nccl_memory.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "ffi/nccl_api.h"

namespace xen_moe {
namespace {

using Clock = std::chrono::steady_clock;

// Wait this long after the death of a process before giving up on NCCL: NCCL may notice the closed connection by
// itself, and its own error text says more.
constexpr double kGraceSeconds = 2.0;

// The reason for which the last failed call of this thread failed.
thread_local std::string reason;

// Called when this process gives up on NCCL, of which a thread may still work. At exit the destructors of NCCL and CUDA
// would free what that thread uses, so from now on the process ends without the destructors of all libraries that it
// has loaded up to here. Its exit status and what it has written remain.
void EndWithoutDestructors() {
  [[maybe_unused]] static const int once = on_exit(
      [](int status, void*) {
        std::fflush(nullptr);
        _exit(status);
      },
      nullptr);
}

class Nccl {
 public:
  static Nccl& Get() {
    static Nccl* nccl = new Nccl;  // never destroyed: the driver may go first at exit
    return *nccl;
  }

  int Load(const std::string& path) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!api_ || path != path_) {
      const NcclApi opened = NcclApi::Open(path);
      if (comm_ != nullptr) Refuse("NCCL was started from " + path_);
      api_ = opened, path_ = path;
    }
    int version = 0;
    Check(api_->GetVersion(&version), "ncclGetVersion");
    return version;
  }

  std::string NewId() {
    NcclUniqueId id;
    Check(Loaded().GetUniqueId(&id), "ncclGetUniqueId");
    return {id.bytes, sizeof(id.bytes)};
  }

  void Start(Devices* gpus, int ordinal, int process, int num_processes, const std::string& id, double seconds) {
    if (id.size() != kNcclUniqueIdBytes) Refuse("an NCCL unique id has 128 bytes, not " + std::to_string(id.size()));
    if (comm_ != nullptr) Refuse("NCCL was started before");
    gpus_ = gpus, ordinal_ = ordinal, process_ = process;
    NcclUniqueId unique_id;
    std::memcpy(unique_id.bytes, id.data(), id.size());
    const OnGpu on(*this);
    NcclConfig config;
    const int rc = Loaded().CommInitRankConfig(&comm_, num_processes, unique_id, process, &config);
    const std::string failed = Finish(rc, "ncclCommInitRankConfig", seconds);
    if (failed.empty()) return;
    Abort();
    Refuse("NCCL did not start in process " + std::to_string(process) + ": " + failed);
  }

  void* Allocate(uint64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!broken_.empty()) {
      reason = broken_;
      return nullptr;
    }
    const OnGpu on(*this);
    void* memory = nullptr;
    const int rc = Loaded().MemAlloc(&memory, bytes);
    if (rc != kNcclSuccess) {
      // NCCL returns the same code for every failed call of CUDA. Its text says whether memory is lacking.
      reason = Text(rc, "ncclMemAlloc");
      if (reason.find("out of memory") != std::string::npos) {
        reason += ". JAX preallocates most of the GPU's memory: lower XLA_CLIENT_MEM_FRACTION, or num_tokens or hidden";
      }
      return nullptr;
    }
    blocks_[memory] = Block{bytes, nullptr};
    return memory;
  }

  void Discard(void* own) {
    std::lock_guard<std::mutex> lock(mutex_);
    const OnGpu on(*this);
    blocks_.erase(own);
    Loaded().MemFree(own);
  }

  // Called by one thread at a time: the tickets of agreements order the calls.
  bool Join(void* own, double seconds) {
    uint64_t bytes = 0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!broken_.empty()) {
        reason = broken_;
        return false;
      }
      bytes = blocks_.at(own).bytes;
    }
    const OnGpu on(*this);
    // On the heap, and leaked after a failure: NCCL writes to it when it has finished, perhaps after this call has
    // given up.
    auto* window = new NcclWindow*(nullptr);
    const int rc = Loaded().CommWindowRegister(comm_, own, bytes, window, kNcclWindowSymmetric);
    std::string failed = Finish(rc, "ncclCommWindowRegister", seconds);
    if (failed.empty() && *window == nullptr) {
      failed =
          "NCCL has no windows between these GPUs: they need peer access over NVLink or PCIe, and CUDA's virtual "
          "memory "
          "functions (NCCL_CUMEM_ENABLE=0 must not be set)";
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (failed.empty()) {
      blocks_.at(own).window = *window;
      delete window;
      return true;
    }
    Break("NCCL could not show memory to the other processes: " + failed);
    return false;
  }

  // Called by one thread at a time, as Join is.
  std::string JoinDevices(const std::string& requirements, size_t device_comm_bytes, double seconds) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!broken_.empty()) Refuse(broken_);
      if (comm_ == nullptr) Refuse("NCCL was not started");
    }
    const OnGpu on(*this);
    // On the heap, and leaked after a failure: NCCL may read and write them after this call has given up.
    auto* const asked = new std::string(requirements);
    auto* const made = new std::string(device_comm_bytes, '\0');
    const int rc = Loaded().DevCommCreate(comm_, asked->data(), made->data());
    const std::string failed = Finish(rc, "ncclDevCommCreate", seconds);
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failed.empty()) {
      Break("NCCL could not connect the GPUs with those of other nodes: " + failed);
      Refuse(broken_);
    }
    const std::string out = *made;
    delete asked;
    delete made;
    return out;
  }

  void Query(std::string* properties) {
    if (comm_ == nullptr) Refuse("NCCL was not started");
    const OnGpu on(*this);
    Check(Loaded().CommQueryProperties(comm_, properties->data()), "ncclCommQueryProperties");
  }

  NcclWindow* Window(void* own) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = blocks_.find(own);
    return found == blocks_.end() ? nullptr : found->second.window;
  }

  void Release(void* own) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = blocks_.find(own);
    if (found == blocks_.end() || !broken_.empty()) return;  // NCCL may still work on the block: it is leaked
    const OnGpu on(*this);
    if (Loaded().CommWindowDeregister(comm_, found->second.window) != kNcclSuccess) return;
    blocks_.erase(found);
    Loaded().MemFree(own);
  }

  void* Peer(void* own, int process) {
    if (process == process_) return own;
    std::lock_guard<std::mutex> lock(mutex_);
    void* theirs = nullptr;
    NcclWindow* const window = blocks_.at(own).window;
    return Loaded().GetPeerDevicePointer(window, 0, process, &theirs) == kNcclSuccess ? theirs : nullptr;
  }

  void Lost(int process) {
    int none = -1;
    lost_.compare_exchange_strong(none, process);
  }

 private:
  struct Block {
    uint64_t bytes = 0;
    NcclWindow* window = nullptr;
  };
  // Makes NCCL's GPU the calling thread's GPU, as NCCL's functions require.
  struct OnGpu {
    Devices* gpus;
    int before;
    explicit OnGpu(const Nccl& nccl) : gpus(nccl.gpus_), before(gpus->Select(nccl.ordinal_)) {}
    ~OnGpu() {
      try {
        gpus->Select(before);
      } catch (const MemoryError&) {  // the process is ending
      }
    }
  };

  const NcclApi& Loaded() const {
    if (!api_) Refuse("NCCL was not loaded");
    return *api_;
  }
  std::string Text(int rc, const char* what) const {
    const char* last = api_->GetLastError(nullptr);
    std::string out = std::string(what) + ": " + api_->GetErrorString(rc);
    if (last != nullptr && *last != '\0') out += std::string(" (") + last + ")";
    return out;
  }
  void Check(int rc, const char* what) const {
    if (rc != kNcclSuccess) Refuse(Text(rc, what));
  }

  // Waits for the call `what`, which has returned `rc`. Returns "", or why the call failed. A successful `rc` says only
  // that the call was begun: NCCL may return success for work that is still in progress.
  std::string Finish(int rc, const char* what, double seconds) const {
    if (rc != kNcclSuccess && rc != kNcclInProgress) return Text(rc, what);
    const auto began = Clock::now();
    std::optional<Clock::time_point> grace;
    while (true) {
      const int asked = api_->CommGetAsyncError(comm_, &rc);
      if (asked != kNcclSuccess) rc = asked;
      if (rc != kNcclInProgress) return rc == kNcclSuccess ? "" : Text(rc, what);
      const auto now = Clock::now();
      const int lost = lost_.load();
      if (lost >= 0 && !grace) grace = now + std::chrono::milliseconds(static_cast<int>(1000 * kGraceSeconds));
      if (grace && now >= *grace)
        return std::string(what) + " waits for process " + std::to_string(lost) + ", which has died";
      if (now - began > std::chrono::duration<double>(seconds)) {
        return std::string(what) + " had not ended after " + std::to_string(static_cast<int>(seconds)) +
               " s: another process is stopped, or does not run the same program";
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  // Called with `mutex_` held after a collective step has failed here. This process cannot know which other processes
  // believe that the step succeeded, so it makes no further windows.
  void Break(const std::string& why) {
    EndWithoutDestructors();
    broken_ = reason = why + ". Memory between processes cannot grow any more; start all processes of the job again";
    bool unused = true;
    for (const auto& block : blocks_) unused = unused && block.second.window == nullptr;
    if (unused) Abort();  // where windows exist, kernels may use memory that an abort would unmap
  }

  // Ends the work of NCCL's threads, on a thread that no one joins.
  void Abort() {
    NcclComm* const comm = comm_;
    comm_ = nullptr;
    if (comm == nullptr) return;
    EndWithoutDestructors();
    std::thread([this, comm] {
      try {
        const OnGpu on(*this);
        api_->CommAbort(comm);
      } catch (const MemoryError&) {  // the process is ending
      }
    }).detach();
  }

  std::optional<NcclApi> api_;
  std::string path_;
  Devices* gpus_ = nullptr;
  int ordinal_ = 0, process_ = 0;
  NcclComm* comm_ = nullptr;
  std::atomic<int> lost_{-1};  // the first process that has died
  std::mutex mutex_;
  std::map<void*, Block> blocks_;
  std::string broken_;  // why this process makes no further windows; empty: it does
};

bool Connect(const std::string& request, std::string* made, double seconds) {
  try {
    *made = Nccl::Get().JoinDevices(request, made->size(), seconds);
    return true;
  } catch (const MemoryError& e) {
    const std::string prefix = "xen_moe_jax: ";
    reason = e.message.compare(0, prefix.size(), prefix) == 0 ? e.message.substr(prefix.size()) : e.message;
    return false;
  }
}

MemoryProvider provider{
    "NCCL",
    0,
    [](uint64_t bytes) { return Nccl::Get().Allocate(bytes); },
    [](void* own, double seconds) { return Nccl::Get().Join(own, seconds); },
    [](void* own) { Nccl::Get().Discard(own); },
    [](void* own) { Nccl::Get().Release(own); },
    [](void* own, int process) { return Nccl::Get().Peer(own, process); },
    [] { return reason.c_str(); },
    [](int process) { Nccl::Get().Lost(process); },
    Connect,
    [](void* own) -> void* { return Nccl::Get().Window(own); },
};

template <class F>
void Find(void* library, const std::string& path, const char* name, F* f) {
  *f = reinterpret_cast<F>(dlsym(library, name));
  if (*f == nullptr) Refuse(path + " has no " + name + ": it is not NCCL, or one that is too old");
}

}  // namespace

NcclApi NcclApi::Open(const std::string& path) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) Refuse("NCCL cannot be loaded: " + std::string(dlerror()));
  NcclApi api{};
  Find(library, path, "ncclGetVersion", &api.GetVersion);
  Find(library, path, "ncclGetUniqueId", &api.GetUniqueId);
  Find(library, path, "ncclCommInitRankConfig", &api.CommInitRankConfig);
  Find(library, path, "ncclCommGetAsyncError", &api.CommGetAsyncError);
  Find(library, path, "ncclCommAbort", &api.CommAbort);
  Find(library, path, "ncclMemAlloc", &api.MemAlloc);
  Find(library, path, "ncclMemFree", &api.MemFree);
  Find(library, path, "ncclCommWindowRegister", &api.CommWindowRegister);
  Find(library, path, "ncclCommWindowDeregister", &api.CommWindowDeregister);
  Find(library, path, "ncclGetPeerDevicePointer", &api.GetPeerDevicePointer);
  Find(library, path, "ncclDevCommCreate", &api.DevCommCreate);
  Find(library, path, "ncclCommQueryProperties", &api.CommQueryProperties);
  Find(library, path, "ncclGetErrorString", &api.GetErrorString);
  Find(library, path, "ncclGetLastError", &api.GetLastError);
  return api;
}

int LoadNccl(const std::string& path) { return Nccl::Get().Load(path); }
std::string NewNcclId() { return Nccl::Get().NewId(); }
void StartNccl(Devices* gpus, int ordinal, int process, int num_processes, const std::string& id, double seconds) {
  Nccl::Get().Start(gpus, ordinal, process, num_processes, id, seconds);
  provider.num_processes = num_processes;
}
const MemoryProvider* NcclProvider() { return &provider; }
std::string JoinNcclDevices(const std::string& requirements, size_t device_comm_bytes, double seconds) {
  return Nccl::Get().JoinDevices(requirements, device_comm_bytes, seconds);
}
void QueryNccl(std::string* properties) { Nccl::Get().Query(properties); }
NcclWindow* NcclWindowOf(void* own) { return Nccl::Get().Window(own); }

}  // namespace xen_moe
