// Postings: runs of bytes that are handed to a library piece by piece, and their completions. Links to UCX, copies by
// the CUDA driver and copies between the host memory of two processes have the same shape, a `Link`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace xen_moe::transfer {

// Bytes that are copied in one piece: local address, remote address, length.
struct Run {
  int64_t local, remote, bytes;
};

// Takes an endpoint, a key, whether it is a get, and many runs. Returns null, or an error: a negative status as a
// pointer.
using PostMany = void* (*)(void* endpoint, void* key, bool is_get, const Run* runs, size_t count);

// The functions and handles of one link. The first six functions have the signatures of UCX. A link with `move` needs
// no other function: `move` returns when the bytes have arrived. A link with `start` has it in place of `put` and
// `get`, and its flush waits for the runs.
struct Link {
  void* (*put)(void*, const void*, size_t, uint64_t, void*, const void*) = nullptr;
  void* (*get)(void*, void*, size_t, uint64_t, void*, const void*) = nullptr;
  void* (*flush)(void*, const void*) = nullptr;
  unsigned (*progress)(void*) = nullptr;
  int8_t (*check)(void*) = nullptr;  // `ucs_status_t` is one byte: an int would have more bits than were returned
  void (*release)(void*) = nullptr;
  PostMany move = nullptr, start = nullptr;
  void* worker = nullptr;
  void* endpoint = nullptr;
  const void* parameters[2] = {nullptr, nullptr};  // of requests whose local memory is the host's, and a GPU's
  const void* flush_parameters = nullptr;
  int64_t slice[2] = {0, 0};  // the longest piece of a run, by local memory
  int64_t pieces = 0;         // the most pieces that one call hands over
};

// Runs in progress.
class Posting {
 public:
  Posting(const Link& link, bool is_get, void* key, int memory, std::vector<Run> runs)
      : link_(link), key_(key), is_get_(is_get), memory_(memory), runs_(std::move(runs)) {}

  // Hands over more runs and checks for completions. Returns whether nothing is in flight any more. With `is_open`
  // false the link was closed, and there is nothing to flush. Returns after `polls` calls of the library that find
  // nothing to do.
  bool Advance(bool is_open, int polls);
  // Calls Advance until it returns true, or for `nanoseconds`.
  bool Spin(int64_t nanoseconds);
  // Hands over no more runs. The runs in flight still have to end.
  void Stop() { next_ = runs_.size(); }

  int64_t bytes_posted() const { return bytes_posted_; }
  int status() const { return status_; }  // the first error, or 0

 private:
  void Keep(void* returned);
  void HandOver();
  void HandOverMany(PostMany call);
  void Collect();

  const Link& link_;
  void* key_;
  bool is_get_;
  int memory_;
  std::vector<Run> runs_;
  std::vector<void*> requests_;
  size_t next_ = 0;
  int64_t bytes_posted_ = 0;
  int32_t status_ = 0;
  bool flushing_ = false, done_ = false;
};

// Starts a posting. Returns null if all runs have arrived already.
std::unique_ptr<Posting> Start(const Link& link, bool is_get, void* key, int memory, std::vector<Run> runs, int polls);

// A put that is started again and again from other addresses: the local addresses of its runs count from the source's.
class Prepared {
 public:
  Prepared(const Link& link, void* key, int memory, std::vector<Run> runs, int polls);
  // Starts the posting for a source that begins at `local`, as the function Start does.
  std::unique_ptr<Posting> Start(int64_t local);

 private:
  const Link& link_;
  void* key_;
  int memory_, polls_;
  int64_t bytes_ = 0;
  std::vector<Run> runs_, placed_;
};

// --- Copies by the CUDA driver, into memory that another process has exported (CUDA IPC).

// The driver's functions, and a stream of one GPU. `batch` starts many copies without an order among them; it is null
// if the driver has no such function, or refused it for this memory.
struct Driver {
  int (*copy)(uint64_t, uint64_t, size_t, void*);
  int (*event_create)(void**, unsigned);
  int (*event_record)(void*, void*);
  int (*event_query)(void*);
  int (*event_destroy)(void*);
  int (*push)(void*);
  int (*pop)(void**);
  int (*batch)(uint64_t*, uint64_t*, size_t*, size_t, void*, size_t*, size_t, void*);
  void* context;
  void* stream;
};

// Memory of a peer: its address and length there, and its address in this process (0: not mapped).
struct PeerMemory {
  uint64_t remote, bytes, here;

  // Returns true if the peer gave this range. A peer names addresses; an address outside of its memory is not followed.
  bool Holds(uint64_t address, size_t length) const {
    return address >= remote && length <= bytes && address - remote <= bytes - length;
  }
};

// The copies on one stream.
struct DriverCopies {
  Driver driver;
  std::vector<void*> idle_events = {};
  int error = 0;  // the driver's last
  std::vector<uint64_t> to = {}, from = {};
  std::vector<size_t> sizes = {};

  explicit DriverCopies(const Driver& functions) : driver(functions) {}
  DriverCopies(const DriverCopies&) = delete;
  void Close();  // Destroys the events. Call it after the stream's last copy has ended.
};

// Sets the functions of a link whose endpoint is a DriverCopies and whose keys are PeerMemory.
void UseDriver(Link& link, DriverCopies& copies);

// --- Copies between the host memory of this process and of another one of the machine.

// The other process: its number, and a descriptor that tells whether the number is still that process's.
struct PeerProcess {
  int32_t id, descriptor;
  int64_t checked = 0;  // when the descriptor was last asked, in nanoseconds
};

// Sets the functions of a link whose endpoint is a PeerProcess and whose keys are PeerMemory.
void UseProcess(Link& link, PeerProcess& process);

}  // namespace xen_moe::transfer
