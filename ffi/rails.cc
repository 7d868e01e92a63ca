// The part of Workspace that serves the rails of a group of several nodes (cuda_kernels/node/rail_memory.h): counters
// that other nodes raise, and the tables of links through which a rank's kernels reach other nodes. They are made with
// the persistent memory, updated with every generation, and cleared by a reset.
#include <cstddef>
#include <memory>

#include "ffi/symmetric_memory.h"

namespace xen_moe {

void Workspace::MakeRails(std::vector<PersistentBlock>* blocks) {
  for (size_t i = 0; i < members_.size(); ++i) {
    const int ordinal = members_[i].ordinal;
    std::vector<int> readers;  // all GPUs of the group: ranks of other nodes raise the counters
    for (DeviceKey key : groups_[group_of_[i]].devices) readers.push_back(OrdinalOf(key));
    (*blocks)[i].counters = job_.gpus->Allocate(ordinal, CounterBytes(), readers);
    (*blocks)[i].rail = job_.gpus->Allocate(ordinal, RailBytes(ranks_, Nodes()), {ordinal});
  }
}

// Fills the only table in which kernels find pointers to memory of other nodes.
void Workspace::AddRail(size_t i) {
  members_[i].rail = reinterpret_cast<RailMemory*>(persistent_[i].rail);
  ClearRail(i);
  PeerTable table{};
  for (size_t j = 0; j < members_.size(); ++j) {
    if (group_of_[i] != group_of_[j]) continue;
    table.counters[members_[j].rank] = reinterpret_cast<uint64_t*>(persistent_[j].counters);
    table.mailbox[members_[j].rank] = reinterpret_cast<Mailbox*>(persistent_[j].mailbox);
  }
  job_.gpus->Write(members_[i].ordinal, &members_[i].rail->peers, &table, sizeof(table));
}

// Between processes, collective, once the mailbox has been shown: makes the connection that puts go over.
void Workspace::Connect(double seconds) {
  auto made = std::make_shared<std::string>(job_.link->made_bytes, '\0');
  if (!job_.provider->connect(job_.link->request(ranks_, Nodes()), made.get(), seconds)) {
    Refuse(job_.provider->reason());
  }
  persistent_.front().connection = std::move(made);
  settled_times_ = 0;
}

// Between processes: fills the table of the one member of this process, as AddRail does within a process.
void Workspace::AddWindows() {
  Member& member = members_.front();
  const PersistentBlock& block = persistent_.front();
  job_.link->prepare(member.ordinal, ranks_);
  member.rail = reinterpret_cast<RailMemory*>(block.rail);
  member.connection = block.connection;
  job_.gpus->Zero(member.ordinal, member.rail, RailBytes(ranks_, Nodes()));
  auto windows = std::make_unique<WindowTable>();
  windows->mailbox = job_.provider->window(block.mailbox);
  windows->ranks = ranks_;
  for (int rank = 0; rank < ranks_; ++rank) windows->process[rank] = ProcessOf(groups_.front().devices[rank]);
  job_.gpus->Write(member.ordinal, &member.rail->windows, windows.get(), offsetof(WindowTable, reserved));
}

// Waits for puts from before a failure, which may still be in progress: no memory may be cleared before they have
// arrived. Processes that have ended take no part; there are such processes only where programs have an `active` mask.
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

// Writes the whole ring, as WriteTables does, before kernels learn of the newest generation.
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

// Called when no put of any rank is in progress. Between processes the counters belong to the link, and Settle has set
// them to zero.
void Workspace::ClearRail(size_t i) {
  if (!across_) job_.gpus->Zero(members_[i].ordinal, persistent_[i].counters, CounterBytes());
  job_.gpus->Zero(members_[i].ordinal, ExpectedOf(members_[i].rail, ranks_, Nodes()), CounterBytes());
}

void Workspace::FreePersistent(size_t i, const PersistentBlock& block) {
  for (char* memory : {block.mailbox, block.control, block.counters, block.rail}) {
    job_.gpus->Free(members_[i].ordinal, memory);
  }
}

}  // namespace xen_moe
