#include "ffi/rails.h"

#include <cstddef>

namespace xen_moe {

void Rails::AllocateWithin() {
  for (size_t i = 0; i < ranks_.size(); ++i) {
    const int ordinal = groups_.local()[i].ordinal;
    ranks_[i].counters = job_.gpus->Allocate(ordinal, CounterBytes(), groups_.OrdinalsOf(i));
    ranks_[i].memory = job_.gpus->Allocate(ordinal, RailBytes(groups_.ranks(), groups_.nodes()), {ordinal});
  }
}

// This table is the only place where kernels find pointers to memory of other nodes.
void Rails::FillWithin(size_t i, const std::vector<char*>& mailboxes) {
  Clear(i);
  PeerTable table{};
  for (size_t j = 0; j < ranks_.size(); ++j) {
    if (!groups_.SameGroup(i, j)) continue;
    const int rank = groups_.local()[j].rank;
    table.counters[rank] = reinterpret_cast<uint64_t*>(ranks_[j].counters);
    table.mailbox[rank] = reinterpret_cast<Mailbox*>(mailboxes[j]);
  }
  job_.gpus->Write(groups_.local()[i].ordinal, &memory(i)->peers, &table, sizeof(table));
}

void Rails::AllocateAcross() {
  const int ordinal = groups_.local().front().ordinal;
  ranks_.front().memory = job_.gpus->Allocate(ordinal, RailBytes(groups_.ranks(), groups_.nodes()), {ordinal});
}

void Rails::Connect(double seconds) {
  auto made = std::make_shared<std::string>(job_.link->made_bytes, '\0');
  if (!job_.provider->connect(job_.link->request(groups_.ranks(), groups_.nodes()), made.get(), seconds)) {
    Refuse(job_.provider->reason());
  }
  connection_ = std::move(made);
  settled_times_ = 0;
}

void Rails::FillAcross(char* mailbox) {
  const int ordinal = groups_.local().front().ordinal;
  job_.link->prepare(ordinal, groups_.ranks());
  job_.gpus->Zero(ordinal, memory(0), RailBytes(groups_.ranks(), groups_.nodes()));
  auto windows = std::make_unique<WindowTable>();
  windows->mailbox = job_.provider->window(mailbox);
  windows->ranks = groups_.ranks();
  for (int rank = 0; rank < groups_.ranks(); ++rank) windows->process[rank] = ProcessOf(groups_.DevicesOf(0)[rank]);
  job_.gpus->Write(ordinal, &memory(0)->windows, windows.get(), offsetof(WindowTable, reserved));
}

void Rails::WriteStaging(size_t i, const StagingRing& ring) {
  const int ordinal = groups_.local()[i].ordinal;
  if (!groups_.across()) {
    job_.gpus->Write(ordinal, memory(i)->peers.staging, ring.of_rank, sizeof(ring.of_rank));
    return;
  }
  void* windows[kGenerations] = {};
  for (int entry = 0; entry < kGenerations; ++entry) {
    if (ring.own[entry] != nullptr) windows[entry] = job_.provider->window(ring.own[entry]);
  }
  job_.gpus->Write(ordinal, memory(i)->windows.staging, windows, sizeof(windows));
}

// Between processes the counters belong to the link, and Settle has set them to zero.
void Rails::Clear(size_t i) {
  const int ordinal = groups_.local()[i].ordinal;
  if (!groups_.across()) job_.gpus->Zero(ordinal, ranks_[i].counters, CounterBytes());
  job_.gpus->Zero(ordinal, ExpectedOf(memory(i), groups_.ranks(), groups_.nodes()), CounterBytes());
}

void Rails::Settle(const uint64_t (&gone)[kGoneWords], double seconds) {
  const LocalRank& own = groups_.local().front();
  job_.link->settle(own.ordinal, *connection_, memory(0), own.rank, groups_.ranks(), groups_.ranks_per_node(), gone,
                    ++settled_times_, seconds);
}

void Rails::Free(size_t i) {
  job_.gpus->Free(groups_.local()[i].ordinal, ranks_[i].counters);
  job_.gpus->Free(groups_.local()[i].ordinal, ranks_[i].memory);
  ranks_[i] = Rank{};
}

}  // namespace xen_moe
