// Copies from this process into GPU memory that another process has exported (CUDA IPC), by the CUDA driver. There is
// no CUDA header and no link to CUDA: Python has loaded the driver, and passes the addresses of its functions.
#include "ffi/transfer/posting.h"

namespace xen_moe::transfer {
namespace {

constexpr int8_t kInProgress = 1, kFailed = -101;  // none of UCX's
constexpr int kCudaNotReady = 600, kCudaInvalidValue = 1;
constexpr unsigned kEventDisableTiming = 2;

// CUmemcpyAttributes: the sources are read in the stream's order. The other fields are for managed memory.
struct BatchAttributes {
  int32_t source_access_order = 1, locations[4] = {0, 0, 0, 0};
  uint32_t flags = 0;
};

// A request that has ended when every copy before it has. `Release` gives the event back and deletes it.
struct Request {
  DriverCopies* copies;
  void* event;
};

void* Failed(DriverCopies& copies, int error) {
  copies.error = error;
  return reinterpret_cast<void*>(static_cast<intptr_t>(kFailed));
}

// Starts the copies. A copy takes 2 us to start, and half a microsecond in a batch.
void* StartCopies(void* endpoint, void* key, bool is_get, const Run* runs, size_t count) {
  auto& copies = *static_cast<DriverCopies*>(endpoint);
  const auto& memory = *static_cast<const PeerMemory*>(key);
  copies.to.resize(count);
  copies.from.resize(count);
  copies.sizes.resize(count);
  for (size_t i = 0; i < count; ++i) {
    const uint64_t local = runs[i].local, remote = runs[i].remote;
    const size_t bytes = runs[i].bytes;
    if (!memory.Holds(remote, bytes)) return Failed(copies, kCudaInvalidValue);
    const uint64_t there = memory.here + (remote - memory.remote);
    copies.to[i] = is_get ? local : there;
    copies.from[i] = is_get ? there : local;
    copies.sizes[i] = bytes;
  }
  Driver& driver = copies.driver;
  void* popped;
  int error = driver.push(driver.context);
  if (error) return Failed(copies, error);
  if (driver.batch && count > 1) {
    BatchAttributes attributes;
    size_t first = 0;
    error = driver.batch(copies.to.data(), copies.from.data(), copies.sizes.data(), count, &attributes, &first, 1,
                         driver.stream);
    // The driver may not take this memory in batches: copy one by one, which shows an error of the device again.
    if (error) driver.batch = nullptr;
  }
  if (!driver.batch || count == 1) {
    error = 0;
    for (size_t i = 0; i < count && !error; ++i)
      error = driver.copy(copies.to[i], copies.from[i], copies.sizes[i], driver.stream);
  }
  driver.pop(&popped);
  return error ? Failed(copies, error) : nullptr;
}

void* Flush(void* endpoint, const void*) {
  auto& copies = *static_cast<DriverCopies*>(endpoint);
  const Driver& driver = copies.driver;
  void *popped, *event = nullptr;
  int error = driver.push(driver.context);
  if (error) return Failed(copies, error);
  if (!copies.idle_events.empty()) {
    event = copies.idle_events.back();
    copies.idle_events.pop_back();
  } else {
    error = driver.event_create(&event, kEventDisableTiming);
  }
  if (!error) error = driver.event_record(event, driver.stream);
  driver.pop(&popped);
  if (error) {
    if (event) copies.idle_events.push_back(event);
    return Failed(copies, error);
  }
  return new Request{&copies, event};
}

int8_t Check(void* request) {
  auto& waited = *static_cast<Request*>(request);
  const int error = waited.copies->driver.event_query(waited.event);
  if (error == kCudaNotReady) return kInProgress;
  if (error) Failed(*waited.copies, error);
  return error ? kFailed : 0;
}

void Release(void* request) {
  auto* waited = static_cast<Request*>(request);
  waited->copies->idle_events.push_back(waited->event);
  delete waited;
}

// The GPU needs no driving.
unsigned Progress(void*) { return 0; }

}  // namespace

void DriverCopies::Close() {
  for (void* event : idle_events) driver.event_destroy(event);
  idle_events.clear();
}

void UseDriver(Link& link, DriverCopies& copies) {
  link.flush = Flush;
  link.progress = Progress;
  link.check = Check;
  link.release = Release;
  link.start = StartCopies;
  link.endpoint = &copies;
}

}  // namespace xen_moe::transfer
