// The part of Workspace that handles ends: an xm.Buffer closes, an operation fails, a process dies, a group is reset.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <sstream>
#include <utility>

#include "ffi/failure_text.h"
#include "ffi/symmetric_memory.h"

namespace xen_moe {
namespace {

uint64_t LoadVolatile(const uint64_t* p) { return *reinterpret_cast<const volatile uint64_t*>(p); }

}  // namespace

void Workspace::Release(double seconds) {
  const auto lock = BeginChange(seconds);
  if (reserved_ == 0 && generations_.empty()) return;
  reserved_ = 0;
  known_ = {std::max(known_.flag_bytes, needs_.flag_bytes), std::max(known_.data_bytes, needs_.data_bytes),
            std::max(known_.scratch_bytes, needs_.scratch_bytes)};
  needs_ = Needs{};
  for (auto& served : capacity_) served = 0;
  const bool idle = WaitIdle(seconds);
  std::deque<Generation> old;
  {
    std::unique_lock<std::shared_mutex> launching(launching_);
    old.swap(generations_);
    staging_bytes_ = scratch_bytes_ = 0;
    held_ = 0;
    stale_ = false;
    if (!persistent_.empty()) WriteTables(true);
  }
  if (across_) {
    Vote vote;
    vote.retired = RetiredTickets();
    // The memory of a busy GPU is retired now, for a later agreement. Its scratch memory is freed once the GPU is idle.
    if (!idle) {
      std::vector<std::pair<int, char*>> scratch;
      for (Generation& generation : old) {
        scratch.emplace_back(members_.front().ordinal, std::exchange(generation.blocks.front().scratch, nullptr));
      }
      FreeWhenIdle(job_.gpus, {members_.front().ordinal}, std::move(scratch));
    }
    for (Generation& generation : old) Drop(&generation);
    if (idle) vote.retired = RetiredTickets();
    Votes agreed = Agree("close", vote, seconds);
    agreed.turn.Begin(seconds);
    ReleaseRetired(agreed.votes);
    return;
  }
  if (idle) {
    for (Generation& generation : old) Drop(&generation);
    return;
  }
  std::vector<std::pair<int, char*>> memory;
  std::vector<int> ordinals;
  for (size_t i = 0; i < members_.size(); ++i) {
    ordinals.push_back(members_[i].ordinal);
    for (const Generation& generation : old) {
      memory.emplace_back(members_[i].ordinal, generation.blocks[i].staging);
      memory.emplace_back(members_[i].ordinal, generation.blocks[i].scratch);
    }
  }
  FreeWhenIdle(job_.gpus, std::move(ordinals), std::move(memory));
}

void Workspace::WriteFailure(size_t i, uint64_t failure) {
  uint64_t before = 0;
  job_.gpus->Read(members_[i].ordinal, &before, &members_[i].mailbox->failure, sizeof(before));
  if (before != 0) return;  // the first failure stays
  job_.gpus->Write(members_[i].ordinal, &members_[i].mailbox->failure, &failure, sizeof(failure));
}

uint32_t Workspace::NewestEpoch() {
  uint32_t newest = 0;
  for (const Member& member : members_) {
    uint32_t epoch = 0;
    job_.gpus->Read(member.ordinal, &epoch, &member.control->epoch, sizeof(epoch));
    newest = std::max(newest, epoch);
  }
  return newest;
}

void Workspace::Interrupt(double seconds) {
  const auto lock = BeginChange(seconds);
  if (persistent_.empty()) return;
  for (size_t i = 0; i < members_.size(); ++i) {
    WriteFailure(
        i, PackFailure({Cause::kReset, Operation::kDispatch, Step::kArrival, members_[i].rank, members_[i].rank, 0}));
  }
}

void Workspace::Reset(double seconds) {
  Interrupt(seconds);
  const auto lock = BeginChange(seconds);
  if (persistent_.empty()) return;
  if (!WaitIdle(seconds)) {
    Refuse("reset: a GPU of this process was still busy after " + std::to_string(static_cast<int>(seconds)) +
           " s, not with an operation of this library: those have been told to end. Wait until no program runs, and "
           "call xen_moe_jax.cuda.reset() again");
  }
  uint32_t epoch = NewestEpoch();
  if (across_) {
    Vote vote;
    vote.epoch = epoch;
    Votes agreed = Agree("reset", vote, seconds, masked_);
    agreed.turn.End();
    agreed.Check("reset");  // without one vote the processes could go on from different epochs
    for (const Vote& theirs : agreed.votes) epoch = std::max(epoch, theirs.epoch);
    Registry::Get().LeaveOut(agreed.gone);
    std::lock_guard<std::mutex> dead_lock(dead_mutex_);
    dead_.insert(agreed.gone.begin(), agreed.gone.end());
  }
  if (across_ && SeveralNodes()) Settle(seconds);
  // The new epoch is ahead of every epoch that a flag can hold. All flags are cleared too, so near the end of the range
  // the epochs may begin again.
  Restart(epoch > 0xFFFF0000u ? 2 : epoch + 2);
  if (across_) Agree("restarted", Vote{}, seconds, masked_);
}

void Workspace::SetEpochForTest(uint32_t epoch) {
  const auto lock = BeginChange(10.0);
  if (!persistent_.empty() && WaitIdle(10.0)) Restart(epoch);
}

void Workspace::Restart(uint32_t epoch) {
  std::unique_lock<std::shared_mutex> launching(launching_);
  FreeOlderThan(newest_.load());
  for (size_t i = 0; i < members_.size(); ++i) {
    const int ordinal = members_[i].ordinal;
    for (const Generation& generation : generations_) {
      char* staging = generation.blocks[i].staging;
      if (staging == nullptr || generation.flag_bytes == 0) continue;
      job_.gpus->Zero(ordinal, staging, generation.flag_bytes);
      job_.gpus->Zero(ordinal, staging + Half(generation.flag_bytes, generation.data_bytes), generation.flag_bytes);
    }
    job_.gpus->Zero(ordinal, members_[i].mailbox, sizeof(Mailbox));
    char* const state = reinterpret_cast<char*>(members_[i].control) + offsetof(Control, owner);
    job_.gpus->Zero(ordinal, state, sizeof(Control) - offsetof(Control, owner));
    job_.gpus->Write(ordinal, &members_[i].control->epoch, &epoch, sizeof(epoch));
    if (members_[i].rail != nullptr) ClearRail(i);
  }
  WriteDead();
  WriteTables(true);
  for (Member& member : members_) {
    member.record->failure = 0;
    member.record->waited_ns = 0;
    member.record->of_rank = member.record->of_other = Descriptor{};
  }
  std::lock_guard<std::mutex> lock(runs_mutex_);
  runs_.fill(kNoRun);
}

// Tells the kernels of this process which ranks have died.
void Workspace::WriteDead() {
  std::lock_guard<std::mutex> lock(dead_mutex_);
  for (size_t i = 0; i < members_.size(); ++i) {
    const Group& group = groups_[group_of_[i]];
    uint32_t dead[kRankWords] = {};
    for (int rank = 0; rank < ranks_; ++rank) {
      if (dead_.count(ProcessOf(group.devices[rank]))) dead[rank / 32] |= 1u << rank % 32;
    }
    job_.gpus->Write(members_[i].ordinal, members_[i].mailbox->dead, dead, sizeof(dead));
  }
}

void Workspace::MarkDead(int process, bool clean) {
  {
    std::lock_guard<std::mutex> lock(dead_mutex_);
    dead_.insert(process);
  }
  if (!settled_) return;
  if (masked_) return WriteDead();  // an operation that waits for that rank fails
  for (size_t i = 0; i < members_.size(); ++i) {
    const Group& group = groups_[group_of_[i]];
    for (int rank = 0; rank < ranks_; ++rank) {
      if (ProcessOf(group.devices[rank]) != process) continue;
      const uint64_t word =
          PackFailure({Cause::kDead, Operation::kDispatch, Step::kArrival, rank, members_[i].rank, 0});
      if (!clean && LoadVolatile(&members_[i].record->failure) == 0) members_[i].record->failure = word;
      WriteFailure(i, word);
      break;
    }
  }
  WriteDead();
}

bool Workspace::Failed() const {
  if (flights_ && flights_->Failed()) return true;
  if (!settled_.load(std::memory_order_acquire)) return false;
  for (const Member& member : members_) {
    if (LoadVolatile(&member.record->failure) != 0) return true;
  }
  return false;
}

std::string Workspace::Failure() const {
  if (!Failed()) return "";
  if (flights_ && flights_->Failed()) return flights_->Failure();
  for (size_t i = 0; i < members_.size(); ++i) {
    const Member& member = members_[i];
    if (LoadVolatile(&member.record->failure) == 0) continue;
    std::atomic_thread_fence(std::memory_order_acquire);
    const Group& group = groups_[group_of_[i]];
    return FailureText(*member.record, channel_, across_, masked_, [&](int rank) { return WhereIs(group, rank); });
  }
  return "";
}

std::string Workspace::Admit(int64_t run) {
  if (flights_of_) return flights_of_->Admit(run);  // both workspaces fail together
  std::lock_guard<std::mutex> lock(runs_mutex_);
  int64_t& slot = runs_[static_cast<uint64_t>(run) % runs_.size()];
  if (slot == run) return "";
  if (!Failed()) {
    slot = run;
    return "";
  }
  return Failure();
}

std::string Workspace::WhereIs(const Group& group, int rank) const {
  if (rank < 0 || rank >= ranks_) return "unknown";
  const DeviceKey key = group.devices[rank];
  const std::string gpu = "GPU " + std::to_string(OrdinalOf(key));
  return job_.num_processes == 1 ? gpu : gpu + " of process " + std::to_string(ProcessOf(key));
}

// Enters an agreement of all processes of the job. Every process must call this with the same `what`, in the same order
// within this workspace, while it holds `changing_`. Throws MemoryError, with the processes that did not come, after
// `seconds`. `without_dead`: processes that have died are not waited for.
Votes Workspace::Agree(const char* what, const Vote& vote, double seconds, bool without_dead) {
  const Agreed agreed = job_.agree(NextKey(what), vote.Encode(), seconds, without_dead);
  Votes votes{agreed.ticket, Turn(agreed.ticket), {}, agreed.gone};
  for (const std::string& text : agreed.said) votes.votes.push_back(Vote::Decode(text));
  return votes;
}

// Returns a key that is the same in every process and is used once. Of a device only its process counts, which has one
// GPU: no process knows the ordinals of another one, which may see its own GPU alone.
std::string Workspace::NextKey(const char* what) {
  uint64_t hash = 1469598103934665603ull;
  for (DeviceKey key : devices_) hash = (hash ^ static_cast<uint64_t>(ProcessOf(key))) * 1099511628211ull;
  std::ostringstream out;
  out << std::hex << hash << std::dec << "-" << ranks_ << "-";
  if (SeveralNodes()) out << "in-nodes-of-" << ranks_per_node_ << "-";
  out << "channel-" << channel_ << (flights_of_ ? "-flights" : "") << "/" << what << "/" << ++agreements_;
  return out.str();
}

}  // namespace xen_moe
