// Copies between the host memory of this process and of another one of the machine: by loads and stores where the other
// process's memory is mapped here, otherwise by the kernel (process_vm_writev), with as few system calls as possible.
// The bytes have arrived when a call returns.
#include <poll.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>
#include <ctime>

#include "ffi/transfer/posting.h"

namespace xen_moe::transfer {
namespace {

constexpr size_t kMostAtOnce = 256;  // The kernel takes 1024. Two such lists are on the stack.

void* Failed(int error) { return reinterpret_cast<void*>(static_cast<intptr_t>(-error)); }

// Returns whether the process has ended. After that its number may be another process's. An answer is used for a
// millisecond, in which a machine does not start as many processes as there are numbers.
bool HasEnded(PeerProcess& process) {
  constexpr int64_t kTrusted = 1000000;
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t nanoseconds = now.tv_sec * int64_t{1000000000} + now.tv_nsec;
  if (nanoseconds - process.checked < kTrusted) return false;
  pollfd waited{process.descriptor, POLLIN, 0};
  if (poll(&waited, 1, 0)) return true;
  process.checked = nanoseconds;
  return false;
}

void* CopyMapped(const PeerMemory& memory, bool is_get, const Run* runs, size_t count) {
  for (const Run* run = runs; run != runs + count; ++run) {
    const uint64_t remote = static_cast<uint64_t>(run->remote);
    const size_t bytes = static_cast<size_t>(run->bytes);
    if (!memory.Holds(remote, bytes)) return Failed(EINVAL);
    void* local = reinterpret_cast<void*>(run->local);
    void* there = reinterpret_cast<void*>(memory.here + (remote - memory.remote));
    memcpy(is_get ? local : there, is_get ? there : local, bytes);
  }
  return nullptr;
}

// Moves the runs. Returns null, or a negative errno.
void* Move(void* endpoint, void* key, bool is_get, const Run* runs, size_t count) {
  auto& process = *static_cast<PeerProcess*>(endpoint);
  const auto& memory = *static_cast<const PeerMemory*>(key);
  if (HasEnded(process)) return Failed(ESRCH);
  if (memory.here) return CopyMapped(memory, is_get, runs, count);
  iovec here[kMostAtOnce], there[kMostAtOnce];
  while (count) {
    const size_t batch = count < kMostAtOnce ? count : kMostAtOnce;
    size_t left = 0;
    for (size_t i = 0; i < batch; ++i) {
      const uint64_t remote = static_cast<uint64_t>(runs[i].remote);
      const size_t bytes = static_cast<size_t>(runs[i].bytes);
      if (!memory.Holds(remote, bytes)) return Failed(EINVAL);
      here[i] = {reinterpret_cast<void*>(runs[i].local), bytes};
      there[i] = {reinterpret_cast<void*>(remote), bytes};
      left += bytes;
    }
    size_t first = 0;
    while (left) {
      const size_t vectors = batch - first;
      const ssize_t moved = is_get ? process_vm_readv(process.id, here + first, vectors, there + first, vectors, 0)
                                   : process_vm_writev(process.id, here + first, vectors, there + first, vectors, 0);
      if (moved < 0 && errno == EINTR) continue;
      if (moved <= 0) return Failed(moved ? errno : EFAULT);
      left -= moved;
      // After a partial copy the call is repeated for the rest: it names the error, or moves the rest.
      size_t whole = static_cast<size_t>(moved);
      while (left && whole >= here[first].iov_len) whole -= here[first++].iov_len;
      if (left && whole) {
        here[first] = {static_cast<char*>(here[first].iov_base) + whole, here[first].iov_len - whole};
        there[first] = {static_cast<char*>(there[first].iov_base) + whole, there[first].iov_len - whole};
      }
    }
    runs += batch;
    count -= batch;
  }
  return nullptr;
}

}  // namespace

void UseProcess(Link& link, PeerProcess& process) {
  link.move = Move;
  link.endpoint = &process;
}

}  // namespace xen_moe::transfer
