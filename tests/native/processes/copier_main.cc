// The process of copier.h: maps memory of the process that started it, and copies from there and to there.
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "tests/native/processes/copier.h"

namespace rma {
namespace {

constexpr int kSocket = 3;
constexpr double kLong = 2.0;  // seconds of a copy after which it is reported

struct Mapped {
  Address start = 0, base = 0;  // of the mapping; of the memory
  size_t bytes = 0;
};
std::mutex mutex;
std::map<uint64_t, Mapped> mapped;
const Driver* driver = nullptr;
void* context = nullptr;
int device = 0;

// Below 32 KiB the driver copies to a GPU with the engine that runs kernels, which then has to take turns with a kernel
// of the other process: 2.4 ms on an H200. Two rows with room between them go by a copy engine, in 8 us.
constexpr size_t kLeastByCopyEngine = 32 << 10;
constexpr size_t kRowDistance = kPieceBytes / 2;

int Write(Channel* c, Address at, void* stream) {
  const size_t bytes = c->bytes, half = bytes / 2;
  if (bytes == 8) {
    std::memcpy(&c->word, c->buffer, 8);
    return driver->StreamWriteValue64(stream, at, c->word, 0);
  }
  if (bytes >= kLeastByCopyEngine || bytes % 2) return driver->MemcpyHtoDAsync(at, c->buffer, bytes, stream);
  std::memcpy(c->buffer + kRowDistance, c->buffer + half, half);
  Rows rows;
  rows.from = c->buffer, rows.from_pitch = kRowDistance;
  rows.to = at, rows.to_pitch = half, rows.width = half, rows.height = 2;
  return driver->Memcpy2DAsync(&rows, stream);
}

int Answer(Channel* c, void* stream) {
  Address base = 0;
  {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = mapped.find(c->memory);
    if (found == mapped.end()) return -1;
    base = found->second.base;
  }
  const Address at = base + c->at;
  if (c->what == Channel::kRead) {
    if (int rc = driver->MemcpyDtoHAsync(c->buffer, at, c->bytes, stream)) return rc;
  } else if (c->what == Channel::kWrite) {
    if (int rc = Write(c, at, stream)) return rc;
  } else {
    if (int rc = driver->MemcpyDtoHAsync(&c->word, at, 8, stream)) return rc;
    if (int rc = driver->StreamSynchronize(stream)) return rc;
    c->word += c->value;
    if (int rc = driver->StreamWriteValue64(stream, at, c->word, 0)) return rc;
  }
  return driver->StreamSynchronize(stream);
}

[[noreturn]] void RunOrders(Channel* c, void* stream) {
  driver->CtxSetCurrent(context);
  while (true) {
    AwaitTurn(c, Channel::kCopier, -1);
    const auto began = std::chrono::steady_clock::now();
    c->rc = Answer(c, stream);
    const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    if (took > kLong) std::fprintf(stderr, "xen_moe tcp_rma: a copy of %d bytes took %.1f s\n", int(c->bytes), took);
    GiveTurn(c, Channel::kOwner);
  }
}

int Start(const Order& order) {
  driver = Driver::Get();
  if (driver == nullptr) return -1;
  if (int rc = driver->Init(0)) return rc;
  if (int rc = driver->DeviceGetByPciBusId(&device, order.device)) return rc;
  if (int rc = driver->DevicePrimaryCtxRetain(&context, device)) return rc;
  return driver->CtxSetCurrent(context);
}

int Map(const Order& order, int fd) {
  Mapped one;
  one.bytes = order.bytes;
  Handle handle = 0;
  const Access access = ReadWrite(device);
  if (int rc = driver->MemImport(&handle, reinterpret_cast<void*>(static_cast<uintptr_t>(fd)), kFileDescriptor))
    return rc;
  int rc = driver->MemAddressReserve(&one.start, one.bytes, 0, 0, 0);
  if (rc == 0) rc = driver->MemMap(one.start, one.bytes, 0, handle, 0);
  if (rc == 0) rc = driver->MemSetAccess(one.start, one.bytes, &access, 1);
  driver->MemRelease(handle);  // the mapping holds it
  if (rc != 0) return rc;
  one.base = one.start + order.offset;
  std::lock_guard<std::mutex> lock(mutex);
  mapped[order.memory] = one;
  return 0;
}

int Unmap(const Order& order) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = mapped.find(order.memory);
  if (found == mapped.end()) return -1;
  const Mapped one = found->second;
  mapped.erase(found);
  if (int rc = driver->MemUnmap(one.start, one.bytes)) return rc;
  return driver->MemAddressFree(one.start, one.bytes);
}

int Open(int fd) {
  void* const memory = mmap(nullptr, sizeof(Channel), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return -1;
  if (int rc = driver->MemHostRegister(memory, sizeof(Channel), 0)) return rc;
  void* stream = nullptr;
  if (int rc = driver->StreamCreateWithPriority(&stream, 1, -5)) return rc;
  std::thread([memory, stream] { RunOrders(static_cast<Channel*>(memory), stream); }).detach();
  return 0;
}

// False: the owner asks no more.
bool ServeOrder() {
  Order order{};
  iovec data{&order, sizeof(order)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data, message.msg_iovlen = 1;
  message.msg_control = control, message.msg_controllen = sizeof(control);
  if (recvmsg(kSocket, &message, MSG_CMSG_CLOEXEC) != sizeof(order)) return false;
  int fd = -1, rc = -1;
  if (const cmsghdr* const header = CMSG_FIRSTHDR(&message)) std::memcpy(&fd, CMSG_DATA(header), sizeof(fd));
  switch (order.what) {
    case Order::kStart:
      rc = Start(order);
      break;
    case Order::kMap:
      rc = Map(order, fd);
      break;
    case Order::kUnmap:
      rc = Unmap(order);
      break;
    case Order::kOpen:
      rc = Open(fd);
      break;
  }
  if (fd >= 0) close(fd);
  return send(kSocket, &rc, sizeof(rc), MSG_NOSIGNAL) == sizeof(rc);
}

}  // namespace
}  // namespace rma

int main() {
  while (rma::ServeOrder()) {
  }
  _exit(0);  // threads may be copying
}
