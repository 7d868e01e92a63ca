// The posting loop of xen_moe_jax.transfer: hands runs of bytes to UCX and collects their completions, without Python
// between the calls. No UCX header and no link to it: the library's functions are handed over by the Python side, which
// has loaded it.
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <vector>

namespace {

constexpr int kInProgress = 1, kLowestStatus = -256;

// A run that is left: local address, remote address, bytes.
struct Run {
  int64_t local, remote, bytes;
};

}  // namespace

extern "C" {

// Takes an endpoint, a key, whether it is a get, and runs (local address, remote address, bytes).
typedef void* XenMoeMany(void*, void*, int, const int64_t*, size_t);

// UCX's functions, and one endpoint's handles. `parameters` are those of local memory on the host and on a GPU. A link
// with `move` needs no other function: that moves runs at once, and gives null or an error. One with `start` has it in
// place of `put` and `get`: it takes many runs, and gives null or an error; the flush waits for them.
struct XenMoeLink {
  void* (*put)(void*, const void*, size_t, uint64_t, void*, const void*);
  void* (*get)(void*, void*, size_t, uint64_t, void*, const void*);
  void* (*flush)(void*, const void*);
  unsigned (*progress)(void*);
  int (*check)(void*);
  void (*release)(void*);
  void* worker;
  void* endpoint;
  const void* parameters[2];
  const void* flush_parameters;
  int64_t slice[2];  // the longest piece of a run, by memory
  int64_t pieces;    // the most pieces that one call hands over
  XenMoeMany *move, *start;
};

struct XenMoePosting {
  const XenMoeLink* link;
  void* key;
  int32_t is_get, memory;
  std::vector<Run> runs;
  std::vector<void*> requests;
  size_t next;
  int64_t bytes_posted;
  int32_t status;  // the first error
  bool flushing, done;
};

static void Keep(XenMoePosting* posting, void* returned) {
  const intptr_t status = reinterpret_cast<intptr_t>(returned);
  if (status >= 0 || status <= kLowestStatus) {
    if (status) posting->requests.push_back(returned);
    return;
  }
  if (!posting->status) posting->status = static_cast<int32_t>(status);
  posting->next = posting->runs.size();
}

static void HandOver(XenMoePosting* posting) {
  const XenMoeLink& link = *posting->link;
  const int64_t slice = link.slice[posting->memory];
  const void* parameters = link.parameters[posting->memory];
  int64_t budget = slice, pieces = link.pieces;
  while (posting->next < posting->runs.size() && budget > 0 && pieces-- > 0) {
    Run& run = posting->runs[posting->next];
    const int64_t bytes = run.bytes < slice ? run.bytes : slice;
    void* local = reinterpret_cast<void*>(run.local);
    const Run piece = run;
    run = {run.local + bytes, run.remote + bytes, run.bytes - bytes};
    if (!run.bytes) ++posting->next;
    Keep(posting, posting->is_get ? link.get(link.endpoint, local, bytes, piece.remote, posting->key, parameters)
                                  : link.put(link.endpoint, local, bytes, piece.remote, posting->key, parameters));
    posting->bytes_posted += bytes;
    budget -= bytes;
  }
}

// Hands the next runs over to `call`, which takes many, up to a slice of bytes: whole ones, or the beginning of one
// that is longer. What it says of them is Keep's.
static void HandOverMany(XenMoePosting* posting, XenMoeMany* call) {
  const XenMoeLink& link = *posting->link;
  const int64_t slice = link.slice[posting->memory];
  const size_t left = posting->runs.size() - posting->next;
  Run* first = posting->runs.data() + posting->next;
  int64_t bytes = 0;
  size_t count = 0;
  while (count < left && count < static_cast<size_t>(link.pieces) && first[count].bytes <= slice - bytes)
    bytes += first[count++].bytes;
  const Run part = {first->local, first->remote, slice};
  const int64_t* runs = count ? &first->local : &part.local;
  if (!count) {
    *first = {part.local + slice, part.remote + slice, first->bytes - slice};
    bytes = slice;
  }
  posting->next += count;
  posting->bytes_posted += bytes;
  Keep(posting, call(link.endpoint, posting->key, posting->is_get, runs, count ? count : 1));
}

static void Collect(XenMoePosting* posting) {
  size_t kept = 0;
  for (size_t i = 0; i < posting->requests.size(); ++i) {
    void* request = posting->requests[i];
    const int status = posting->link->check(request);
    if (status == kInProgress) {
      posting->requests[kept++] = request;
      continue;
    }
    posting->link->release(request);
    if (status < 0) {
      if (!posting->status) posting->status = status;
      posting->next = posting->runs.size();
    }
  }
  posting->requests.resize(kept);
}

// Hands over more and asks for completions; 1 when nothing is in flight any more. `is_open` is 0 for a link that was
// closed: then there is nothing to flush. `polls` calls of the library that find nothing to do end the call.
int xen_moe_posting_advance(XenMoePosting* posting, int is_open, int polls) {
  if (posting->done) return 1;
  const XenMoeLink& link = *posting->link;
  const bool is_left = posting->next < posting->runs.size();
  if (link.move) {
    if (is_left) HandOverMany(posting, link.move);
    posting->done = posting->next == posting->runs.size();
    return posting->done;
  }
  if (!link.start) {
    HandOver(posting);
  } else if (is_left) {
    HandOverMany(posting, link.start);
  }
  for (;;) {
    Collect(posting);
    if (posting->next == posting->runs.size() && posting->requests.empty()) {
      if (posting->flushing || !is_open) {
        posting->done = true;
        return 1;
      }
      // A put that ended locally may still be on its way; the flush ends when all are in the peer's memory.
      posting->flushing = true;
      Keep(posting, posting->link->flush(posting->link->endpoint, posting->link->flush_parameters));
      if (posting->requests.empty()) continue;
    }
    if (posting->requests.empty()) return 0;
    // Host memory is copied in these calls, a piece at a time.
    if (!posting->link->progress(posting->link->worker) && polls-- <= 0) return 0;
  }
}

// Asks again and again, for so many nanoseconds at most; 1 when nothing is in flight any more.
int xen_moe_posting_spin(XenMoePosting* posting, int64_t nanoseconds) {
  constexpr int kPolls = 16;
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t begun = now.tv_sec * int64_t{1000000000} + now.tv_nsec;
  do {
    if (xen_moe_posting_advance(posting, 1, kPolls)) return 1;
    clock_gettime(CLOCK_MONOTONIC, &now);
  } while (now.tv_sec * int64_t{1000000000} + now.tv_nsec - begun < nanoseconds);
  return 0;
}

// Starts a posting. Null where it has ended well already; otherwise to be freed, once it is done.
XenMoePosting* xen_moe_posting_start(const XenMoeLink* link, int is_get, void* key, int memory, const int64_t* runs,
                                     size_t count, int polls) {
  auto* posting = new XenMoePosting{link, key, is_get, memory, {}, {}, 0, 0, 0, false, false};
  const Run* first = reinterpret_cast<const Run*>(runs);
  posting->runs.assign(first, first + count);
  if (xen_moe_posting_advance(posting, 1, polls) && !posting->status) {
    delete posting;
    return nullptr;
  }
  return posting;
}

// A put that is started again and again from other local addresses: its runs' count from the address that is given.
struct XenMoePrepared {
  const XenMoeLink* link;
  void* key;
  int32_t memory, polls;
  int64_t bytes;
  std::vector<Run> runs, placed;
};

XenMoePrepared* xen_moe_prepared_new(const XenMoeLink* link, void* key, int memory, const int64_t* runs, size_t count,
                                     int polls) {
  const Run* first = reinterpret_cast<const Run*>(runs);
  auto* prepared = new XenMoePrepared{link, key, memory, polls, 0, {first, first + count}, {first, first + count}};
  for (const Run& run : prepared->runs) prepared->bytes += run.bytes;
  return prepared;
}

// As xen_moe_posting_start; what is moved at once, and well, needs no posting.
XenMoePosting* xen_moe_prepared_start(XenMoePrepared* prepared, int64_t local) {
  const XenMoeLink& link = *prepared->link;
  const size_t count = prepared->runs.size();
  for (size_t i = 0; i < count; ++i) prepared->placed[i].local = prepared->runs[i].local + local;
  const int64_t* placed = &prepared->placed.data()->local;
  if (link.move && prepared->bytes <= link.slice[prepared->memory] && count <= static_cast<size_t>(link.pieces) &&
      !link.move(link.endpoint, prepared->key, 0, placed, count))
    return nullptr;
  return xen_moe_posting_start(&link, 0, prepared->key, prepared->memory, placed, count, prepared->polls);
}

// Python's functions for its integers. A call by ctypes takes half a microsecond; xen_moe_prepared_call is what a
// built-in function of Python with one argument calls (METH_O), whose `self` is the prepared put.
struct XenMoePython {
  void* (*as_pointer)(void*);
  long long (*as_integer)(void*);
  void* (*from_pointer)(void*);
};

static XenMoePython python;

void xen_moe_prepared_python(const XenMoePython* functions) { python = *functions; }

void* xen_moe_prepared_call(void* self, void* local) {
  auto* prepared = static_cast<XenMoePrepared*>(python.as_pointer(self));
  return python.from_pointer(xen_moe_prepared_start(prepared, python.as_integer(local)));
}

void xen_moe_prepared_free(XenMoePrepared* prepared) { delete prepared; }

void xen_moe_posting_stop(XenMoePosting* posting) { posting->next = posting->runs.size(); }

int64_t xen_moe_posting_bytes(const XenMoePosting* posting) { return posting->bytes_posted; }

int xen_moe_posting_status(const XenMoePosting* posting) { return posting->status; }

void xen_moe_posting_free(XenMoePosting* posting) { delete posting; }

}  // extern "C"
