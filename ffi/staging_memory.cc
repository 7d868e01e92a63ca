// Growth and release of staging memory. Publication and reclamation: generations.cc.
#include "ffi/staging_memory.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <thread>

#include "ffi/seconds.h"

namespace xen_moe {
namespace {

constexpr uint64_t kAlign = 256;
uint64_t AlignUp(uint64_t x) { return (x + kAlign - 1) / kAlign * kAlign; }
std::string Mib(uint64_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

Needs Largest(const Needs& a, const Needs& b) {
  return {std::max(a.flag_bytes, b.flag_bytes), std::max(a.data_bytes, b.data_bytes),
          std::max(a.scratch_bytes, b.scratch_bytes)};
}

uint64_t Half(const Needs& needs) { return needs.flag_bytes + needs.data_bytes; }

Vote ErrorVote(const MemoryError& e) {
  const std::string prefix = "xen_moe_jax: ";
  Vote vote;
  vote.error = e.message.compare(0, prefix.size(), prefix) == 0 ? e.message.substr(prefix.size()) : e.message;
  return vote;
}

}  // namespace

StagingMemory::StagingMemory(const Job& job, const Groups& groups, Changes& changes, PersistentMemory& persistent,
                             int channel)
    : job_(job),
      groups_(groups),
      changes_(changes),
      persistent_(persistent),
      mapping_(job, groups),
      channel_(channel) {}

void StagingMemory::EnsureCapacity(const Needs& needs, double seconds) {
  if (HasCapacity(needs)) return;
  const auto lock = changes_.Begin(seconds);
  if (HasCapacity(needs)) return;
  const Needs all =
      Largest(needs_, {AlignUp(needs.flag_bytes), AlignUp(needs.data_bytes), AlignUp(needs.scratch_bytes)});
  if (reserved_ != 0 && Half(all) > reserved_) {
    throw MemoryError{
        true, "xen_moe_jax: the xm.Buffer on channel " + std::to_string(channel_) + " has " +
                  std::to_string(2 * reserved_) + " bytes and this operation needs " + std::to_string(2 * Half(all)) +
                  ": open it with larger num_tokens, hidden or size_bytes (xm.buffer_size_hint), or use another "
                  "KernelConfig.channel"};
  }
  Grow(all, Plan(all), seconds);
}

void StagingMemory::Reserve(uint64_t staging_bytes, double seconds) {
  const auto lock = changes_.Begin(seconds);
  if (reserved_ != 0)
    Refuse("an xm.Buffer is already open on channel " + std::to_string(channel_) + " of this mesh axis");
  const uint64_t asked = AlignUp(std::max<uint64_t>(staging_bytes, 2) / 2 + staging_bytes % 2);
  const uint64_t has = generations_.empty() ? 0 : staging_bytes_.load() / 2;
  reserved_ = std::max({asked, has, Half(needs_)});
  if (has >= reserved_) return;
  try {
    const Needs known = Largest(needs_, known_);
    if (known.flag_bytes != 0 && Half(known) <= reserved_) {
      Grow(needs_, Plan(known), seconds);  // a captured program finds it without a call of the host
    } else {                               // the first operation divides it into flags and data
      Generation next;
      next.data_bytes = reserved_;
      Grow(needs_, std::move(next), seconds);
    }
  } catch (...) {
    reserved_ = 0;
    throw;
  }
}

void StagingMemory::Release(double seconds) {
  const auto lock = changes_.Begin(seconds);
  if (reserved_ == 0 && generations_.empty()) return;
  reserved_ = 0;
  known_ = Largest(known_, needs_);
  needs_ = Needs{};
  for (auto& bytes : capacity_) bytes = 0;
  const bool idle = persistent_.WaitIdle(seconds);
  std::deque<Generation> old;
  {
    std::unique_lock<std::shared_mutex> launching(launching_);
    old.swap(generations_);
    staging_bytes_ = scratch_bytes_ = 0;
    held_ = 0;
    stale_ = false;
    if (persistent_.made()) WriteTables(true);
  }
  if (groups_.across()) {
    ReleaseAcross(std::move(old), idle, seconds);
  } else {
    ReleaseWithin(std::move(old), idle);
  }
}

void StagingMemory::ReleaseAcross(std::deque<Generation> old, bool idle, double seconds) {
  Vote vote;
  vote.retired = RetiredTickets();
  // The memory of a busy GPU is retired now, for a later agreement. Its scratch memory is freed once the GPU is idle.
  if (!idle) {
    const int ordinal = groups_.local().front().ordinal;
    std::vector<std::pair<int, char*>> scratch;
    for (Generation& generation : old) {
      scratch.emplace_back(ordinal, std::exchange(generation.blocks.front().scratch, nullptr));
    }
    FreeWhenIdle(job_.gpus, {ordinal}, std::move(scratch));
  }
  for (Generation& generation : old) Drop(&generation);
  if (idle) vote.retired = RetiredTickets();
  Votes agreed = changes_.Agree("close", vote, seconds);
  agreed.turn.Begin(seconds);
  ReleaseRetired(agreed.votes);
}

void StagingMemory::ReleaseWithin(std::deque<Generation> old, bool idle) {
  if (idle) {
    for (Generation& generation : old) Drop(&generation);
    return;
  }
  std::vector<std::pair<int, char*>> memory;
  std::vector<int> ordinals;
  for (size_t i = 0; i < groups_.local().size(); ++i) {
    const int ordinal = groups_.local()[i].ordinal;
    ordinals.push_back(ordinal);
    for (const Generation& generation : old) {
      memory.emplace_back(ordinal, generation.blocks[i].staging);
      memory.emplace_back(ordinal, generation.blocks[i].scratch);
    }
  }
  FreeWhenIdle(job_.gpus, std::move(ordinals), std::move(memory));
}

// Returns the sizes of a generation for `needs`.
StagingMemory::Generation StagingMemory::Plan(const Needs& needs) const {
  Generation next;
  next.flag_bytes = needs.flag_bytes;
  next.data_bytes = needs.data_bytes;
  next.scratch_bytes = needs.scratch_bytes;
  if (reserved_ != 0) {  // the rest of an open xm.Buffer is shared out, so that other shapes fit too
    const uint64_t half = Half(needs);
    const double share = half == 0 ? 0.0 : static_cast<double>(needs.flag_bytes) / static_cast<double>(half);
    next.flag_bytes += static_cast<uint64_t>(share * static_cast<double>(reserved_ - half)) / kAlign * kAlign;
    next.data_bytes = reserved_ - next.flag_bytes;
  }
  return next;
}

void StagingMemory::Grow(const Needs& needs, Generation next, double seconds) {
  Reclaim();
  if (groups_.across()) {
    GrowAcross(&next, seconds);
  } else {
    GrowWithin(&next, seconds);
  }
  needs_ = Largest(needs_, needs);  // another process may have asked for more
}

// Returns whether the newest generation is not divided into flags and data, as that of an xm.Buffer before the first
// operation that has flags: then no operation can have used it.
bool StagingMemory::Undivided() const {
  return !generations_.empty() && generations_.back().flag_bytes == 0 && generations_.back().data_bytes != 0;
}

// Returns whether `next` fits into the undivided generation, whose blocks it then takes.
bool StagingMemory::Divides(const Generation& next) const {
  return next.flag_bytes != 0 && next.half() <= generations_.back().data_bytes;
}

void StagingMemory::TakeUndivided(Generation* next) {
  next->blocks = generations_.back().blocks;
  for (Block& block : next->blocks) block.scratch = nullptr;
}

// After a failure: gives the blocks back to the undivided generation.
void StagingMemory::ReturnUndivided(Generation* next, bool taken) {
  if (!taken) return;
  for (Block& block : next->blocks) block.staging = nullptr;
}

// After a success: drops the undivided generation, to which only its scratch memory still belongs.
void StagingMemory::DropUndivided() {
  Generation& whole = generations_.back();
  for (Block& block : whole.blocks) block.staging = nullptr;
  Drop(&whole);
  generations_.pop_back();
}

void StagingMemory::GrowWithin(Generation* next, double seconds) {
  const auto began = std::chrono::steady_clock::now();
  if (!persistent_.made()) persistent_.MakeWithin();
  // The ranks of an operation agree on a generation through announcements, which do not go between nodes: there all of
  // them change at once, while nothing runs.
  const bool alone = generations_.empty() || groups_.several_nodes() || !WaitForRoom(seconds);
  const bool divide = Undivided() && Divides(*next);
  if (divide) TakeUndivided(next);
  try {
    Allocate(next);
  } catch (...) {
    ReturnUndivided(next, divide);
    Drop(next);
    throw;
  }
  if (divide) DropUndivided();
  Publish(std::move(*next), alone, std::max(1.0, seconds - SecondsSince(began)));
}

// Between processes: vote, allocate in the order of the tickets, vote on how that went, publish. No process enters a
// collective that another one has not promised to enter.
void StagingMemory::GrowAcross(Generation* next, double seconds) {
  const std::string what = "memory of " + Mib(2 * next->half()) + " on channel " + std::to_string(channel_);
  const bool fresh = !persistent_.made();
  Vote mine;
  mine.needs = {next->flag_bytes, next->data_bytes, next->scratch_bytes};
  mine.undivided = Undivided();
  mine.has_room = generations_.empty() || HasRoom();
  mine.retired = RetiredTickets();
  Votes agreed = changes_.Agree("grow", mine, seconds);
  agreed.Check(what);
  bool all_room = true, all_undivided = true;
  for (const Vote& vote : agreed.votes) {
    next->flag_bytes = std::max(next->flag_bytes, vote.needs.flag_bytes);
    next->data_bytes = std::max(next->data_bytes, vote.needs.data_bytes);
    next->scratch_bytes = std::max(next->scratch_bytes, vote.needs.scratch_bytes);
    all_room &= vote.has_room;
    all_undivided &= vote.undivided;
  }
  const bool alone = generations_.empty() || groups_.several_nodes() || !all_room;  // as in GrowWithin
  const bool divide = all_undivided && Divides(*next);
  const bool in_steps = job_.provider->join != nullptr;
  next->ticket = agreed.ticket;
  Vote outcome;
  try {
    agreed.turn.Begin(seconds);
    ReleaseRetired(agreed.votes);
    if (fresh) persistent_.MakeAcross();
    if (fresh && !in_steps) persistent_.Join(seconds);
    if (divide) TakeUndivided(next);
    if (alone && !generations_.empty() && !persistent_.WaitIdle(seconds)) {
      Refuse("GPU " + std::to_string(groups_.local().front().ordinal) + " has been busy for " +
             std::to_string(static_cast<int>(seconds)) + " s without an operation on this channel");
    }
    Allocate(next);
  } catch (const MemoryError& e) {
    outcome = ErrorVote(e);
  }
  agreed.turn.End();
  try {
    if (in_steps) outcome = JoinInSteps(next, fresh, outcome, what, seconds);
    changes_.Agree("grown", outcome, seconds).Check(what);
  } catch (...) {
    ReturnUndivided(next, divide);
    Drop(next);
    if (fresh) persistent_.Leave();
    throw;
  }
  if (divide) {
    next->ticket = generations_.back().ticket;
    DropUndivided();
  }
  Publish(std::move(*next), alone, seconds);
  if (alone) changes_.Agree("ready", Vote{}, seconds);  // a peer's first operation finds the table of this rank
}

// Up to here every process has made its own memory, or failed to. Only when all have made it do they show it to each
// other.
Vote StagingMemory::JoinInSteps(Generation* next, bool fresh, const Vote& outcome, const std::string& what,
                                double seconds) {
  Votes made = changes_.Agree("made", outcome, seconds);
  made.Check(what);
  Vote joined;
  try {
    made.turn.Begin(seconds);
    // Everything collective comes before anything that may fail in one process alone: no process waits in vain.
    if (fresh) persistent_.Show(seconds);
    for (Block& block : next->blocks) {
      if (block.staging != nullptr) mapping_.Show(block.staging, &block.joined, seconds);
    }
    if (fresh && groups_.several_nodes()) persistent_.rails().Connect(seconds);
    if (fresh) persistent_.Join(seconds);
    Join(next, seconds);
  } catch (const MemoryError& e) {
    joined = ErrorVote(e);
  }
  return joined;
}

void StagingMemory::Join(Generation* next, double seconds) {
  for (Block& block : next->blocks) {
    if (block.staging == nullptr) continue;
    mapping_.Show(block.staging, &block.joined, seconds);
    for (int rank = 0; rank < groups_.ranks(); ++rank) {
      if (groups_.SameNode(0, rank)) block.peers[rank] = mapping_.Peer(block.staging, rank);
    }
  }
}

// Allocates the memory that `next` does not have yet, and zeroes its flags.
void StagingMemory::Allocate(Generation* next) {
  const uint64_t half = next->half();
  if (next->blocks.empty()) next->blocks.resize(groups_.local().size());
  for (size_t i = 0; i < next->blocks.size(); ++i) {
    Block& block = next->blocks[i];
    const int ordinal = groups_.local()[i].ordinal;
    if (next->scratch_bytes != 0) block.scratch = job_.gpus->Allocate(ordinal, next->scratch_bytes, {ordinal});
    if (block.staging == nullptr && half != 0) {
      if (groups_.across()) {
        block.staging = static_cast<char*>(job_.provider->allocate(2 * half));
        if (block.staging == nullptr)
          throw MemoryError{true, "a staging area of " + Mib(2 * half) + ": " + job_.provider->reason()};
      } else {
        block.staging = job_.gpus->Allocate(ordinal, 2 * half, groups_.OrdinalsOf(i));
      }
    }
    if (next->flag_bytes != 0) {
      job_.gpus->Zero(ordinal, block.staging, next->flag_bytes);
      job_.gpus->Zero(ordinal, block.staging + half, next->flag_bytes);
    }
  }
  if (groups_.across()) {
    if (job_.provider->join == nullptr) Join(next, 0.0);  // allocating has shown it to the other processes
    return;
  }
  for (size_t i = 0; i < next->blocks.size(); ++i) {
    for (size_t j = 0; j < next->blocks.size(); ++j) {
      if (groups_.SameGroup(i, j)) next->blocks[i].peers[groups_.local()[j].rank] = next->blocks[j].staging;
    }
  }
}

// Frees a generation that no kernel uses any more. Memory that other processes may have mapped is retired: all
// processes release it together.
void StagingMemory::Drop(Generation* generation) {
  bool shared = false;
  for (size_t i = 0; i < generation->blocks.size(); ++i) {
    Block& block = generation->blocks[i];
    const int ordinal = groups_.local()[i].ordinal;
    job_.gpus->Free(ordinal, block.scratch);
    block.scratch = nullptr;
    if (block.staging == nullptr) continue;
    if (groups_.across() && (block.joined || job_.provider->discard == nullptr)) {
      shared = true;
      continue;
    }
    if (groups_.across()) {
      job_.provider->discard(block.staging);
    } else {
      job_.gpus->Free(ordinal, block.staging);
    }
    block.staging = nullptr;
  }
  if (shared) retired_.push_back(*generation);
}

void StagingMemory::FreeAll() {
  for (Generation& generation : generations_) Drop(&generation);
}

std::vector<uint64_t> StagingMemory::RetiredTickets() const {
  std::vector<uint64_t> tickets;
  for (const Generation& generation : retired_) tickets.push_back(generation.ticket);
  return tickets;
}

// Releases the generations that every process has retired, in the order of their tickets.
void StagingMemory::ReleaseRetired(const std::vector<Vote>& votes) {
  std::map<uint64_t, size_t> offered;
  for (const Vote& vote : votes) {
    for (uint64_t ticket : vote.retired) ++offered[ticket];
  }
  for (const auto& [ticket, count] : offered) {
    if (count != votes.size()) continue;
    for (size_t i = 0; i < retired_.size(); ++i) {
      if (retired_[i].ticket != ticket) continue;
      job_.provider->release(retired_[i].blocks.front().staging);
      retired_.erase(retired_.begin() + static_cast<std::ptrdiff_t>(i));
      break;
    }
  }
}

void FreeWhenIdle(Devices* gpus, std::vector<int> ordinals, std::vector<std::pair<int, char*>> memory) {
  std::thread([gpus, ordinals = std::move(ordinals), memory = std::move(memory)] {
    try {
      for (int ordinal : ordinals) {
        while (!gpus->Idle(ordinal, 60.0)) std::this_thread::sleep_for(std::chrono::seconds(1));
      }
      for (const auto& [ordinal, block] : memory) gpus->Free(ordinal, block);
    } catch (const MemoryError&) {  // the process is ending, and the driver has ended before
    }
  }).detach();
}

}  // namespace xen_moe
