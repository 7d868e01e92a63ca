// Copies between the GPUs of one host into memory that another process has exported (CUDA IPC), in the shape that the
// posting loop calls: a put, a get, a flush and the question whether that has ended. No CUDA header and no link to
// CUDA: the driver's functions are handed over by the Python side, which has loaded it.
#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

constexpr int kInProgress = 1, kFailed = -255, kCudaNotReady = 600, kCudaInvalidValue = 1;
constexpr unsigned kEventDisableTiming = 2;

// CUmemcpyAttributes: the sources are read in the stream's order. The rest is for managed memory.
struct BatchAttributes {
  int32_t source_access_order = 1, locations[4] = {0, 0, 0, 0};
  uint32_t flags = 0;
};

}  // namespace

extern "C" {

// The driver's functions, and one stream of one GPU.
struct XenMoeDriver {
  int (*copy)(uint64_t, uint64_t, size_t, void*);
  int (*event_create)(void**, unsigned);
  int (*event_record)(void*, void*);
  int (*event_query)(void*);
  int (*event_destroy)(void*);
  int (*push)(void*);
  int (*pop)(void**);
  // Many copies in one call, without an order among them; null where the driver has none, or refused.
  int (*batch)(uint64_t*, uint64_t*, size_t*, size_t, void*, size_t*, size_t, void*);
  void* context;
  void* stream;
};

struct XenMoeCopies {
  XenMoeDriver driver;
  std::vector<void*> events;  // that nothing waits for
  int error;                  // the driver's last
  std::vector<uint64_t> to, from;
  std::vector<size_t> sizes;
};

// Memory of a peer: where it lies for the peer, how long it is, and where it lies here.
struct XenMoeMapping {
  uint64_t remote, bytes, here;
};

XenMoeCopies* xen_moe_copies_new(const XenMoeDriver* driver) { return new XenMoeCopies{*driver, {}, 0, {}, {}, {}}; }

int xen_moe_copies_error(const XenMoeCopies* copies) { return copies->error; }

static void* Failed(XenMoeCopies* copies, int error) {
  copies->error = error;
  return reinterpret_cast<void*>(static_cast<intptr_t>(kFailed));
}

// A peer names places in its memory; none outside of what it exported is followed.
static bool Holds(const XenMoeMapping& mapping, uint64_t remote, size_t bytes) {
  return remote >= mapping.remote && bytes <= mapping.bytes && remote - mapping.remote <= mapping.bytes - bytes;
}

// Starts `count` runs (local address, remote address, bytes). A copy takes 2 us to start, and half a microsecond in a
// batch.
void* xen_moe_copies_start(void* endpoint, void* key, int is_get, const int64_t* runs, size_t count) {
  auto* copies = static_cast<XenMoeCopies*>(endpoint);
  const auto& mapping = *static_cast<const XenMoeMapping*>(key);
  copies->to.resize(count);
  copies->from.resize(count);
  copies->sizes.resize(count);
  for (size_t i = 0; i < count; ++i) {
    const uint64_t local = runs[3 * i], remote = runs[3 * i + 1];
    const size_t bytes = runs[3 * i + 2];
    if (!Holds(mapping, remote, bytes)) return Failed(copies, kCudaInvalidValue);
    const uint64_t there = mapping.here + (remote - mapping.remote);
    copies->to[i] = is_get ? local : there;
    copies->from[i] = is_get ? there : local;
    copies->sizes[i] = bytes;
  }
  XenMoeDriver& driver = copies->driver;
  void* popped;
  int error = driver.push(driver.context);
  if (error) return Failed(copies, error);
  if (driver.batch && count > 1) {
    BatchAttributes attributes;
    size_t first = 0;
    error = driver.batch(copies->to.data(), copies->from.data(), copies->sizes.data(), count, &attributes, &first, 1,
                         driver.stream);
    if (error)
      driver.batch = nullptr;  // Not for this memory: one by one, and an error of the device shows again there.
  }
  if (!driver.batch || count == 1) {
    error = 0;
    for (size_t i = 0; i < count && !error; ++i)
      error = driver.copy(copies->to[i], copies->from[i], copies->sizes[i], driver.stream);
  }
  driver.pop(&popped);
  return error ? Failed(copies, error) : nullptr;
}

// A request that has ended when every copy before it has: it belongs to `check` and `release`.
struct XenMoeEvent {
  XenMoeCopies* copies;
  void* event;
};

void* xen_moe_copies_flush(void* endpoint, const void*) {
  auto* copies = static_cast<XenMoeCopies*>(endpoint);
  const XenMoeDriver& driver = copies->driver;
  void *popped, *event = nullptr;
  int error = driver.push(driver.context);
  if (error) return Failed(copies, error);
  if (!copies->events.empty()) {
    event = copies->events.back();
    copies->events.pop_back();
  } else {
    error = driver.event_create(&event, kEventDisableTiming);
  }
  if (!error) error = driver.event_record(event, driver.stream);
  driver.pop(&popped);
  if (error) {
    if (event) copies->events.push_back(event);
    return Failed(copies, error);
  }
  return new XenMoeEvent{copies, event};
}

int xen_moe_copies_check(void* request) {
  auto* waited = static_cast<XenMoeEvent*>(request);
  const int error = waited->copies->driver.event_query(waited->event);
  if (error == kCudaNotReady) return kInProgress;
  if (error) Failed(waited->copies, error);
  return error ? kFailed : 0;
}

void xen_moe_copies_release(void* request) {
  auto* waited = static_cast<XenMoeEvent*>(request);
  waited->copies->events.push_back(waited->event);
  delete waited;
}

// Nothing to drive: the GPU works by itself.
unsigned xen_moe_copies_progress(void*) { return 0; }

// After the stream's last copy has ended.
void xen_moe_copies_free(XenMoeCopies* copies) {
  for (void* event : copies->events) copies->driver.event_destroy(event);
  delete copies;
}

}  // extern "C"
