// Copies between host memory of this process and of another one of the machine, in the shape that the posting loop
// calls: by loads and stores where the other's memory is mapped here, and else by the kernel (process_vm_writev), all
// runs of a call in as few system calls as there can be. They have arrived when it returns.
#include <poll.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>

namespace {

constexpr size_t kMostAtOnce = 256;  // The kernel takes 1024; two such lists lie on the stack.

}  // namespace

extern "C" {

// Another process of this machine: its number, and the descriptor that tells whether that still is the same process.
struct XenMoeProcess {
  int32_t id, descriptor;
  int64_t looked;  // when that was last asked, in nanoseconds
};

// Memory of that process that it has said may be addressed, and where it is mapped in this one (0: nowhere).
struct XenMoeHostMemory {
  uint64_t remote, bytes, here;
};

// A peer names places in its memory; none outside of what it gave is followed.
static bool Holds(const XenMoeHostMemory& memory, uint64_t remote, size_t bytes) {
  return remote >= memory.remote && bytes <= memory.bytes && remote - memory.remote <= memory.bytes - bytes;
}

static void* Failed(int error) { return reinterpret_cast<void*>(static_cast<intptr_t>(-error)); }

// Whether the process has ended. Its number may then be another process's; not within a millisecond, in which a machine
// does not start as many processes as there are numbers.
static bool HasEnded(XenMoeProcess* process) {
  constexpr int64_t kTrusted = 1000000;
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t nanoseconds = now.tv_sec * int64_t{1000000000} + now.tv_nsec;
  if (nanoseconds - process->looked < kTrusted) return false;
  pollfd waited{process->descriptor, POLLIN, 0};
  if (poll(&waited, 1, 0)) return true;
  process->looked = nanoseconds;
  return false;
}

// Moves `count` runs (local address, remote address, bytes). Null, or an errno below 0.
void* xen_moe_host_move(void* endpoint, void* key, int is_get, const int64_t* runs, size_t count) {
  auto* process = static_cast<XenMoeProcess*>(endpoint);
  const auto& memory = *static_cast<const XenMoeHostMemory*>(key);
  if (HasEnded(process)) return Failed(ESRCH);
  if (memory.here) {
    for (const int64_t* run = runs; run != runs + 3 * count; run += 3) {
      const uint64_t remote = static_cast<uint64_t>(run[1]);
      const size_t bytes = static_cast<size_t>(run[2]);
      if (!Holds(memory, remote, bytes)) return Failed(EINVAL);
      void* local = reinterpret_cast<void*>(run[0]);
      void* there = reinterpret_cast<void*>(memory.here + (remote - memory.remote));
      memcpy(is_get ? local : there, is_get ? there : local, bytes);
    }
    return nullptr;
  }
  iovec here[kMostAtOnce], there[kMostAtOnce];
  while (count) {
    const size_t batch = count < kMostAtOnce ? count : kMostAtOnce;
    size_t left = 0;
    for (size_t i = 0; i < batch; ++i) {
      const uint64_t remote = static_cast<uint64_t>(runs[3 * i + 1]);
      const size_t bytes = static_cast<size_t>(runs[3 * i + 2]);
      if (!Holds(memory, remote, bytes)) return Failed(EINVAL);
      here[i] = {reinterpret_cast<void*>(runs[3 * i]), bytes};
      there[i] = {reinterpret_cast<void*>(remote), bytes};
      left += bytes;
    }
    size_t first = 0;
    while (left) {
      const size_t vectors = batch - first;
      const ssize_t moved = is_get ? process_vm_readv(process->id, here + first, vectors, there + first, vectors, 0)
                                   : process_vm_writev(process->id, here + first, vectors, there + first, vectors, 0);
      if (moved < 0 && errno == EINTR) continue;
      if (moved <= 0) return Failed(moved ? errno : EFAULT);
      left -= moved;
      // What went over in part is asked for again: the next answer names the error, or moves the rest.
      size_t whole = static_cast<size_t>(moved);
      while (left && whole >= here[first].iov_len) whole -= here[first++].iov_len;
      if (left && whole) {
        here[first] = {static_cast<char*>(here[first].iov_base) + whole, here[first].iov_len - whole};
        there[first] = {static_cast<char*>(there[first].iov_base) + whole, there[first].iov_len - whole};
      }
    }
    runs += 3 * batch;
    count -= batch;
  }
  return nullptr;
}

}  // extern "C"
