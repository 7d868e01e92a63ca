// The posting loop: hands runs to a link and collects their completions, without Python between the calls. There is no
// UCX header and no link to UCX: Python has loaded the library, and passes the addresses of its functions.
#include <ctime>
#include <utility>

#include "ffi/transfer/posting.h"

namespace xen_moe::transfer {
namespace {

constexpr int kInProgress = 1, kLowestStatus = -256;

int64_t Now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

}  // namespace

// Handles the value that a function of the library has returned: null, a request to check later, or a negative status.
void Posting::Keep(void* returned) {
  const intptr_t status = reinterpret_cast<intptr_t>(returned);
  if (status >= 0 || status <= kLowestStatus) {
    if (status) requests_.push_back(returned);
    return;
  }
  if (!status_) status_ = static_cast<int32_t>(status);
  Stop();
}

// Hands over single pieces, up to a slice of bytes.
void Posting::HandOver() {
  const int64_t slice = link_.slice[memory_];
  const void* parameters = link_.parameters[memory_];
  int64_t budget = slice, pieces = link_.pieces;
  while (next_ < runs_.size() && budget > 0 && pieces-- > 0) {
    Run& run = runs_[next_];
    const int64_t bytes = run.bytes < slice ? run.bytes : slice;
    const Run piece = run;
    run = {run.local + bytes, run.remote + bytes, run.bytes - bytes};
    if (!run.bytes) ++next_;
    void* local = reinterpret_cast<void*>(piece.local);
    Keep(is_get_ ? link_.get(link_.endpoint, local, bytes, piece.remote, key_, parameters)
                 : link_.put(link_.endpoint, local, bytes, piece.remote, key_, parameters));
    bytes_posted_ += bytes;
    budget -= bytes;
  }
}

// Hands the next runs to `call`, up to a slice of bytes: whole runs, or the beginning of one that is longer.
void Posting::HandOverMany(PostMany call) {
  const int64_t slice = link_.slice[memory_];
  const size_t left = runs_.size() - next_;
  Run* first = runs_.data() + next_;
  int64_t bytes = 0;
  size_t count = 0;
  while (count < left && count < static_cast<size_t>(link_.pieces) && first[count].bytes <= slice - bytes)
    bytes += first[count++].bytes;
  const Run part = {first->local, first->remote, slice};
  const Run* runs = count ? first : &part;
  if (!count) {
    *first = {part.local + slice, part.remote + slice, first->bytes - slice};
    bytes = slice;
  }
  next_ += count;
  bytes_posted_ += bytes;
  Keep(call(link_.endpoint, key_, is_get_, runs, count ? count : 1));
}

void Posting::Collect() {
  size_t kept = 0;
  for (void* request : requests_) {
    const int status = link_.check(request);
    if (status == kInProgress) {
      requests_[kept++] = request;
      continue;
    }
    link_.release(request);
    if (status < 0) {
      if (!status_) status_ = status;
      Stop();
    }
  }
  requests_.resize(kept);
}

bool Posting::Advance(bool is_open, int polls) {
  if (done_) return true;
  const bool is_left = next_ < runs_.size();
  if (link_.move) {
    if (is_left) HandOverMany(link_.move);
    done_ = next_ == runs_.size();
    return done_;
  }
  if (!link_.start) {
    HandOver();
  } else if (is_left) {
    HandOverMany(link_.start);
  }
  for (;;) {
    Collect();
    if (next_ == runs_.size() && requests_.empty()) {
      if (flushing_ || !is_open) {
        done_ = true;
        return true;
      }
      // A put that has ended locally may still be in flight. The flush ends when all are in the peer's memory.
      flushing_ = true;
      Keep(link_.flush(link_.endpoint, link_.flush_parameters));
      if (requests_.empty()) continue;
    }
    if (requests_.empty()) return false;
    // UCX copies host memory in these calls, a piece at a time.
    if (!link_.progress(link_.worker) && polls-- <= 0) return false;
  }
}

bool Posting::Spin(int64_t nanoseconds) {
  constexpr int kPolls = 16;
  const int64_t begun = Now();
  do {
    if (Advance(true, kPolls)) return true;
  } while (Now() - begun < nanoseconds);
  return false;
}

std::unique_ptr<Posting> Start(const Link& link, bool is_get, void* key, int memory, std::vector<Run> runs, int polls) {
  auto posting = std::make_unique<Posting>(link, is_get, key, memory, std::move(runs));
  if (posting->Advance(true, polls) && !posting->status()) return nullptr;
  return posting;
}

Prepared::Prepared(const Link& link, void* key, int memory, std::vector<Run> runs, int polls)
    : link_(link), key_(key), memory_(memory), polls_(polls), runs_(std::move(runs)), placed_(runs_) {
  for (const Run& run : runs_) bytes_ += run.bytes;
}

std::unique_ptr<Posting> Prepared::Start(int64_t local) {
  for (size_t i = 0; i < runs_.size(); ++i) placed_[i].local = runs_[i].local + local;
  // A write that is moved at once, and without an error, needs no posting.
  if (link_.move && bytes_ <= link_.slice[memory_] && runs_.size() <= static_cast<size_t>(link_.pieces) &&
      !link_.move(link_.endpoint, key_, false, placed_.data(), placed_.size()))
    return nullptr;
  return transfer::Start(link_, false, key_, memory_, placed_, polls_);
}

}  // namespace xen_moe::transfer
