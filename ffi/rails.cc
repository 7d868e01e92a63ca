// What a workspace keeps for the rails of a group of several nodes (cuda_kernels/node/rail_memory.h): made with the
// homes, told of every generation, cleared when everything begins again. This file fills the tables of the links.
#include <cstddef>
#include <memory>

#include "ffi/symmetric_memory.h"

namespace xen_moe {

void Workspace::MakeRails(std::vector<Home>* homes) {
  for (size_t i = 0; i < members_.size(); ++i) {
    const int ordinal = members_[i].ordinal;
    std::vector<int> readers;  // ranks of other nodes raise the counters
    for (DeviceKey key : groups_[group_of_[i]].devices) readers.push_back(OrdinalOf(key));
    (*homes)[i].counters = job_.gpus->Allocate(ordinal, CounterBytes(), readers);
    (*homes)[i].rail = job_.gpus->Allocate(ordinal, RailBytes(ranks_, Nodes()), {ordinal});
  }
}

// Whatever pointers of other nodes a kernel gets, it gets here.
void Workspace::AddRail(size_t i) {
  members_[i].rail = reinterpret_cast<RailMemory*>(homes_[i].rail);
  ClearRail(i);
  PeerTable table{};
  for (size_t j = 0; j < members_.size(); ++j) {
    if (group_of_[i] != group_of_[j]) continue;
    table.counters[members_[j].rank] = reinterpret_cast<uint64_t*>(homes_[j].counters);
    table.mailbox[members_[j].rank] = reinterpret_cast<Mailbox*>(homes_[j].mailbox);
  }
  job_.gpus->Write(members_[i].ordinal, &members_[i].rail->peers, &table, sizeof(table));
}

// Between processes: collective, once the mailbox has been shown.
void Workspace::Connect(double seconds) {
  auto made = std::make_shared<std::string>(job_.link->made_bytes, '\0');
  if (!job_.provider->connect(job_.link->request(ranks_, Nodes()), made.get(), seconds)) {
    Refuse(job_.provider->reason());
  }
  homes_.front().connection = std::move(made);
  settled_times_ = 0;
}

// As AddRail, for the one member of a process.
void Workspace::AddWindows() {
  Member& member = members_.front();
  const Home& home = homes_.front();
  job_.link->prepare(member.ordinal, ranks_);
  member.rail = reinterpret_cast<RailMemory*>(home.rail);
  member.connection = home.connection;
  job_.gpus->Zero(member.ordinal, member.rail, RailBytes(ranks_, Nodes()));
  auto windows = std::make_unique<WindowTable>();
  windows->mailbox = job_.provider->window(home.mailbox);
  windows->ranks = ranks_;
  for (int rank = 0; rank < ranks_; ++rank) windows->process[rank] = ProcessOf(groups_.front().devices[rank]);
  job_.gpus->Write(member.ordinal, &member.rail->windows, windows.get(), offsetof(WindowTable, reserved));
}

// What was put before a failure may still be under way: nothing may be cleared before it has come. Processes that have
// ended settle nothing; there are such only where ranks may be out.
void Workspace::Settle(double seconds) {
  const Member& member = members_.front();
  uint64_t gone[kGoneWords] = {};
  {
    std::lock_guard<std::mutex> lock(dead_mutex_);
    for (int rank = 0; masked_ && rank < ranks_; ++rank) {
      if (dead_.count(ProcessOf(groups_.front().devices[rank]))) gone[rank / 64] |= uint64_t{1} << rank % 64;
    }
  }
  job_.link->settle(member.ordinal, *member.connection, member.rail, member.rank, ranks_, ranks_per_node_, gone,
                    ++settled_times_, seconds);
}

// The whole ring, as WriteTables, and before it tells anybody of the newest generation.
void Workspace::WriteRail(size_t i) {
  if (across_) {
    void* windows[kGenerations] = {};
    for (const Generation& generation : generations_) {
      char* const own = generation.blocks[i].staging;
      if (own != nullptr) windows[generation.number % kGenerations] = job_.provider->window(own);
    }
    job_.gpus->Write(members_[i].ordinal, members_[i].rail->windows.staging, windows, sizeof(windows));
    return;
  }
  char* ring[kGenerations][kMaxRanks] = {};
  for (const Generation& generation : generations_) {
    for (int rank = 0; rank < ranks_; ++rank) {
      ring[generation.number % kGenerations][rank] = generation.blocks[i].peers[rank];
    }
  }
  job_.gpus->Write(members_[i].ordinal, members_[i].rail->peers.staging, ring, sizeof(ring));
}

// Nothing of any rank is under way. Between processes the counters are the link's, and Settle has set them back.
void Workspace::ClearRail(size_t i) {
  if (!across_) job_.gpus->Zero(members_[i].ordinal, homes_[i].counters, CounterBytes());
  job_.gpus->Zero(members_[i].ordinal, ExpectedOf(members_[i].rail, ranks_, Nodes()), CounterBytes());
}

void Workspace::FreeHome(size_t i, const Home& home) {
  for (char* memory : {home.mailbox, home.control, home.counters, home.rail}) {
    job_.gpus->Free(members_[i].ordinal, memory);
  }
}

}  // namespace xen_moe
