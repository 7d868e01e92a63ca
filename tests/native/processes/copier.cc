#include "tests/native/processes/copier.h"

#include <dlfcn.h>
#include <linux/futex.h>
#include <poll.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <vector>

extern char** environ;

namespace rma {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kSocket = 3;  // of the process of copies
constexpr auto kSpin = std::chrono::microseconds(50);

[[noreturn]] void Throw(const std::string& what) { throw std::runtime_error("the process that copies: " + what); }

std::string Program() {
  if (const char* const named = std::getenv("XEN_MOE_RMA_COPIER")) return named;
  Dl_info own{};
  if (dladdr(reinterpret_cast<void*>(&Program), &own) == 0 || own.dli_fname == nullptr) Throw("where it lies");
  const std::string path = own.dli_fname;
  const size_t slash = path.rfind('/');
  return (slash == std::string::npos ? "./" : path.substr(0, slash + 1)) + "xen_moe_rma_copier";
}

long Futex(std::atomic<uint32_t>* word, int what, uint32_t value, const timespec* limit) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), what, value, limit, nullptr, 0);
}

bool HungUp(int socket) {
  pollfd one{socket, 0, 0};
  return poll(&one, 1, 0) != 0;
}

// A file descriptor for the memory at `base`, and the offset of `base` there.
struct Shared {
  int fd = -1;
  uint64_t offset = 0, bytes = 0;
};

// The memory from `start` on may not be shared (NCCL's signals): another takes its place.
void Replace(const Driver& d, Address start, size_t bytes, Handle handle) {
  AllocationProperties properties{};
  Check(d.MemGetAllocationProperties(&properties, handle), "cuMemGetAllocationPropertiesFromHandle");
  properties.handle_types = kFileDescriptor;
  Handle fresh = 0;
  Check(d.MemCreate(&fresh, bytes, &properties, 0), "cuMemCreate");
  std::vector<char> content(bytes);
  const Access access = ReadWrite(properties.place.id);
  Check(d.CtxSynchronize(), "cuCtxSynchronize");  // it may be about to be cleared
  Check(d.MemcpyDtoH(content.data(), start, bytes), "cuMemcpyDtoH");
  Check(d.MemUnmap(start, bytes), "cuMemUnmap");
  Check(d.MemMap(start, bytes, 0, fresh, 0), "cuMemMap");
  Check(d.MemSetAccess(start, bytes, &access, 1), "cuMemSetAccess");
  Check(d.MemcpyHtoD(start, content.data(), bytes), "cuMemcpyHtoD");
  // `fresh` stays: the process that frees the memory releases the handle that it finds there, as its own.
}

Shared Share(const Driver& d, char* base, uint64_t bytes) {
  const Address at = reinterpret_cast<Address>(base);
  Shared out;
  Address start = 0;
  size_t size = 0;
  Check(d.MemGetAddressRange(&start, &size, at), "cuMemGetAddressRange");
  if (at + bytes > start + size) Throw("memory of several allocations");
  for (int turn = 0;; ++turn) {
    Handle handle = 0;
    Check(d.MemRetainAllocationHandle(&handle, reinterpret_cast<void*>(at)), "cuMemRetainAllocationHandle");
    const int rc = d.MemExport(&out.fd, handle, kFileDescriptor, 0);
    if (rc != 0 && turn == 0) Replace(d, start, size, handle);
    Check(d.MemRelease(handle), "cuMemRelease");
    if (rc == 0) break;
    if (turn == 1) Check(rc, "cuMemExportToShareableHandle");
  }
  out.offset = at - start, out.bytes = size;
  return out;
}

}  // namespace

bool AwaitTurn(Channel* channel, Channel::Turn whose, int watched) {
  for (const auto until = Clock::now() + kSpin; Clock::now() < until;) {
    if (channel->turn.load(std::memory_order_acquire) == whose) return true;
  }
  while (channel->turn.load(std::memory_order_acquire) != whose) {
    const timespec limit{0, 100'000'000};
    Futex(&channel->turn, FUTEX_WAIT, 1u - whose, &limit);
    if (channel->turn.load(std::memory_order_acquire) != whose && watched >= 0 && HungUp(watched)) return false;
  }
  return true;
}
void GiveTurn(Channel* channel, Channel::Turn whose) {
  channel->turn.store(whose, std::memory_order_release);
  Futex(&channel->turn, FUTEX_WAKE, 1, nullptr);
}

std::shared_ptr<Copier> Copier::Get() {
  static std::mutex mutex;
  static std::weak_ptr<Copier> current;
  std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Copier> out = current.lock();
  if (out == nullptr) current = out = std::shared_ptr<Copier>(new Copier);
  return out;
}

Copier::Copier() {
  const Driver* const d = Driver::Get();
  if (d == nullptr) throw std::runtime_error("device memory, but no driver");
  Order start{};
  start.what = Order::kStart;
  int device = 0;
  Check(d->CtxGetDevice(&device), "cuCtxGetDevice");
  Check(d->DeviceGetPciBusId(start.device, sizeof(start.device), device), "cuDeviceGetPCIBusId");
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) Throw(std::strerror(errno));
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], kSocket);
  std::string program = Program();
  char* arguments[] = {program.data(), nullptr};
  const int rc = posix_spawn(&process_, program.c_str(), &actions, nullptr, arguments, environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  socket_ = ends[0];
  if (rc != 0) {
    close(socket_);
    Throw(program + ": " + std::strerror(rc));
  }
  Send(start, -1, "start");
}
Copier::~Copier() {
  close(socket_);  // it ends
  waitpid(process_, nullptr, 0);
}

void Copier::Send(const Order& order, int fd, const char* what) {
  iovec data{const_cast<Order*>(&order), sizeof(order)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data, message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control, message.msg_controllen = sizeof(control);
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS, header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
  }
  int rc = 0;
  const bool said = sendmsg(socket_, &message, MSG_NOSIGNAL) == sizeof(order);
  if (!said || recv(socket_, &rc, sizeof(rc), 0) != sizeof(rc)) Throw(std::string("it has ended, at: ") + what);
  if (rc != 0) Throw(std::string(what) + " failed with CUresult " + std::to_string(rc));
}

uint64_t Copier::Map(char* base, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Shared shared = Share(*Driver::Get(), base, bytes);
  Order order{};
  order.what = Order::kMap, order.memory = ++last_memory_, order.bytes = shared.bytes, order.offset = shared.offset;
  try {
    Send(order, shared.fd, "map memory");
  } catch (...) {
    close(shared.fd);
    throw;
  }
  close(shared.fd);
  return order.memory;
}
void Copier::Unmap(uint64_t memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  Order order{};
  order.what = Order::kUnmap, order.memory = memory;
  Send(order, -1, "unmap memory");
}

Channel* Copier::Open() {
  std::lock_guard<std::mutex> lock(mutex_);
  const int fd = memfd_create("xen_moe_rma", MFD_CLOEXEC);
  void* memory = MAP_FAILED;
  if (fd >= 0 && ftruncate(fd, sizeof(Channel)) == 0) {
    memory = mmap(nullptr, sizeof(Channel), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (memory == MAP_FAILED) Throw(std::string("no memory to share: ") + std::strerror(errno));
  Order order{};
  order.what = Order::kOpen;
  Send(order, fd, "open a channel");
  close(fd);
  return static_cast<Channel*>(memory);
}

void Copier::Run(Channel* c, Channel::What what, uint64_t memory, uint64_t at, uint64_t bytes, uint64_t value) {
  c->what = what, c->memory = memory, c->at = at, c->bytes = bytes, c->value = value;
  GiveTurn(c, Channel::kCopier);
  if (!AwaitTurn(c, Channel::kOwner, socket_)) Throw("it has ended");
  if (c->rc != 0) Throw("a copy failed with CUresult " + std::to_string(c->rc));
}

}  // namespace rma
