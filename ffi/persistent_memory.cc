#include "ffi/persistent_memory.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>

#include "ffi/seconds.h"

namespace xen_moe {

PersistentMemory::PersistentMemory(const Job& job, const Groups& groups)
    : job_(job), groups_(groups), mapping_(job, groups), rails_(job, groups) {
  for (const LocalRank& local : groups_.local()) {
    Member member;
    member.rank = local.rank;
    member.ordinal = local.ordinal;
    members_.push_back(member);
  }
}

void PersistentMemory::MakeWithin() {
  std::vector<Block> blocks(members_.size());
  try {
    records_ = job_.gpus->AllocatePinned(members_.size() * sizeof(ErrorRecord));
    for (size_t i = 0; i < members_.size(); ++i) {
      const int ordinal = members_[i].ordinal;
      const std::vector<int> readers = groups_.OrdinalsOf(i);
      for (int reader : readers) {
        if (reader != ordinal) job_.gpus->CheckPeerAccess(ordinal, reader);
      }
      blocks[i].mailbox = job_.gpus->Allocate(ordinal, sizeof(Mailbox), readers);
      job_.gpus->Zero(ordinal, blocks[i].mailbox, sizeof(Mailbox));
      blocks[i].control = job_.gpus->Allocate(ordinal, sizeof(Control), {ordinal});
    }
    if (groups_.several_nodes()) rails_.AllocateWithin();
    std::vector<char*> mailboxes;
    for (size_t i = 0; i < members_.size(); ++i) {
      mailboxes.push_back(blocks[i].mailbox);
      for (size_t j = 0; j < members_.size(); ++j) {
        if (groups_.SameGroup(i, j)) blocks[i].mailboxes[members_[j].rank] = blocks[j].mailbox;
      }
    }
    blocks_ = blocks;
    for (size_t i = 0; i < members_.size(); ++i) {
      FillControl(i);
      if (!groups_.several_nodes()) continue;
      members_[i].rail = rails_.memory(i);
      rails_.FillWithin(i, mailboxes);
    }
  } catch (...) {
    blocks_ = std::move(blocks);
    Free();
    throw;
  }
  settled_ = true;
}

void PersistentMemory::MakeAcross() {
  const int ordinal = members_.front().ordinal;
  blocks_.resize(1);
  Block& block = blocks_.front();
  try {
    block.mailbox = static_cast<char*>(job_.provider->allocate(sizeof(Mailbox)));
    if (block.mailbox == nullptr)
      throw MemoryError{true, std::string("no symmetric memory for a mailbox: ") + job_.provider->reason()};
    records_ = job_.gpus->AllocatePinned(sizeof(ErrorRecord));
    block.control = job_.gpus->Allocate(ordinal, sizeof(Control), {ordinal});
    if (groups_.several_nodes()) rails_.AllocateAcross();
    job_.gpus->Zero(ordinal, block.mailbox, sizeof(Mailbox));
  } catch (...) {
    Leave();
    throw;
  }
}

void PersistentMemory::Show(double seconds) {
  mapping_.Show(blocks_.front().mailbox, &blocks_.front().joined, seconds);
}

void PersistentMemory::Join(double seconds) {
  Block& block = blocks_.front();
  try {
    Show(seconds);
    for (int rank = 0; rank < groups_.ranks(); ++rank) {
      if (groups_.SameNode(0, rank)) block.mailboxes[rank] = mapping_.Peer(block.mailbox, rank);
    }
    FillControl(0);
    if (groups_.several_nodes()) {
      members_.front().rail = rails_.memory(0);
      members_.front().connection = rails_.connection();
      rails_.FillAcross(block.mailbox);
    }
  } catch (...) {
    Leave();
    throw;
  }
  settled_ = true;
}

void PersistentMemory::Remap() {
  Block& block = blocks_.front();
  for (int rank = 0; rank < groups_.ranks(); ++rank) block.mailboxes[rank] = mapping_.Peer(block.mailbox, rank);
  FillControl(0);
}

void PersistentMemory::Leave() {
  settled_ = false;
  for (const Block& block : blocks_) {
    job_.gpus->Free(members_.front().ordinal, block.control);
    rails_.Free(0);
    const bool own = !block.joined && job_.provider->discard != nullptr;
    if (own && block.mailbox != nullptr) job_.provider->discard(block.mailbox);
  }
  blocks_.clear();
  rails_.Disconnect();
  FreePinned();
}

void PersistentMemory::Free() {
  for (size_t i = 0; i < blocks_.size(); ++i) {
    job_.gpus->Free(members_[i].ordinal, blocks_[i].mailbox);
    job_.gpus->Free(members_[i].ordinal, blocks_[i].control);
    rails_.Free(i);
  }
  blocks_.clear();
  FreePinned();
}

void PersistentMemory::FreePinned() {
  if (records_.host != nullptr) job_.gpus->FreePinned(records_);
  records_ = Pinned{};
}

void PersistentMemory::FillControl(size_t i) {
  Member& member = members_[i];
  const size_t at = i * sizeof(ErrorRecord);
  member.control = reinterpret_cast<Control*>(blocks_[i].control);
  member.mailbox = reinterpret_cast<Mailbox*>(blocks_[i].mailbox);
  member.record = reinterpret_cast<ErrorRecord*>(records_.host + at);
  std::memset(static_cast<void*>(member.record), 0, sizeof(ErrorRecord));
  auto control = std::make_unique<Control>();
  std::memset(static_cast<void*>(control.get()), 0, sizeof(Control));
  for (int rank = 0; rank < groups_.ranks(); ++rank) {
    if (groups_.SameNode(i, rank)) control->mailbox[rank] = reinterpret_cast<Mailbox*>(blocks_[i].mailboxes[rank]);
  }
  control->error = reinterpret_cast<ErrorRecord*>(records_.device + at);
  job_.gpus->Write(member.ordinal, member.control, control.get(), sizeof(Control));
}

void PersistentMemory::Clear(size_t i, uint32_t epoch) {
  const Member& member = members_[i];
  job_.gpus->Zero(member.ordinal, member.mailbox, sizeof(Mailbox));
  char* const state = reinterpret_cast<char*>(member.control) + offsetof(Control, owner);
  job_.gpus->Zero(member.ordinal, state, sizeof(Control) - offsetof(Control, owner));
  job_.gpus->Write(member.ordinal, &member.control->epoch, &epoch, sizeof(epoch));
  if (member.rail != nullptr) rails_.Clear(i);
}

void PersistentMemory::ClearRecord(size_t i) {
  ErrorRecord& record = *members_[i].record;
  record.failure = 0;
  record.waited_ns = 0;
  record.of_rank = record.of_other = Descriptor{};
}

uint32_t PersistentMemory::NewestEpoch() const {
  uint32_t newest = 0;
  for (const Member& member : members_) {
    uint32_t epoch = 0;
    job_.gpus->Read(member.ordinal, &epoch, &member.control->epoch, sizeof(epoch));
    newest = std::max(newest, epoch);
  }
  return newest;
}

bool PersistentMemory::WaitIdle(double seconds) const {
  const auto began = std::chrono::steady_clock::now();
  for (const Member& member : members_) {
    if (!job_.gpus->Idle(member.ordinal, std::max(0.01, seconds - SecondsSince(began)))) return false;
  }
  return true;
}

}  // namespace xen_moe
