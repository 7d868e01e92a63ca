// What a workspace keeps for the rails of a group of several nodes (cuda_kernels/rail_memory.h): made with the homes,
// told of every generation, cleared when everything begins again. This file fills the table of the link by pointer.
#include "ffi/symmetric_memory.h"

namespace xen_moe {

void Workspace::MakeRails(std::vector<Home>* homes) {
  for (size_t i = 0; i < members_.size(); ++i) {
    const int ordinal = members_[i].ordinal;
    std::vector<int> readers;  // ranks of other nodes raise the counters
    for (DeviceKey key : groups_[group_of_[i]].devices) readers.push_back(OrdinalOf(key));
    (*homes)[i].counters = job_.gpus->Allocate(ordinal, kCounterBytes, readers);
    (*homes)[i].rail = job_.gpus->Allocate(ordinal, sizeof(RailMemory), {ordinal});
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

// The whole ring, as WriteTables, and before it tells anybody of the newest generation.
void Workspace::WriteRail(size_t i) {
  char* ring[kGenerations][kMaxRanks] = {};
  for (const Generation& generation : generations_) {
    for (int rank = 0; rank < ranks_; ++rank) {
      ring[generation.number % kGenerations][rank] = generation.blocks[i].peers[rank];
    }
  }
  job_.gpus->Write(members_[i].ordinal, members_[i].rail->peers.staging, ring, sizeof(ring));
}

// Nothing of any rank is under way.
void Workspace::ClearRail(size_t i) {
  job_.gpus->Zero(members_[i].ordinal, homes_[i].counters, kCounterBytes);
  job_.gpus->Zero(members_[i].ordinal, members_[i].rail->expected, sizeof(RailMemory::expected));
}

void Workspace::FreeHome(size_t i, const Home& home) {
  for (char* memory : {home.mailbox, home.control, home.counters, home.rail}) {
    job_.gpus->Free(members_[i].ordinal, memory);
  }
}

}  // namespace xen_moe
