// A stand-in for libnccl.so.2 over host memory, with the functions that ffi/nccl_api.h names. Processes meet in a
// folder that the unique id names, and map each other's memory through /proc. Like NCCL: a call that is begun ends on a
// thread of its own, a window is collective, and a rank that waits for a process that has died or aborted gets an
// error.
//
// Tests set its behaviour through fake_nccl_set, in the process that has loaded it:
//   version       result of ncclGetVersion; also FAKE_NCCL_VERSION in the environment
//   fail_alloc    number of calls of ncclMemAlloc before one fails; -1: none
//   full          1: a call that `fail_alloc` lets fail has run out of memory; 0: it fails for another reason
//   stall         a window is not begun until this is 0 again; 2: not even an abort ends the call
//   deaf          deaths and aborts of processes are not noticed
//   no_windows    the GPUs have no peer access: a window ends well and is null
//   far_rank      this rank shares no NVLink: no pointer to its memory; -1: none
//   node_ranks    number of consecutive ranks that share NVLink, and have no pointer to others; 0: all
// and ask through fake_nccl_get: windows, blocks (bytes allocated), aborted.
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace {

enum Result {
  kSuccess = 0,
  kCudaError = 1,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7
};

std::mutex mutex;
std::map<std::string, long> knobs = {{"version", 23203}, {"fail_alloc", -1}, {"full", 1},      {"stall", 0},
                                     {"deaf", 0},        {"no_windows", 0},  {"far_rank", -1}, {"windows", 0},
                                     {"blocks", 0},      {"aborted", 0},     {"node_ranks", 0}};
std::string last_error;

long Knob(const char* name) {
  std::lock_guard<std::mutex> lock(mutex);
  return knobs.at(name);
}
void Add(const char* name, long value) {
  std::lock_guard<std::mutex> lock(mutex);
  knobs.at(name) += value;
}
int Fail(int result, const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex);
  last_error = why;
  return result;
}
// How many calls are in progress. NCCL crashes at exit beside them, so this library does.
std::atomic<int> in_progress{0};
struct AtExit {
  ~AtExit() {
    if (in_progress != 0) raise(SIGSEGV);
  }
} at_exit;
void Pause() { std::this_thread::sleep_for(std::chrono::milliseconds(2)); }

bool Alive(int process) {
  std::ifstream in("/proc/" + std::to_string(process) + "/stat");
  std::string stat;
  std::getline(in, stat);
  const size_t at = stat.rfind(')');
  return at != std::string::npos && stat[at + 2] != 'Z';
}

struct Memory {
  int file = -1;
  size_t bytes = 0;
  int windows = 0;
};
std::map<void*, Memory> memory;

}  // namespace

struct Id {
  char bytes[128];
};
struct Config {
  size_t size;
  unsigned magic, version;
  int blocking;
};

struct Window {
  std::vector<void*> peers;
  std::vector<size_t> sizes;
  int rank;
  void* own;
};

struct Comm {
  std::string folder;
  int rank = 0, ranks = 0, windows = 0, devices = 0;
  std::vector<int> processes;
  std::atomic<int> state{kInProgress};
  std::atomic<bool> aborted{false};
  std::thread work;

  std::string Path(const std::string& what, int of) const { return folder + "/" + what + "-" + std::to_string(of); }
  // Publishes `words` under a name, waits until all processes have done so, and returns the words of all.
  int AllGather(const std::string& what, const std::string& words, std::vector<std::string>* gathered) {
    const std::string part = Path(what, rank) + ".part";
    std::ofstream(part) << words << "\n";
    std::rename(part.c_str(), Path(what, rank).c_str());
    gathered->assign(ranks, "");
    for (int other = 0; other < ranks; ++other) {
      while (true) {
        std::ifstream in(Path(what, other));
        if (in && std::getline(in, (*gathered)[other])) break;
        const bool known = other < static_cast<int>(processes.size());
        const bool gone = (known && !Alive(processes[other])) || access(Path("aborted", other).c_str(), F_OK) == 0;
        if (gone && Knob("deaf") == 0) return Fail(kRemoteError, "rank " + std::to_string(other) + " closed");
        if (aborted) return Fail(kInvalidUsage, "aborted");
        Pause();
      }
    }
    return kSuccess;
  }
  void Begin(int (*job)(Comm*, void*, size_t, Window**), void* own, size_t bytes, Window** out) {
    if (work.joinable()) work.join();
    state = kInProgress;
    ++in_progress;
    work = std::thread([=, this] {
      state = job(this, own, bytes, out);
      --in_progress;
    });
  }
};

namespace {

int Init(Comm* comm, void*, size_t, Window**) {
  std::vector<std::string> gathered;
  const int rc = comm->AllGather("process", std::to_string(getpid()), &gathered);
  if (rc != kSuccess) return rc;
  for (const std::string& one : gathered) comm->processes.push_back(std::atoi(one.c_str()));
  return kSuccess;
}

int Register(Comm* comm, void* own, size_t bytes, Window** out) {
  while (Knob("stall") != 0 && (Knob("stall") == 2 || !comm->aborted)) Pause();
  int file = -1;
  {
    std::lock_guard<std::mutex> lock(mutex);
    file = memory.at(own).file;
  }
  std::vector<std::string> gathered;
  const std::string name = "window-" + std::to_string(comm->windows++);
  int rc = comm->AllGather(name, std::to_string(file) + " " + std::to_string(bytes), &gathered);
  if (rc != kSuccess) return rc;
  auto* window = new Window{{}, {}, comm->rank, own};
  for (int rank = 0; rank < comm->ranks; ++rank) {
    std::istringstream in(gathered[rank]);
    int theirs = -1;
    size_t size = 0;
    in >> theirs >> size;
    const std::string path = "/proc/" + std::to_string(comm->processes[rank]) + "/fd/" + std::to_string(theirs);
    const int opened = open(path.c_str(), O_RDWR);
    void* at = opened < 0 ? MAP_FAILED : mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, opened, 0);
    if (opened >= 0) close(opened);
    if (at == MAP_FAILED) return Fail(kRemoteError, "cannot map " + path);
    window->peers.push_back(at);
    window->sizes.push_back(size);
  }
  rc = comm->AllGather(name + "-mapped", "yes", &gathered);  // a file may be closed once all have it mapped
  if (rc != kSuccess) return rc;
  if (Knob("no_windows") != 0) return kSuccess;
  Add("windows", 1);
  std::lock_guard<std::mutex> lock(mutex);
  ++memory.at(own).windows;
  *out = window;
  return kSuccess;
}

// A device communicator: all have to ask for the same.
int Connect(Comm* comm, void* requirements, size_t bytes, Window** out) {
  while (Knob("stall") != 0 && !comm->aborted) Pause();
  std::string words;
  for (size_t i = 0; i < bytes; ++i) words += std::to_string(static_cast<unsigned char*>(requirements)[i]) + " ";
  std::vector<std::string> gathered;
  const int rc = comm->AllGather("devices-" + std::to_string(comm->devices++), words, &gathered);
  if (rc != kSuccess) return rc;
  for (const std::string& one : gathered) {
    if (one != words) return Fail(kInvalidUsage, "ranks ask for different device communicators");
  }
  int* const made = reinterpret_cast<int*>(out);
  made[0] = comm->rank, made[1] = comm->ranks;
  return kSuccess;
}

}  // namespace

extern "C" {

void fake_nccl_set(const char* name, long value) {
  std::lock_guard<std::mutex> lock(mutex);
  knobs.at(name) = value;
}
long fake_nccl_get(const char* name) { return Knob(name); }
// True if this process has allocated the block, as opposed to mapped it.
long fake_nccl_owns(void* block) {
  std::lock_guard<std::mutex> lock(mutex);
  return static_cast<long>(memory.count(block));
}

// Does a kernel's put: into the memory behind a window, on any node.
void fake_nccl_put(Window* window, int rank, size_t offset, const void* from, size_t bytes) {
  std::memcpy(static_cast<char*>(window->peers.at(rank)) + offset, from, bytes);
}

int ncclGetVersion(int* version) {
  const char* told = std::getenv("FAKE_NCCL_VERSION");
  *version = told != nullptr ? std::atoi(told) : static_cast<int>(Knob("version"));
  return kSuccess;
}
const char* ncclGetErrorString(int result) {
  switch (result) {
    case kCudaError:
      return "unhandled cuda error";
    case kInvalidArgument:
      return "invalid argument";
    case kInvalidUsage:
      return "invalid usage";
    case kRemoteError:
      return "remote process exited or there was a network error";
  }
  return "unknown result";
}
const char* ncclGetLastError(Comm*) {
  static thread_local std::string copy;
  std::lock_guard<std::mutex> lock(mutex);
  copy = last_error;
  return copy.c_str();
}

int ncclGetUniqueId(Id* id) {
  std::memset(id, 0, sizeof(*id));
  std::snprintf(id->bytes, sizeof(id->bytes), "/tmp/fake_nccl_XXXXXX");
  return mkdtemp(id->bytes) == nullptr ? Fail(kCudaError, "mkdtemp") : kSuccess;
}

int ncclCommInitRankConfig(Comm** out, int ranks, Id id, int rank, Config* config) {
  if (config->magic != 0xcafebeef || config->size != 120 || config->version < 23100)
    return Fail(kInvalidArgument, "the configuration is not of 2.31");
  if (config->blocking != 0) return Fail(kInvalidArgument, "the communicator would wait without a limit");
  auto* comm = new Comm;
  comm->folder = id.bytes, comm->rank = rank, comm->ranks = ranks;
  *out = comm;
  comm->Begin(Init, nullptr, 0, nullptr);
  return kInProgress;
}
int ncclCommGetAsyncError(Comm* comm, int* state) {
  *state = comm->state;
  return kSuccess;
}
int ncclCommAbort(Comm* comm) {
  std::ofstream(comm->Path("aborted", comm->rank)) << "yes\n";
  comm->aborted = true;
  comm->work.join();
  Add("aborted", 1);
  return kSuccess;
}

int ncclMemAlloc(void** out, size_t bytes) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (knobs.at("fail_alloc") >= 0 && knobs.at("fail_alloc")-- == 0) {
      last_error = knobs.at("full") ? "Cuda failure 2 'out of memory'" : "Cuda failure 801 'operation not supported'";
      return kCudaError;
    }
  }
  const int file = memfd_create("fake_nccl", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return Fail(kCudaError, "memfd_create");
  *out = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (*out == MAP_FAILED) return Fail(kCudaError, "mmap");
  std::memset(*out, 0xAB, bytes);  // nothing may rely on fresh memory
  Add("blocks", static_cast<long>(bytes));
  std::lock_guard<std::mutex> lock(mutex);
  memory[*out] = {file, bytes, 0};
  return kSuccess;
}
int ncclMemFree(void* own) {
  Memory found;
  {
    std::lock_guard<std::mutex> lock(mutex);
    found = memory.at(own);
    if (found.windows != 0) std::abort();  // the window goes first
    memory.erase(own);
  }
  munmap(own, found.bytes);
  close(found.file);
  Add("blocks", -static_cast<long>(found.bytes));
  return kSuccess;
}

int ncclCommWindowRegister(Comm* comm, void* own, size_t bytes, Window** out, int flags) {
  if (flags != 1) return Fail(kInvalidArgument, "not for loads and stores");
  if (comm->state != kSuccess) return Fail(kInvalidArgument, "the communicator has failed or is busy");
  comm->Begin(Register, own, bytes, out);
  return kSuccess;  // as NCCL does of a communicator that does not wait
}
int ncclCommWindowDeregister(Comm* comm, Window* window) {
  if (comm->state != kSuccess) return Fail(kInvalidArgument, "the communicator has failed or is busy");
  for (size_t i = 0; i < window->peers.size(); ++i) munmap(window->peers[i], window->sizes[i]);
  Add("windows", -1);
  std::lock_guard<std::mutex> lock(mutex);
  --memory.at(window->own).windows;
  delete window;
  return kSuccess;
}
// Requirements and the communicator are opaque here, but for their first words (size, magic), as in the real ones. The
// communicator records its request: rank, ranks, then the requirements as far as there is room.
int ncclDevCommCreate(Comm* comm, const void* requirements, void* out) {
  const auto* words = static_cast<const uint64_t*>(requirements);
  if (static_cast<unsigned>(words[1]) != 0xcafebeef) return Fail(kInvalidArgument, "no requirements");
  if (comm->state != kSuccess) return Fail(kInvalidArgument, "the communicator has failed or is busy");
  comm->Begin(Connect, const_cast<void*>(requirements), words[0], static_cast<Window**>(out));
  return kSuccess;  // as of a window
}
int ncclCommQueryProperties(Comm* comm, void* properties) {
  auto* const numbers = static_cast<int*>(properties);  // size, magic and version come first
  if (static_cast<unsigned>(numbers[2]) != 0xcafebeef) return Fail(kInvalidArgument, "no properties");
  numbers[4] = comm->rank, numbers[5] = comm->ranks;
  return kSuccess;
}
int ncclGetPeerDevicePointer(Window* window, size_t offset, int rank, void** out) {
  if (rank == Knob("far_rank")) return Fail(kInvalidUsage, "not a member of the LSA team");
  const int node = static_cast<int>(Knob("node_ranks"));
  if (node != 0 && rank / node != window->rank / node) return Fail(kInvalidUsage, "not a member of the LSA team");
  *out = static_cast<char*>(window->peers.at(rank)) + offset;
  return kSuccess;
}
}
