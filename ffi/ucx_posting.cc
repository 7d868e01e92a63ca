// The posting loop of xen_moe_jax.transfer: hands runs of bytes to UCX and collects their completions, without Python
// between the calls. No UCX header and no link to it: the library's functions are handed over by the Python side, which
// has loaded it.
#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

constexpr int kInProgress = 1, kLowestStatus = -256;

// A run that is left: local address, remote address, bytes.
struct Run {
  int64_t local, remote, bytes;
};

}  // namespace

extern "C" {

// UCX's functions, and one endpoint's handles. `parameters` are those of local memory on the host and on a GPU.
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
  HandOver(posting);
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

// The same for one run.
XenMoePosting* xen_moe_posting_start_one(const XenMoeLink* link, int is_get, void* key, int memory, int64_t local,
                                         int64_t remote, int64_t bytes, int polls) {
  const int64_t run[3] = {local, remote, bytes};
  return xen_moe_posting_start(link, is_get, key, memory, run, 1, polls);
}

void xen_moe_posting_stop(XenMoePosting* posting) { posting->next = posting->runs.size(); }

int64_t xen_moe_posting_bytes(const XenMoePosting* posting) { return posting->bytes_posted; }

int xen_moe_posting_status(const XenMoePosting* posting) { return posting->status; }

void xen_moe_posting_free(XenMoePosting* posting) { delete posting; }

}  // extern "C"
