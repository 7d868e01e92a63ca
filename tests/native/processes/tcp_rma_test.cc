// The network of tcp_rma.cc by itself: ranks are threads that drive the plugin's table as NCCL does, on host memory, or
// on that of the driver that XEN_MOE_RMA_DRIVER names (fake_driver.cc), which the process of copier.h then copies.
//   tcp_rma_test NAME|all SEED     One line per test. Exit status 0: all passed.
#include "tests/native/processes/tcp_rma.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/native/processes/copier.h"
#include "tests/native/processes/rendezvous.h"
#include "tests/native/processes/rma_interface.h"

namespace {

using rma::kSuccess;
const rma::Plugin& plugin = ncclRmaPlugin_v14;

double Now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
void Expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}
int seed = 1;
std::string Seeded(const std::string& faults) {
  return "seed=" + std::to_string(seed) + (faults.empty() ? "" : ",") + faults;
}

const bool on_gpu = std::getenv("XEN_MOE_RMA_DRIVER") != nullptr;
const int kind = on_gpu ? rma::kDeviceMemory : rma::kHostMemory;

// Zeros, on the host or as the driver has them. Not `shareable`: as NCCL makes its signals.
template <class T>
class Array {
 public:
  Array(size_t count, bool shareable) : count_(count) {
    if (!on_gpu) {
      own_.resize(count);
      first_ = own_.data();
      return;
    }
    const rma::Driver& d = *rma::Driver::Get();
    const rma::AllocationProperties properties{1, shareable ? rma::kFileDescriptor : 0, {1, 3}, nullptr, {}};
    const rma::Access access = rma::ReadWrite(3);
    mapped_ = (kOffset + count * sizeof(T) + 4095) / 4096 * 4096;
    rma::Check(d.MemAddressReserve(&at_, mapped_, 0, 0, 0), "reserve");
    rma::Check(d.MemCreate(&handle_, mapped_, &properties, 0), "create");
    rma::Check(d.MemMap(at_, mapped_, 0, handle_, 0), "map");
    rma::Check(d.MemSetAccess(at_, mapped_, &access, 1), "access");
    first_ = reinterpret_cast<T*>(at_ + kOffset);
  }
  Array(const Array&) = delete;
  ~Array() {
    if (on_gpu) rma::Driver::Get()->MemUnmap(at_, mapped_);
  }
  size_t size() const { return count_; }
  T* data() const { return first_; }
  T* begin() const { return first_; }
  T* end() const { return first_ + count_; }
  T& operator[](size_t i) const { return first_[i]; }

 private:
  static constexpr size_t kOffset = 256;  // the registered memory need not begin where the allocation does
  size_t count_, mapped_ = 0;
  rma::Address at_ = 0;
  rma::Handle handle_ = 0;
  std::vector<T> own_;
  T* first_ = nullptr;
};

// A rank's end: memory of `bytes` and `signals` counters, registered.
struct Rank {
  Rank(int number, size_t size, int signals) : rank(number), bytes(size, true), counters(signals, false) {}
  int rank;
  void *group = nullptr, *context = nullptr, *memory = nullptr, *signals = nullptr;
  Array<uint8_t> bytes;
  Array<uint64_t> counters;

  void* Put(int to, uint64_t from, uint64_t size, uint64_t at) {
    void* request = nullptr;
    Expect(plugin.put(context, 0, from, memory, size, at, memory, to, &request) == kSuccess, "put");
    return request;
  }
  void* PutSignal(int to, uint64_t from, uint64_t size, uint64_t at, int signal, bool strong, uint64_t value = 1,
                  uint32_t operation = rma::kIncrement) {
    void* request = nullptr;
    Expect(plugin.put_signal(context, 0, from, memory, size, at, memory, to, 8 * signal, signals, value, operation,
                             strong, &request) == kSuccess,
           "put with signal");
    return request;
  }
  bool Done(void* request, double seconds) {
    for (const double until = Now() + seconds; Now() < until;) {
      int done = 0;
      Expect(plugin.test(group, request, &done) == kSuccess, "test");
      if (done) return true;
      plugin.progress(context);
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return false;
  }
  void Complete(void* request) { Expect(Done(request, 20), "a put did not complete within 20 s"); }
  uint64_t Count(int signal) const { return __atomic_load_n(&counters[signal], __ATOMIC_ACQUIRE); }
  bool Await(int signal, uint64_t value, double seconds = 20) const {
    for (const double until = Now() + seconds; Now() < until;) {
      if (Count(signal) >= value) return true;
    }
    return false;
  }
};

struct World {
  World(int count, const std::string& faults, size_t bytes, int signals) {
    for (int i = 0; i < count; ++i) owned.push_back(std::make_unique<Rank>(i, bytes, signals));
    setenv("XEN_MOE_RMA", Seeded(faults).c_str(), 1);
    Expect(plugin.init(nullptr, 0, nullptr) == kSuccess, "init");
    std::vector<std::vector<char>> handles(count, std::vector<char>(rma::kHandleBytes));
    std::vector<void*> listeners(count), pointers;
    for (int i = 0; i < count; ++i) {
      Expect(plugin.listen(nullptr, 0, handles[i].data(), &listeners[i]) == kSuccess, "listen");
      pointers.push_back(handles[i].data());
    }
    std::vector<std::thread> threads;
    std::atomic<int> failed{0};
    for (int i = 0; i < count; ++i) {
      threads.emplace_back([&, i] {
        std::vector<void*> own = pointers;
        failed += plugin.connect(nullptr, own.data(), count, i, listeners[i], &ranks[i].group) != kSuccess;
      });
    }
    for (std::thread& t : threads) t.join();
    Expect(failed == 0, "connect");
    for (int i = 0; i < count; ++i) {
      Rank& r = ranks[i];
      rma::ContextConfig config{1, -1, 1};
      plugin.close_listener(listeners[i]);
      Expect(plugin.create_context(r.group, &config, &r.context) == kSuccess, "create_context");
      RegisterOf(r);
    }
  }
  ~World() {
    for (const auto& r : owned) {
      plugin.destroy_context(r->context);
      plugin.close_group(r->group);
    }
  }
  static void RegisterOf(Rank& r) {
    Expect(
        plugin.register_memory(r.group, r.bytes.data(), r.bytes.size(), kind, 0, &r.memory) == kSuccess &&
            plugin.register_memory(r.group, r.counters.data(), 8 * r.counters.size(), kind, 0, &r.signals) == kSuccess,
        "register_memory");
  }
  struct {
    std::vector<std::unique_ptr<Rank>>* owned;
    Rank& operator[](int i) { return *(*owned)[i]; }
  } ranks{&owned};
  std::vector<std::unique_ptr<Rank>> owned;
};

// Puts of many sizes, their sources spoilt as soon as they have completed; every byte is counted once.
void Puts(const std::string& faults) {
  constexpr int kPuts = 40;
  World world(3, faults, 1 << 22, 2);
  std::mt19937 random(seed);
  for (int from = 0; from < 3; ++from) {
    Rank& source = world.ranks[from];
    Rank& target = world.ranks[(from + 1) % 3];
    RmaTraffic before{}, after{};
    xen_moe_rma_traffic(from, target.rank, &before);
    uint64_t sent = 0, at = 0;
    std::vector<uint8_t> expected;
    std::vector<void*> requests;
    for (int i = 0; i < kPuts; ++i) {
      const uint64_t size = 16 * (random() % (i % 8 == 0 ? 8192 : 64));
      for (uint64_t b = 0; b < size; ++b) source.bytes[at + b] = static_cast<uint8_t>(random());
      expected.insert(expected.end(), source.bytes.begin() + at, source.bytes.begin() + at + size);
      requests.push_back(source.PutSignal(target.rank, at, size, (2 << 20) + at, 0, true));
      at += size, sent += size;
    }
    for (void* request : requests) source.Complete(request);
    std::fill(source.bytes.begin(), source.bytes.begin() + at, 0xEE);
    Expect(target.Await(0, kPuts), "the signals did not come");
    Expect(std::memcmp(target.bytes.data() + (2 << 20), expected.data(), expected.size()) == 0, "wrong bytes");
    xen_moe_rma_traffic(from, target.rank, &after);
    Expect(after.bytes - before.bytes == sent && after.puts - before.puts == kPuts &&
               after.signals - before.signals == kPuts,
           "counted " + std::to_string(after.bytes - before.bytes) + " bytes instead of " + std::to_string(sent));
  }
}

// Rounds of unsignalled puts and one signal. How many rounds saw the signal before a byte that it speaks for: of its
// own put, of the earlier ones.
struct Early {
  int own = 0, earlier = 0;
};
Early SignalRounds(const std::string& faults, bool strong, int rounds) {
  constexpr int kBefore = 4;
  constexpr uint64_t kSize = 2048;
  World world(2, faults, 1 << 20, 1);
  Rank &source = world.ranks[0], &target = world.ranks[1];
  Early early;
  for (int round = 1; round <= rounds; ++round) {
    std::fill(source.bytes.begin(), source.bytes.begin() + (kBefore + 1) * kSize, static_cast<uint8_t>(round));
    std::vector<void*> requests;
    for (int i = 0; i < kBefore; ++i) requests.push_back(source.Put(1, i * kSize, kSize, i * kSize));
    requests.push_back(source.PutSignal(1, kBefore * kSize, kSize, kBefore * kSize, 0, strong));
    Expect(target.Await(0, round), "a signal did not come");
    bool whole[2] = {true, true};
    for (uint64_t b = 0; b < (kBefore + 1) * kSize; ++b) {
      const uint8_t seen = *const_cast<volatile uint8_t*>(&target.bytes[b]);
      if (seen != round) whole[b / kSize == kBefore] = false;
    }
    early.earlier += !whole[0], early.own += !whole[1];
    for (void* request : requests) source.Complete(request);
    // The bytes that came late must not spoil the next round.
    const double until = Now() + 20;
    for (uint64_t b = 0; b < (kBefore + 1) * kSize; ++b) {
      while (*const_cast<volatile uint8_t*>(&target.bytes[b]) != round) Expect(Now() < until, "bytes never came");
    }
  }
  return early;
}
const char* const kBad = "reorder=1,duplicate=1,delay_us=300";
// Delay for effects that the test must see: long enough for a busy machine to look in time.
const char* const kLate = "reorder=1,duplicate=1,delay_us=20000";

void StrongSignals() {
  const Early early = SignalRounds(kBad, true, 60);
  Expect(early.own == 0 && early.earlier == 0, "a strong signal came too early");
}
void WeakSignals() {
  const Early early = SignalRounds(kLate, false, 25);
  Expect(early.own == 0, "a weak signal came before its own put");
  Expect(early.earlier > 0, "a weak signal never came before an earlier put: nothing is reordered");
}
void BrokenStrongSignals() {
  Expect(SignalRounds(std::string(kLate) + ",broken=1", true, 25).earlier > 0, "the broken rule was not seen");
}
void BrokenSignals() {
  Expect(SignalRounds(std::string(kLate) + ",broken=4", true, 25).own > 0, "the broken rule was not seen");
}

// Counters grow by the addends of several ranks at once.
void Added() {
  World world(3, kBad, 4096, 3);
  std::vector<std::thread> threads;
  for (int from = 1; from < 3; ++from) {
    threads.emplace_back([&, from] {
      std::vector<void*> requests;
      for (int i = 0; i < 50; ++i) {
        requests.push_back(world.ranks[from].PutSignal(0, 0, 16, 64 * from, 1, true));
        requests.push_back(world.ranks[from].PutSignal(0, 0, 0, 0, 2, false, 1000 + from, rma::kIncrement + 1));
      }
      for (void* request : requests) world.ranks[from].Complete(request);
    });
  }
  for (std::thread& t : threads) t.join();
  Expect(world.ranks[0].Await(1, 100) && world.ranks[0].Await(2, 50 * 2003), "counts");
  Expect(world.ranks[0].Count(0) == 0 && world.ranks[0].Count(1) == 100 && world.ranks[0].Count(2) == 50 * 2003,
         "counters that are too high");
}

// A limit of bytes a second, for all ranks of this process.
void Throttled() {
  constexpr double kRate = 40e6;
  constexpr uint64_t kSize = 4 << 20;
  World world(3, "bytes_per_s=" + std::to_string(kRate), kSize, 1);
  const double start = Now();
  void* const one = world.ranks[0].PutSignal(2, 0, kSize, 0, 0, true);
  void* const other = world.ranks[1].PutSignal(2, 0, kSize, 0, 0, true);
  Expect(world.ranks[2].Await(0, 2), "the signals did not come");
  const double took = Now() - start, least = 2 * kSize / kRate;
  world.ranks[0].Complete(one), world.ranks[1].Complete(other);
  Expect(took >= 0.99 * least && took < 3 * least + 2, std::to_string(took) + " s instead of " + std::to_string(least));
}

// A rank registers memory later than the other ranks: puts made to it meanwhile arrive.
void Late() {
  World world(2, "", 4096, 1);
  Rank &source = world.ranks[0], &target = world.ranks[1];
  std::fill(source.bytes.begin(), source.bytes.end(), 7);
  World::RegisterOf(source);
  void* const request = source.PutSignal(1, 0, 4096, 0, 0, true);
  source.Complete(request);
  Expect(!target.Await(0, 1, 0.05), "a signal for memory that is not there");
  World::RegisterOf(target);
  Expect(target.Await(0, 1) && target.bytes[4095] == 7, "what was put early did not arrive");
}

// Puts outside the memory, to no rank, of device memory without a driver; invalid words.
void Errors() {
  World world(2, "", 4096, 1);
  Rank& r = world.ranks[0];
  void* request = nullptr;
  auto put = [&](uint64_t from, uint64_t bytes, uint64_t to, uint32_t rank) {
    return plugin.put(r.context, 0, from, r.memory, bytes, to, r.memory, rank, &request);
  };
  Expect(put(0, 4097, 0, 1) == rma::kInvalidArgument && put(4096, 16, 0, 1) == rma::kInvalidArgument &&
             put(0, 16, 4081, 1) == rma::kInvalidArgument && put(~0ull, 16, 0, 1) == rma::kInvalidArgument,
         "a put outside the memory was taken");
  Expect(put(0, 16, 0, 2) == rma::kInvalidArgument, "a put to rank 2 of 2 was taken");
  auto signal = [&](uint64_t at) {
    return plugin.put_signal(r.context, 0, 0, nullptr, 0, 0, nullptr, 1, at, r.signals, 1, 1, true, &request);
  };
  Expect(signal(8) == rma::kInvalidArgument && signal(4) == rma::kInvalidArgument, "a signal outside was taken");
  void* memory = nullptr;
  uint64_t host = 0;
  Expect(plugin.register_memory(r.group, &host, 8, rma::kDeviceMemory, 0, &memory) == rma::kSystemError,
         "device memory that is none, or without a driver, was taken");
  Expect(plugin.register_memory(r.group, &host, 8, 3, 0, &memory) == rma::kInvalidUsage,
         "a kind that is none was taken");
  setenv("XEN_MOE_RMA", "delay=3", 1);
  Expect(plugin.init(nullptr, 0, nullptr) == rma::kInvalidArgument, "an unknown word was taken");
  bool failed = true;
  Expect(plugin.last_error(r.context, &failed) == kSuccess && !failed, "a refused put is no failure of the network");
}

// A rank has died: puts to it do not complete, and the other ranks go on.
void Killed() {
  World world(3, "", 4096, 1);
  void* const before = world.ranks[0].PutSignal(2, 0, 16, 0, 0, true);
  world.ranks[0].Complete(before);
  Expect(world.ranks[2].Await(0, 1), "before the death");
  xen_moe_rma_kill(2);
  void* const to = world.ranks[0].PutSignal(2, 0, 16, 0, 0, true);
  void* const from = world.ranks[2].PutSignal(0, 0, 16, 0, 0, true);
  void* const among = world.ranks[0].PutSignal(1, 0, 16, 0, 0, true);
  world.ranks[0].Complete(among);
  Expect(world.ranks[1].Await(0, 1), "the others do not go on");
  Expect(!world.ranks[0].Done(to, 0.1) && !world.ranks[2].Done(from, 0.1), "a put to the dead completed");
  Expect(world.ranks[2].Count(0) == 1 && world.ranks[0].Count(0) == 0, "something came from the dead or to it");
}

// The process that copies is there, and when it ends the network fails instead of waiting.
void CopierEnds() {
  if (!on_gpu) return;
  World world(2, "", 4096, 1);
  Rank& r = world.ranks[0];
  world.ranks[0].Complete(r.PutSignal(1, 0, 16, 0, 0, true));
  Expect(world.ranks[1].Await(0, 1), "before the end");
  bool failed = true;
  Expect(plugin.last_error(r.context, &failed) == kSuccess && !failed, "a failure before there is one");
  kill(rma::Copier::Get()->process(), SIGKILL);
  void* const request = r.PutSignal(1, 0, 16, 0, 0, true);
  Expect(!r.Done(request, 0.5), "a put completed that no rank has read");
  Expect(plugin.last_error(r.context, &failed) == kSuccess && failed, "the end was not told");
}

// Memory that is taken back is not held any longer, and another may be registered.
void Unregistered() {
  World world(2, "", 4096, 1);
  for (int turn = 0; turn < 5; ++turn) {
    for (int i = 0; i < 2; ++i) {
      Rank& r = world.ranks[i];
      Expect(plugin.unregister_memory(r.group, r.memory) == kSuccess &&
                 plugin.unregister_memory(r.group, r.signals) == kSuccess,
             "unregister_memory");
      World::RegisterOf(r);
    }
    std::fill(world.ranks[0].bytes.begin(), world.ranks[0].bytes.end(), static_cast<uint8_t>(turn + 1));
    world.ranks[0].Complete(world.ranks[0].PutSignal(1, 0, 4096, 0, 0, true));
    Expect(world.ranks[1].Await(0, turn + 1) && world.ranks[1].bytes[4095] == turn + 1,
           "a put into memory registered again");
  }
}

// The rendezvous of processes, with threads in their place: every rank gets all numbers of a round and none of another,
// and no rank waits for a rank that never comes.
void TestRendezvous(const std::function<std::unique_ptr<native::Rendezvous>(int rank, int ranks)>& make) {
  constexpr int kRanks = 4, kRounds = 300;
  std::vector<std::thread> threads;
  std::vector<std::string> failed(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const std::unique_ptr<native::Rendezvous> rendezvous = make(rank, kRanks);
        for (uint64_t round = 0; round < kRounds; ++round) {
          const std::vector<uint64_t> numbers = rendezvous->AllGather(1000 * round + rank, 20);
          for (uint64_t r = 0; r < kRanks; ++r) Expect(numbers.at(r) == 1000 * round + r, "a wrong number");
        }
        char text[16] = {};
        if (rank == 0) std::strcpy(text, "to all of them");
        rendezvous->Broadcast(text, sizeof(text), 20);
        Expect(std::string(text) == "to all of them", "what rank 0 said did not come");
        if (rank == kRanks - 1) return;
        bool gave_up = false;
        try {
          rendezvous->AllGather(0, 0.2);
        } catch (const std::exception&) {
          gave_up = true;
        }
        Expect(gave_up, "a rank that never came was met");
      } catch (const std::exception& e) {
        failed[rank] = e.what();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  for (const std::string& why : failed) Expect(why.empty(), why);
}
void TestInMemory() {
  const auto shared = std::make_unique<native::Shared>();
  TestRendezvous([&](int rank, int ranks) { return native::RendezvousInMemory(shared.get(), rank, ranks); });
}
void TestOverTcp() {
  // Below the ports that the system gives to programs that ask for any port.
  const std::string address = "127.0.0.1:" + std::to_string(20000 + getpid() % 12000);
  TestRendezvous([&](int rank, int ranks) { return native::RendezvousOverTcp(address, rank, ranks, 20); });
}

struct Test {
  const char* name;
  std::function<void()> run;
};
const Test kTests[] = {
    {"puts", [] { Puts(""); }},
    {"bad_puts", [] { Puts(kBad); }},
    {"strong_signals", StrongSignals},
    {"weak_signals", WeakSignals},
    {"broken_strong_signals", BrokenStrongSignals},
    {"broken_signals", BrokenSignals},
    {"added", Added},
    {"throttled", Throttled},
    {"late", Late},
    {"unregistered", Unregistered},
    {"errors", Errors},
    {"rendezvous_in_memory", TestInMemory},
    {"rendezvous_over_tcp", TestOverTcp},
    {"copier_ends", CopierEnds},
    {"killed", Killed},  // the last: rank 2 stays dead
};

}  // namespace

int main(int argc, char** argv) {
  const std::string wanted = argc > 1 ? argv[1] : "all";
  if (argc > 2) seed = std::atoi(argv[2]);
  bool passed = true;
  for (const Test& test : kTests) {
    if (wanted != "all" && wanted != test.name) continue;
    const double start = Now();
    std::string failed;
    try {
      test.run();
    } catch (const std::exception& e) {
      failed = e.what();
    }
    std::printf("%-22s %s %6.2f s  %s\n", test.name, failed.empty() ? "passed" : "FAILED", Now() - start,
                failed.c_str());
    std::fflush(stdout);
    passed &= failed.empty();
  }
  return passed ? 0 : 1;
}
