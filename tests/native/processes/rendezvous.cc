#include "tests/native/processes/rendezvous.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <stdexcept>

namespace native {
namespace {

double Seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

class MemoryRendezvous : public Rendezvous {
 public:
  MemoryRendezvous(Shared* shared, int rank, int ranks) : shared_(shared), rank_(rank), ranks_(ranks) {}
  std::vector<uint64_t> AllGather(uint64_t number, double seconds) override {
    Shared& s = *shared_;
    const uint32_t now = s.round;
    uint64_t* const numbers = s.numbers[now & 1];  // no rank writes the next round's numbers before all have read these
    numbers[rank_] = number;
    if (s.arrived.fetch_add(1) + 1 == static_cast<uint32_t>(ranks_)) {
      s.arrived = 0;
      ++s.round;
    }
    for (const double start = Seconds(); s.round == now;) {
      if (s.ended) throw std::runtime_error("another process has failed");
      if (Seconds() - start > seconds) {
        throw std::runtime_error("not all processes came within " + std::to_string(static_cast<int>(seconds)) + " s");
      }
      usleep(100);
    }
    return {numbers, numbers + ranks_};
  }
  void ShowStep(const char* what) override {
    std::snprintf(shared_->reports[rank_].text, sizeof(Shared::Report::text), "%s", what);
  }

 private:
  Shared* const shared_;
  const int rank_, ranks_;
};

// Rank 0 is connected with all other ranks, receives their numbers, and sends all of them to every rank.
class TcpRendezvous : public Rendezvous {
 public:
  TcpRendezvous(const std::string& address, int rank, int ranks, double seconds) : rank_(rank), ranks_(ranks) {
    const size_t colon = address.rfind(':');
    if (colon == std::string::npos) throw std::runtime_error("--address: HOST:PORT");
    const std::string host = address.substr(0, colon), port = address.substr(colon + 1);
    addrinfo hints{}, *found = nullptr;
    hints.ai_family = AF_INET, hints.ai_socktype = SOCK_STREAM;
    if (rank == 0) hints.ai_flags = AI_PASSIVE;  // on every address of this host
    if (getaddrinfo(rank == 0 ? nullptr : host.c_str(), port.c_str(), &hints, &found) != 0) {
      throw std::runtime_error("--address: " + address + " is not known");
    }
    const double until = Seconds() + seconds;
    rank == 0 ? Gather(*found, until) : Join(*found, until, address);
    freeaddrinfo(found);
  }
  ~TcpRendezvous() override {
    for (int fd : others_) close(fd);
  }
  std::vector<uint64_t> AllGather(uint64_t number, double seconds) override {
    std::vector<uint64_t> numbers(ranks_);
    numbers[rank_] = number;
    const double until = Seconds() + seconds;
    const size_t all = 8 * numbers.size();
    if (rank_ != 0) {
      Pass(others_[0], &number, 8, true, until);
      Pass(others_[0], numbers.data(), all, false, until);
      return numbers;
    }
    for (int r = 1; r < ranks_; ++r) Pass(others_[r - 1], &numbers[r], 8, false, until);
    for (int r = 1; r < ranks_; ++r) Pass(others_[r - 1], numbers.data(), all, true, until);
    return numbers;
  }

 private:
  void Gather(const addrinfo& at, double until) {
    const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(listener, at.ai_addr, at.ai_addrlen) != 0 || listen(listener, ranks_) != 0) {
      throw std::runtime_error(std::string("--address: ") + std::strerror(errno));
    }
    others_.assign(ranks_ - 1, -1);
    for (int i = 1; i < ranks_; ++i) {
      Await(listener, POLLIN, until);
      const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
      uint64_t who = 0;
      Pass(fd, &who, 8, false, until);
      if (who < 1 || who >= static_cast<uint64_t>(ranks_) || others_[who - 1] >= 0) {
        throw std::runtime_error("--rank: " + std::to_string(who) + " came twice, or is none of this run");
      }
      others_[who - 1] = fd;
    }
    close(listener);
  }
  void Join(const addrinfo& at, double until, const std::string& address) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    while (connect(fd, at.ai_addr, at.ai_addrlen) != 0) {  // rank 0 may not listen yet
      if (Seconds() > until) throw std::runtime_error("--address: no rank 0 at " + address);
      usleep(20000);
    }
    others_ = {fd};
    uint64_t who = rank_;
    Pass(fd, &who, 8, true, until);
  }
  static void Await(int fd, short what, double until) {
    pollfd wait{fd, what, 0};
    const double left = until - Seconds();
    if (left <= 0 || poll(&wait, 1, static_cast<int>(1000 * left) + 1) != 1) {
      throw std::runtime_error("not all processes came in time");
    }
  }
  static void Pass(int fd, void* data, size_t bytes, bool out, double until) {
    for (char* at = static_cast<char*>(data); bytes > 0;) {
      Await(fd, out ? POLLOUT : POLLIN, until);
      const ssize_t n = out ? send(fd, at, bytes, MSG_NOSIGNAL) : recv(fd, at, bytes, 0);
      if (n <= 0) throw std::runtime_error("another process has failed");
      at += n, bytes -= static_cast<size_t>(n);
    }
  }

  const int rank_, ranks_;
  std::vector<int> others_;  // rank 0: ranks 1, 2, ...; else rank 0
};

}  // namespace

void Rendezvous::Broadcast(char* bytes, size_t count, double seconds) {
  for (size_t at = 0; at < count; at += 8) {
    uint64_t word;
    std::memcpy(&word, bytes + at, 8);
    word = AllGather(word, seconds)[0];
    std::memcpy(bytes + at, &word, 8);
  }
}

std::unique_ptr<Rendezvous> RendezvousInMemory(Shared* shared, int rank, int ranks) {
  return std::make_unique<MemoryRendezvous>(shared, rank, ranks);
}
std::unique_ptr<Rendezvous> RendezvousOverTcp(const std::string& address, int rank, int ranks, double seconds) {
  return std::make_unique<TcpRendezvous>(address, rank, ranks, seconds);
}

}  // namespace native
