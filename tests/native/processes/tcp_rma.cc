#include "tests/native/processes/tcp_rma.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/native/processes/faults.h"
#include "tests/native/processes/mover.h"
#include "tests/native/processes/rma_interface.h"

namespace rma {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kReorderedPuts = 64;   // among which the next piece is chosen
constexpr size_t kRandomPieces = 3;  // of a put, the first ones; each piece is two copies
constexpr int kConnectSeconds = 30;
constexpr int kMostRanks = 64;

Log log_function = nullptr;
void LogText(int level, const std::string& text) {
  if (log_function != nullptr) {
    log_function(level, ~0ul, "tcp_rma.cc", 0, "%s", text.c_str());
  } else if (level == kLogWarning) {
    std::fprintf(stderr, "tcp_rma: %s\n", text.c_str());
  }
}

// Bytes that the whole process has sent, and the ranks that no longer send.
struct Counted {
  std::atomic<uint64_t> bytes{0}, puts{0}, signals{0};
};
std::array<std::array<Counted, kMostRanks>, kMostRanks> counted;
std::array<std::atomic<bool>, kMostRanks> killed;

Throttle throttle;

struct Request {
  std::atomic<bool> done{false};
};

// On the wire; payload follows a frame without `signal`.
struct Frame {
  uint64_t magic, memory, at, bytes, value, signal;
};
constexpr uint64_t kMagic = 0x78656e2d6d6f6521;

struct Put {
  struct Piece {
    uint64_t begin, end;
    bool again;  // goes once more
  };
  int context = 0;
  Memory source, target, signals;
  uint64_t from = 0, to = 0, bytes = 0, signal_at = 0, value = 0;
  bool signal = false, strong = false;
  Request* request = nullptr;
  std::vector<Piece> pieces;  // that have not gone
  Clock::time_point not_before;
};

struct Listener {
  int fd = -1;
};

bool Transfer(int fd, void* data, size_t bytes, bool out) {
  char* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t n = out ? send(fd, at, bytes, MSG_NOSIGNAL) : recv(fd, at, bytes, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += n, bytes -= static_cast<size_t>(n);
  }
  return true;
}

// The connections of one rank to all ranks of a communicator, itself among them. A thread for each direction of each.
class Group {
 public:
  Group(int rank, int ranks, const Faults& faults) : rank_(rank), faults_(faults), peers_(static_cast<size_t>(ranks)) {}
  ~Group() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    for (Peer& p : peers_) {
      if (p.sender.joinable()) p.sender.join();  // pending puts go out
      for (int fd : {p.out, p.in}) {
        if (fd >= 0) shutdown(fd, SHUT_RDWR);
      }
      if (p.receiver.joinable()) p.receiver.join();
      for (int fd : {p.out, p.in}) {
        if (fd >= 0) close(fd);
      }
    }
  }
  Group(const Group&) = delete;

  void Connect(void* const handles[], const Listener& listener) {
    for (size_t i = 0; i < peers_.size(); ++i) {
      Peer& p = peers_[i];
      int own = rank_;
      p.out = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      if (connect(p.out, static_cast<const sockaddr*>(handles[i]), sizeof(sockaddr_in)) != 0 ||
          !Transfer(p.out, &own, sizeof(own), true)) {
        throw std::runtime_error("no connection to rank " + std::to_string(i) + ": " + std::strerror(errno));
      }
    }
    for (size_t i = 0; i < peers_.size(); ++i) {
      pollfd wait{listener.fd, POLLIN, 0};
      if (poll(&wait, 1, 1000 * kConnectSeconds) != 1) {
        throw std::runtime_error(std::to_string(peers_.size() - i) + " ranks did not connect within " +
                                 std::to_string(kConnectSeconds) + " s");
      }
      const int fd = accept4(listener.fd, nullptr, nullptr, SOCK_CLOEXEC);
      int from = -1;
      if (fd < 0 || !Transfer(fd, &from, sizeof(from), false) || from < 0 || from >= Ranks() || peers_[from].in >= 0) {
        throw std::runtime_error("a connection from outside of this group");
      }
      peers_[from].in = fd;
    }
    for (int i = 0; i < Ranks(); ++i) {
      Peer& p = peers_[i];
      const int on = 1;
      for (int fd : {p.out, p.in}) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
      p.sender = std::thread([this, i] { Run([&] { Send(i); }); });
      p.receiver = std::thread([this, i] { Run([&] { Receive(i); }); });
    }
  }

  int Register(char* base, uint64_t bytes, int kind, void** out) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (kind != kHostMemory && kind != kDeviceMemory) return kInvalidUsage;
    uint64_t mapped = 0;
    try {
      if (kind == kDeviceMemory) mapped = Map(base, bytes);
    } catch (const std::exception& e) {
      LogText(kLogWarning, e.what());
      return kSystemError;
    }
    auto* const memory = new Memory{++last_id_, base, bytes, kind, mapped};
    memory_[memory->id] = *memory;
    *out = memory;
    changed_.notify_all();
    return kSuccess;
  }
  int Unregister(Memory* memory) {
    std::lock_guard<std::mutex> lock(mutex_);  // the caller knows that no rank puts there any more
    const bool known = memory_.erase(memory->id) == 1;
    try {
      if (memory->mapped != 0) copier_->Unmap(memory->mapped);
    } catch (const std::exception& e) {
      LogText(kLogWarning, e.what());
    }
    delete memory;
    return known ? kSuccess : kInvalidArgument;
  }

  int Submit(uint32_t target, Put put, void** request) {
    auto outside = [](const Memory& m, uint64_t at, uint64_t bytes) { return at > m.bytes || bytes > m.bytes - at; };
    if (target >= peers_.size() ||
        (put.bytes && (outside(put.source, put.from, put.bytes) || outside(put.target, put.to, put.bytes)))) {
      LogText(kLogWarning, "a put of " + std::to_string(put.bytes) + " bytes to rank " + std::to_string(target) +
                               " outside its memory");
      return kInvalidArgument;
    }
    if (put.signal && (outside(put.signals, put.signal_at, 8) || put.signal_at % 8)) {
      LogText(kLogWarning, "a signal outside its memory, or not at a multiple of 8 bytes");
      return kInvalidArgument;
    }
    put.request = new Request;
    *request = put.request;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      peers_[target].queue.push_back(std::move(put));
    }
    changed_.notify_all();
    return kSuccess;
  }
  bool failed() const { return failed_; }

 private:
  struct Peer {
    int out = -1, in = -1;
    std::list<Put> queue;  // not yet seen by the sender
    Mover sends, receives;
    std::thread sender, receiver;
  };
  int Ranks() const { return static_cast<int>(peers_.size()); }
  bool Killed(int other) const { return killed[rank_ % kMostRanks] || killed[other % kMostRanks]; }

  // `mutex_` is held, as it is when the threads first hear of memory of a GPU.
  uint64_t Map(char* base, uint64_t bytes) {
    if (copier_ == nullptr) {
      const std::shared_ptr<Copier> copier = Copier::Get();
      for (Peer& p : peers_) p.sends.UseGpu(copier), p.receives.UseGpu(copier);
      copier_ = copier;
    }
    return copier_->Map(base, bytes);
  }

  template <class Body>
  void Run(Body body) {
    try {
      body();
    } catch (const std::exception& e) {
      failed_ = true;
      LogText(kLogWarning, e.what());
    }
  }

  void Send(int target) {
    Peer& peer = peers_[target];
    std::mt19937 random(faults_.seed * 7919 + static_cast<uint32_t>(rank_ * kMostRanks + target));
    std::list<Put> open;  // in the order in which they were put
    while (true) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        if (open.empty()) changed_.wait(lock, [&] { return closing_ || !peer.queue.empty(); });
        if (open.empty() && peer.queue.empty()) return;
        const auto first = peer.queue.begin();
        open.splice(open.end(), peer.queue);
        for (auto put = first; put != open.end() && first != peer.queue.end(); ++put) Cut(*put, random);
        if (closing_ && Killed(target)) return;
      }
      if (Killed(target)) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      } else if (const int step = Step(target, open, random); step < 0) {
        return;  // it is gone
      } else if (step == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
    }
  }
  void Cut(Put& put, std::mt19937& random) const {
    const bool twice = faults_.duplicate;
    for (uint64_t at = 0; at < put.bytes;) {
      uint64_t bytes = std::min<uint64_t>(kPieceBytes, put.bytes - at);
      if (faults_.reorder && put.pieces.size() < kRandomPieces) {
        bytes = std::min<uint64_t>(bytes, 8 + random() % bytes / 8 * 8);  // of an odd size no copy engine is sure
      }
      put.pieces.push_back({at, at + bytes, twice && random() % 4 == 0});
      at += bytes;
    }
    put.not_before = Clock::now();
    if (faults_.most_delay_us > 0) put.not_before += std::chrono::microseconds(random() % faults_.most_delay_us);
  }
  // Sends one piece or one signal. 0: nothing is due; -1: the peer is gone.
  int Step(int target, std::list<Put>& open, std::mt19937& random) {
    const auto now = Clock::now();
    struct Choice {
      std::list<Put>::iterator put;
      size_t piece;  // behind the last: the signal
    };
    std::vector<Choice> choices;
    int looked = 0;
    for (auto put = open.begin(); put != open.end() && looked < kReorderedPuts; ++put, ++looked) {
      const bool due = put->not_before <= now;
      if (due && put->pieces.empty()) {
        if (MaySignal(open, put)) choices.push_back({put, 0});
      } else if (due) {
        if (put->signal && (faults_.broken & kBrokenSignals)) choices.push_back({put, put->pieces.size()});
        const size_t any = faults_.reorder ? random() % put->pieces.size() : 0;
        choices.push_back({put, any});
      }
      if (!faults_.reorder) break;
    }
    if (choices.empty()) return 0;
    const Choice chosen = choices[faults_.broken & kBrokenSignals ? 0 : random() % choices.size()];
    return SendOne(target, open, chosen.put, chosen.piece) ? 1 : -1;
  }
  bool MaySignal(std::list<Put>& open, std::list<Put>::iterator put) const {
    if (!put->signal || !put->strong || (faults_.broken & kBrokenStrong)) return true;
    for (auto before = open.begin(); before != put; ++before) {
      if (before->context == put->context && !before->pieces.empty()) return false;
    }
    return true;
  }
  bool SendOne(int target, std::list<Put>& open, std::list<Put>::iterator put, size_t piece) {
    Mover& mover = peers_[target].sends;
    Counted& traffic = counted[rank_ % kMostRanks][target % kMostRanks];
    if (piece < put->pieces.size()) {
      Put::Piece& p = put->pieces[piece];
      const uint64_t bytes = p.end - p.begin;
      Frame frame{kMagic, put->target.id, put->to + p.begin, bytes, 0, 0};
      mover.Read(put->source, put->from + p.begin, bytes);
      throttle.Pass(bytes, faults_.bytes_per_s);
      if (!p.again) traffic.bytes += bytes;  // before any rank can see them
      if (!Transfer(peers_[target].out, &frame, sizeof(frame), true) ||
          !Transfer(peers_[target].out, mover.Buffer(put->source), bytes, true)) {
        return false;
      }
      if (p.again) {
        p.again = false;
      } else {
        put->pieces.erase(put->pieces.begin() + static_cast<std::ptrdiff_t>(piece));
      }
    } else if (put->signal) {
      Frame frame{kMagic, put->signals.id, put->signal_at, 0, put->value, 1};
      ++traffic.signals;  // before any rank can see it
      if (!Transfer(peers_[target].out, &frame, sizeof(frame), true)) return false;
      put->signal = false;
      if (!put->pieces.empty()) put->not_before = Clock::now() + std::chrono::milliseconds(10);  // kBrokenSignals
    }
    if (put->pieces.empty() && put->request != nullptr) {
      ++traffic.puts;
      put->request->done = true;  // its source may be written again; its owner deletes it
      put->request = nullptr;
    }
    if (put->pieces.empty() && !put->signal) open.erase(put);
    return true;
  }

  void Receive(int source) {
    Peer& peer = peers_[source];
    Mover& mover = peer.receives;
    for (Frame frame; Transfer(peer.in, &frame, sizeof(frame), false);) {
      if (frame.magic != kMagic) throw std::runtime_error("rank " + std::to_string(source) + " sent no frame");
      Memory memory;
      {
        std::unique_lock<std::mutex> lock(mutex_);  // the target may be registered here a moment later
        changed_.wait(lock, [&] { return closing_ || memory_.count(frame.memory); });
        if (!memory_.count(frame.memory)) return;
        memory = memory_[frame.memory];
      }
      const uint64_t size = frame.signal ? 8 : frame.bytes;
      if (size > kPieceBytes || frame.at > memory.bytes || size > memory.bytes - frame.at) {
        throw std::runtime_error("rank " + std::to_string(source) + " sent a frame for outside the memory");
      }
      if (!frame.signal && !Transfer(peer.in, mover.Buffer(memory), size, false)) return;
      if (Killed(source)) continue;
      if (frame.signal) {
        std::lock_guard<std::mutex> lock(adding_);
        mover.Add(memory, frame.at, frame.value);
      } else {
        mover.Write(memory, frame.at, size);
      }
    }
  }

  const int rank_;
  const Faults faults_;
  std::vector<Peer> peers_;
  std::mutex mutex_, adding_;
  std::condition_variable changed_;
  std::map<uint64_t, Memory> memory_;
  uint64_t last_id_ = 0;
  bool closing_ = false;
  std::shared_ptr<Copier> copier_;  // once there is memory of a GPU
  std::atomic<bool> failed_{false};
};

struct Context {
  Group* group;
};

char device_name[] = "tcp";

int Init(void** state, uint64_t, Log log) {
  log_function = log;
  if (state != nullptr) *state = nullptr;
  try {
    Faults::FromEnvironment();
  } catch (const std::exception& e) {
    LogText(kLogWarning, e.what());
    return kInvalidArgument;
  }
  return kSuccess;
}
int CountDevices(int* count) {
  *count = 1;
  return kSuccess;
}
int GetProperties(int device, Properties* out) {
  *out = Properties{};
  out->name = device_name, out->guid = 1;
  out->memory_kinds = kHostMemory | kDeviceMemory;
  out->megabits_per_s = 10000, out->port = 1;
  out->most_communicators = 1 << 16, out->most_receives = 8;
  out->device_type = kProxied;
  out->merged.count = 1, out->merged.devices[0] = device;
  out->most_bytes = out->most_collective_bytes = size_t{1} << 40, out->most_merged_requests = 1;
  out->rail = out->plane = -1;
  return kSuccess;
}
int Listen(void*, int, void* handle, void** out) {
  auto listener = std::make_unique<Listener>();
  listener->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET, address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof(address);
  if (bind(listener->fd, reinterpret_cast<sockaddr*>(&address), bytes) != 0 || listen(listener->fd, 256) != 0 ||
      getsockname(listener->fd, reinterpret_cast<sockaddr*>(&address), &bytes) != 0) {
    LogText(kLogWarning, std::string("no socket to listen on: ") + std::strerror(errno));
    return kSystemError;
  }
  std::memset(handle, 0, kHandleBytes);
  std::memcpy(handle, &address, sizeof(address));
  *out = listener.release();
  return kSuccess;
}
int CloseListener(void* listener) {
  close(static_cast<Listener*>(listener)->fd);
  delete static_cast<Listener*>(listener);
  return kSuccess;
}
int Connect(void*, void* handles[], int ranks, int rank, void* listener, void** out) {
  try {
    if (ranks > kMostRanks) throw std::runtime_error("more than " + std::to_string(kMostRanks) + " ranks");
    auto group = std::make_unique<Group>(rank, ranks, Faults::FromEnvironment());
    group->Connect(handles, *static_cast<Listener*>(listener));
    *out = group.release();
    return kSuccess;
  } catch (const std::exception& e) {
    LogText(kLogWarning, e.what());
    return kSystemError;
  }
}
int CreateContext(void* group, ContextConfig* config, void** out) {
  LogText(kLogInfo, "tcp_rma: " + std::to_string(config->contexts) + " contexts");
  *out = new Context{static_cast<Group*>(group)};
  return kSuccess;
}
int DestroyContext(void* context) {
  delete static_cast<Context*>(context);
  return kSuccess;
}
int RegisterMemory(void* group, void* base, size_t bytes, int kind, uint64_t, void** out) {
  return static_cast<Group*>(group)->Register(static_cast<char*>(base), bytes, kind, out);
}
int RegisterDmaBuf(void*, void*, size_t, int, uint64_t, int, uint64_t, void**) { return kInvalidUsage; }
int UnregisterMemory(void* group, void* memory) {
  return static_cast<Group*>(group)->Unregister(static_cast<Memory*>(memory));
}
int CloseGroup(void* group) {
  delete static_cast<Group*>(group);
  return kSuccess;
}

Put MakePut(int context, uint64_t from, void* source, size_t bytes, uint64_t to, void* target) {
  Put put;
  put.context = context, put.from = from, put.to = to, put.bytes = bytes;
  if (bytes != 0) put.source = *static_cast<Memory*>(source), put.target = *static_cast<Memory*>(target);
  return put;
}
int PutOnly(void* context, int number, uint64_t from, void* source, size_t bytes, uint64_t to, void* target,
            uint32_t rank, void** request) {
  return static_cast<Context*>(context)->group->Submit(rank, MakePut(number, from, source, bytes, to, target), request);
}
int PutSignal(void* context, int number, uint64_t from, void* source, size_t bytes, uint64_t to, void* target,
              uint32_t rank, uint64_t signal_at, void* signals, uint64_t value, uint32_t operation, bool strong,
              void** request) {
  Put put = MakePut(number, from, source, bytes, to, target);
  put.signals = *static_cast<Memory*>(signals), put.signal_at = signal_at;
  put.value = operation == kIncrement ? 1 : value;
  put.signal = true, put.strong = strong;
  return static_cast<Context*>(context)->group->Submit(rank, std::move(put), request);
}
int Flush(void*, int, void*, uint32_t, void** request) {
  *request = nullptr;  // arrived bytes are visible
  return kSuccess;
}
int Test(void*, void* request, int* done) {
  auto* const r = static_cast<Request*>(request);
  *done = r->done;
  if (*done) delete r;
  return kSuccess;
}
int Progress(void*) { return kSuccess; }
int LastError(void* context, bool* failed) {
  *failed = static_cast<Context*>(context)->group->failed();
  return kSuccess;
}
int Finalize(void*) { return kSuccess; }

}  // namespace
}  // namespace rma

rma::Plugin ncclRmaPlugin_v14 = {"XEN_MOE_TCP",
                                 rma::Init,
                                 rma::CountDevices,
                                 rma::GetProperties,
                                 rma::Listen,
                                 rma::Connect,
                                 rma::CreateContext,
                                 rma::RegisterMemory,
                                 rma::RegisterDmaBuf,
                                 rma::UnregisterMemory,
                                 rma::DestroyContext,
                                 rma::CloseGroup,
                                 rma::CloseListener,
                                 rma::PutOnly,
                                 rma::PutSignal,
                                 nullptr,  // nothing here gets
                                 rma::Flush,
                                 rma::Test,
                                 rma::Progress,
                                 rma::LastError,
                                 rma::Finalize};

void xen_moe_rma_traffic(int rank, int target, RmaTraffic* out) {
  const rma::Counted& c = rma::counted[rank][target];
  *out = {c.bytes, c.puts, c.signals};
}
void xen_moe_rma_kill(int rank) { rma::killed[rank] = true; }
