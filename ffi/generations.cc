// The part of StagingMemory that handles generations: the tables in which kernels find them, how a generation comes
// into use and how it is freed.
#include <algorithm>
#include <chrono>
#include <thread>

#include "ffi/seconds.h"
#include "ffi/staging_memory.h"

namespace xen_moe {

uint32_t StagingMemory::OldestInUse() const {
  const uint32_t newest = newest_.load();
  uint32_t oldest = newest;
  for (const Member& member : persistent_.members()) {
    const uint32_t last = *reinterpret_cast<const volatile uint32_t*>(&member.record->generation);
    oldest = std::min(oldest, newest - ((newest - last) & 0xFF));
  }
  return oldest;
}

// Returns whether the ring of memory tables takes another generation.
bool StagingMemory::HasRoom() const { return newest_.load() + 1 - OldestInUse() < kGenerations; }

// Returns true when the ring of memory tables takes another generation. Returns false when no operation has run since
// the ring filled up, and none that uses staging memory runs: then all generations may be replaced at once.
bool StagingMemory::WaitForRoom(double seconds) {
  const auto began = std::chrono::steady_clock::now();
  while (!HasRoom()) {
    if (WaitUnused(std::min(1.0, seconds))) return HasRoom();
    if (SecondsSince(began) > seconds) {
      Refuse("the symmetric memory on channel " + std::to_string(channel_) + " has grown " +
             std::to_string(kGenerations - 1) +
             " times without an operation that used it, and the GPUs have been busy for " +
             std::to_string(static_cast<int>(seconds)) + " s: wait for the running programs before compiling more");
    }
  }
  return true;
}

MemoryTable StagingMemory::TableOf(const Generation* generation, size_t i) const {
  MemoryTable table{};
  if (generation == nullptr) return table;
  const Block& block = generation->blocks[i];
  for (int rank = 0; rank < groups_.ranks(); ++rank) {
    table.staging[rank] = groups_.SameNode(i, rank) ? block.peers[rank] : nullptr;
  }
  table.scratch = block.scratch;
  table.flag_bytes = generation->flag_bytes;
  table.data_bytes = generation->data_bytes;
  table.scratch_bytes = generation->scratch_bytes;
  table.generation = generation->number;
  return table;
}

StagingRing StagingMemory::RingOf(size_t i) const {
  StagingRing ring;
  for (const Generation& generation : generations_) {
    const Block& block = generation.blocks[i];
    ring.own[generation.number % kGenerations] = block.staging;
    std::copy_n(block.peers.begin(), groups_.ranks(), ring.of_rank[generation.number % kGenerations]);
  }
  return ring;
}

// Writes the whole ring each time, which makes good an earlier write that failed.
void StagingMemory::WriteTables(bool alone) {
  const uint32_t newest = newest_.load();
  for (size_t i = 0; i < persistent_.members().size(); ++i) {
    MemoryTable ring[kGenerations] = {};
    for (MemoryTable& table : ring) table.generation = newest;
    for (const Generation& generation : generations_) ring[generation.number % kGenerations] = TableOf(&generation, i);
    const Member& member = persistent_.members()[i];
    Control* control = member.control;
    const int ordinal = member.ordinal;
    job_.gpus->Write(ordinal, control->memory, ring, sizeof(ring));
    if (member.rail != nullptr) persistent_.rails().WriteStaging(i, RingOf(i));
    if (alone) {
      MemoryTable current = TableOf(generations_.empty() ? nullptr : &generations_.back(), i);
      current.generation = newest;
      job_.gpus->Write(ordinal, &control->current, &current, sizeof(current));
      const uint32_t reported = newest & 0xFF;
      job_.gpus->Write(ordinal, &control->reported, &reported, sizeof(reported));
      member.record->generation = reported;
    }
    job_.gpus->Write(ordinal, &control->newest, &newest, sizeof(newest));
  }
}

void StagingMemory::Publish(Generation next, bool alone, double seconds) {
  std::unique_lock<std::shared_mutex> launching(launching_, std::defer_lock);
  const auto began = std::chrono::steady_clock::now();
  while (alone && !generations_.empty()) {  // the GPUs must be idle while no thread can launch, not only before
    launching.lock();
    if (WaitUnused(0.2)) break;
    launching.unlock();  // the running kernels may wait for a launch of another rank
    if (SecondsSince(began) > seconds) {
      Drop(&next);
      Refuse("the GPUs were not idle while the symmetric memory was to be replaced: try again");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  next.number = newest_.load() + 1;
  newest_ = next.number;
  generations_.push_back(std::move(next));
  WriteTables(alone);
  if (alone) FreeOlderThan(newest_.load());
  const Generation& now = generations_.back();
  staging_bytes_ = 2 * now.half();
  scratch_bytes_ = now.scratch_bytes;
  capacity_[1] = now.data_bytes;
  capacity_[2] = now.scratch_bytes;
  capacity_[0].store(now.flag_bytes, std::memory_order_release);
  held_ = static_cast<int>(generations_.size());
  stale_ = generations_.size() > 1;
}

void StagingMemory::FreeOlderThan(uint32_t number) {
  while (!generations_.empty() && generations_.front().number < number) {
    Drop(&generations_.front());
    generations_.pop_front();
  }
  held_ = static_cast<int>(generations_.size());
  stale_ = generations_.size() > 1;
}

void StagingMemory::Reclaim() {
  if (stale_) FreeOlderThan(OldestInUse());
}

void StagingMemory::ReclaimIfStale() {
  if (!stale()) return;
  const auto lock = changes_.TryBegin();
  if (lock.owns_lock()) Reclaim();
}

void StagingMemory::Remap(uint32_t number) {
  FreeOlderThan(newest_.load());
  for (Generation& generation : generations_) {
    generation.number = number;
    Block& block = generation.blocks.front();
    for (int rank = 0; block.staging != nullptr && rank < groups_.ranks(); ++rank) {
      block.peers[rank] = mapping_.Peer(block.staging, rank);
    }
  }
  newest_ = number;
}

void* StagingMemory::Newest(Needs* needs) const {
  if (generations_.empty()) return nullptr;
  const Generation& newest = generations_.back();
  *needs = {newest.flag_bytes, newest.data_bytes, newest.scratch_bytes};
  return newest.blocks.front().staging;
}

void StagingMemory::ClearFlags() {
  FreeOlderThan(newest_.load());
  for (size_t i = 0; i < groups_.local().size(); ++i) {
    const int ordinal = groups_.local()[i].ordinal;
    for (const Generation& generation : generations_) {
      char* staging = generation.blocks[i].staging;
      if (staging == nullptr || generation.flag_bytes == 0) continue;
      job_.gpus->Zero(ordinal, staging, generation.flag_bytes);
      job_.gpus->Zero(ordinal, staging + generation.half(), generation.flag_bytes);
    }
  }
}

}  // namespace xen_moe
