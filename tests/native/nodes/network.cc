#include "tests/native/nodes/network.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cuda_kernels/node/rail_plan.h"

namespace native {

using namespace xen_moe;

namespace {

uint64_t Now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}
[[noreturn]] void Broken(const char* what, int source, int target, uint64_t to, uint64_t from, uint64_t bytes) {
  std::fprintf(stderr, "network: %s: rank %d to %d, offsets %llu and %llu, %llu bytes\n", what, source, target,
               static_cast<unsigned long long>(to), static_cast<unsigned long long>(from),
               static_cast<unsigned long long>(bytes));
  std::abort();
}

}  // namespace

Network::Network(int ranks, int ranks_per_node, int signals, const Faults& faults)
    : ranks_(ranks),
      ranks_per_node_(ranks_per_node),
      signals_(signals),
      faults_(faults),
      random_(faults.seed),
      failure_(ranks),
      told_(ranks),
      counters_(static_cast<size_t>(ranks) * signals),
      free_at_(ranks),
      traffic_(static_cast<size_t>(ranks) * ranks),
      thread_([this] { Deliver(); }) {}

Network::~Network() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Network::Register(uint32_t generation, int rank, char* memory, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  memory_[{generation & 0xFF, rank}] = {memory, bytes};
}
void Network::RegisterFailure(int rank, uint64_t* word) {
  std::lock_guard<std::mutex> lock(mutex_);
  failure_[rank] = word;
}
void Network::RegisterTold(int rank, uint64_t* words) {
  std::lock_guard<std::mutex> lock(mutex_);
  told_[rank] = words;
}

uint64_t Network::Later(uint64_t now) {
  return faults_.most_delay_us ? now + random_() % (1000u * static_cast<unsigned>(faults_.most_delay_us)) : now;
}

void Network::Put(int context, uint32_t generation, int source, int target, uint64_t to, uint64_t from, uint64_t bytes,
                  int signal) {
  if (source / ranks_per_node_ == target / ranks_per_node_) Broken("inside a node", source, target, to, from, bytes);
  if ((to | from | bytes) % 16) Broken("not a multiple of 16", source, target, to, from, bytes);
  if (signal >= signals_) Broken("no such signal", source, target, to, from, bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  Message m;
  m.context = context, m.source = source, m.target = target, m.signal = signal;
  const uint64_t now = Now();
  if (bytes) {
    const auto own = memory_.find({generation & 0xFF, source}), theirs = memory_.find({generation & 0xFF, target});
    if (own == memory_.end() || theirs == memory_.end()) Broken("no such memory", source, target, to, from, bytes);
    if (from + bytes > own->second.second || to + bytes > theirs->second.second)
      Broken("outside the memory", source, target, to, from, bytes);
    m.from = own->second.first + from, m.to = theirs->second.first + to;
    uint64_t cut = bytes;
    if (faults_.reorder && bytes >= 64) cut = 16 * (1 + random_() % (bytes / 16 - 1));
    const auto delay = delay_ns_.find(target);
    uint64_t from_now = now + (delay == delay_ns_.end() ? 0 : delay->second);
    if (const auto starved = starved_.find({source, target}); starved != starved_.end()) {
      m.lost = starved->second.puts++ > 0;
      from_now += starved->second.delay_ns;
    }
    m.pieces.push_back({0, cut, Later(from_now)});
    if (cut < bytes) m.pieces.push_back({cut, bytes, Later(from_now)});
    if (overtake_ns_ && bytes >= sizeof(ChunkHeader)) {
      m.epoch = AnnouncedEpoch(reinterpret_cast<const ChunkHeader*>(m.from)->announcement);
      ++sent_[{source, target, m.epoch}].puts;
      if (m.epoch % 2 && source < target) m.overtaken_until = now + overtake_ns_;
      if (random_() % 2) m.pieces.front().overtaken = true;
      m.pieces.back().overtaken = true;
    }
    if (m.overtaken_until) {  // it is on its way: the source may be written again
      m.kept.assign(m.from, m.from + bytes);
      m.from = m.kept.data();
    } else {
      m.ticket = ++tickets_;
      outstanding_[{source, context}][m.ticket] = target;
      ++uncounted_[{source, context}];
    }
  }
  m.signal_not_before = Later(now);
  Traffic& traffic = traffic_[source * ranks_ + target];
  traffic.bytes += bytes, traffic.puts += bytes != 0, traffic.signals += signal >= 0;
  messages_.push_back(std::move(m));
  changed_.notify_all();
}

uint64_t Network::Count(int rank, int signal) const {
  return __atomic_load_n(&counters_[static_cast<size_t>(rank) * signals_ + signal], __ATOMIC_ACQUIRE);
}

int Network::Pending(int rank, int context) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto& own = outstanding_[{rank, context}];
  if (faults_.broken & kBrokenCompletions)
    return uncounted_[{rank, context}] > 0 && !own.empty() ? own.begin()->second : -1;
  return own.empty() ? -1 : own.begin()->second;
}

void Network::Fail(int source, int target, uint64_t word) { PostWord(source, target, -1, word); }
void Network::Notify(int source, int target, int about, uint64_t word) { PostWord(source, target, about, word); }
void Network::PostWord(int source, int target, int about, uint64_t word) {
  std::lock_guard<std::mutex> lock(mutex_);
  if ((about < 0 ? failure_ : told_)[target] == nullptr) Broken("no mailbox", source, target, 0, 0, 0);
  Message m;
  m.source = source, m.target = target, m.about = about, m.word = word;
  m.signal_not_before = Later(Now());
  messages_.push_back(std::move(m));
  changed_.notify_all();
}

void Network::Hold(bool held) {
  std::lock_guard<std::mutex> lock(mutex_);
  held_ = held;
  changed_.notify_all();
}
bool Network::Step() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!held_) std::abort();  // the network's own thread would take turns with the caller
  return DeliverOne(~uint64_t{0});
}
void Network::Kill(int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  killed_.insert(rank);
  changed_.notify_all();
}
void Network::Starve(int source, int target, int milliseconds) {
  std::lock_guard<std::mutex> lock(mutex_);
  starved_[{source, target}] = {uint64_t{1000000} * static_cast<unsigned>(milliseconds), 0};
}
void Network::Delay(int rank, int milliseconds) {
  std::lock_guard<std::mutex> lock(mutex_);
  delay_ns_[rank] = uint64_t{1000000} * static_cast<unsigned>(milliseconds);
}
void Network::Overtake(int most_milliseconds) {
  std::lock_guard<std::mutex> lock(mutex_);
  overtake_ns_ = uint64_t{1000000} * static_cast<unsigned>(most_milliseconds);
}
void Network::Drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] {
    return again_.empty() && std::all_of(messages_.begin(), messages_.end(), [&](const Message& m) { return Lost(m); });
  });
}
void Network::ClearCounters() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::fill(counters_.begin(), counters_.end(), uint64_t{0});
}
Traffic Network::Between(int source, int target) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return traffic_[source * ranks_ + target];
}
void Network::ClearTraffic() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::fill(traffic_.begin(), traffic_.end(), Traffic{});
}
uint64_t Network::LargestBurst() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return largest_burst_;
}

void Network::Complete(int rank, int context, uint64_t ticket) {
  outstanding_[{rank, context}].erase(ticket);  // nothing, if it was reported before
  --uncounted_[{rank, context}];
}

// Returns true if all puts that the signal announces have arrived.
bool Network::MaySignal(const Message& message, uint64_t now) const {
  if (message.signal < 0 || message.signalled || message.signal_not_before > now) return false;
  if (faults_.broken & kBrokenSignals) return true;
  if (!message.pieces.empty()) return false;
  if (faults_.broken & kBrokenWeakSignals) return true;
  for (const Message& m : messages_) {
    if (&m == &message) return true;
    // A context is a warp of an operation (transport.cuh).
    const bool before = m.source == message.source && m.target == message.target && m.context == message.context &&
                        m.epoch == message.epoch;
    if (before && !m.pieces.empty()) return false;
  }
  return true;
}

// Returns true if the next operation has not arrived yet.
bool Network::WaitsForNext(const Message& m, uint64_t now) const {
  if (m.overtaken_until <= now) return false;
  const auto own = sent_.find({m.source, m.target, m.epoch}), next = sent_.find({m.source, m.target, m.epoch + 1});
  return next == sent_.end() || next->second.signalled < own->second.puts;
}

// With the mutex. False: nothing can be delivered now.
bool Network::DeliverOne(uint64_t now) {
  struct Event {
    std::list<Message>::iterator message;
    size_t piece;  // pieces.size(): the signal, or the failure word
  };
  std::vector<Event> events;
  std::set<std::pair<int, int>> busy;  // pairs that have an earlier message on its way
  for (auto m = messages_.begin(); m != messages_.end(); ++m) {
    if (Lost(*m)) continue;
    const bool first = busy.insert({m->source, m->target}).second;
    if (!faults_.reorder && !first) continue;
    for (size_t i = 0; i < m->pieces.size(); ++i) {
      if (m->pieces[i].overtaken && WaitsForNext(*m, now)) continue;
      if (m->pieces[i].not_before <= now && free_at_[m->source] <= now) events.push_back({m, i});
    }
    const bool says = m->word != 0 && m->signal_not_before <= now;
    if (says || MaySignal(*m, now)) events.push_back({m, m->pieces.size()});
  }
  if (events.empty() && again_.empty()) return false;
  if (events.empty() || (!again_.empty() && random_() % 4 == 0)) {
    const size_t which = random_() % again_.size();
    const Again again = again_[which];
    again_.erase(again_.begin() + static_cast<std::ptrdiff_t>(which));
    Complete(again.rank, again.context, again.ticket);
    return true;
  }
  const Event event = events[random_() % events.size()];
  Message& m = *event.message;
  if (event.piece < m.pieces.size()) {
    const Piece piece = m.pieces[event.piece];
    std::memcpy(m.to + piece.begin, m.from + piece.begin, piece.end - piece.begin);
    m.pieces.erase(m.pieces.begin() + static_cast<std::ptrdiff_t>(event.piece));
    if (faults_.bytes_per_s > 0) {
      const double ns = 1e9 * static_cast<double>(piece.end - piece.begin) / faults_.bytes_per_s;
      free_at_[m.source] = std::max(free_at_[m.source], now) + static_cast<uint64_t>(ns);
    }
    if (m.pieces.empty() && m.ticket) {
      Complete(m.source, m.context, m.ticket);
      if (faults_.duplicate) again_.push_back({m.source, m.context, m.ticket});
    }
  } else if (m.about >= 0) {
    __atomic_store_n(told_[m.target] + m.about, m.word, __ATOMIC_RELAXED);
    m.signalled = true;
  } else if (m.word != 0) {
    uint64_t none = 0;
    __atomic_compare_exchange_n(failure_[m.target], &none, m.word, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    m.signalled = true;
  } else {
    Signal(m.target, m.signal, now);
  }
  messages_.remove_if([](const Message& sent) {
    return sent.pieces.empty() && (sent.signalled || (sent.signal < 0 && sent.word == 0));
  });
  return true;
}

// Signals everything that may be signalled there now, at once: a kernel that compares a counter for equality misses its
// value.
void Network::Signal(int target, int signal, uint64_t now) {
  std::vector<Message*> ready;
  for (Message& m : messages_) {
    if (m.target == target && m.signal == signal && !Lost(m) && MaySignal(m, now)) ready.push_back(&m);
  }
  for (Message* m : ready) {
    m->signalled = true;
    if (m->epoch) ++sent_[{m->source, m->target, m->epoch}].signalled;
  }
  largest_burst_ = std::max<uint64_t>(largest_burst_, ready.size());
  __atomic_fetch_add(&counters_[static_cast<size_t>(target) * signals_ + signal], uint64_t{ready.size()},
                     __ATOMIC_SEQ_CST);
}

void Network::Deliver() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!ends_) {
    if (!held_ && DeliverOne(Now())) {
      changed_.notify_all();
      lock.unlock();  // let others put in between
      lock.lock();
    } else if (messages_.empty() || held_) {
      changed_.wait(lock);
    } else {
      changed_.wait_for(lock, std::chrono::microseconds(20));
    }
  }
}

}  // namespace native
