#include "ffi/recovery.h"

#include <algorithm>
#include <atomic>

#include "ffi/failure_text.h"

namespace xen_moe {
namespace {

uint64_t LoadVolatile(const uint64_t* p) { return *reinterpret_cast<const volatile uint64_t*>(p); }

}  // namespace

Recovery::Recovery(const Job& job, const Groups& groups, Changes& changes, PersistentMemory& persistent,
                   StagingMemory& staging, int channel)
    : job_(job), groups_(groups), changes_(changes), persistent_(persistent), staging_(staging), channel_(channel) {
  runs_.fill(kNoRun);
}

// Writes a failure into the mailbox of local rank `i`, unless it holds one: the first failure stays.
void Recovery::WriteFailure(size_t i, uint64_t failure) {
  const Member& member = persistent_.members()[i];
  uint64_t before = 0;
  job_.gpus->Read(member.ordinal, &before, &member.mailbox->failure, sizeof(before));
  if (before != 0) return;
  job_.gpus->Write(member.ordinal, &member.mailbox->failure, &failure, sizeof(failure));
}

void Recovery::Interrupt(double seconds) {
  const auto lock = changes_.Begin(seconds);
  if (!persistent_.made()) return;
  for (size_t i = 0; i < groups_.local().size(); ++i) {
    const int rank = groups_.local()[i].rank;
    WriteFailure(i, PackFailure({Cause::kReset, Operation::kDispatch, Step::kArrival, rank, rank, 0}));
  }
}

void Recovery::Reset(double seconds) {
  Interrupt(seconds);
  const auto lock = changes_.Begin(seconds);
  if (!persistent_.made()) return;
  if (!persistent_.WaitIdle(seconds)) {
    Refuse("reset: a GPU of this process was still busy after " + std::to_string(static_cast<int>(seconds)) +
           " s, not with an operation of this library: those have been told to end. Wait until no program runs, and "
           "call xen_moe_jax.cuda.reset() again");
  }
  uint32_t epoch = persistent_.NewestEpoch();
  if (groups_.across()) {
    Vote vote;
    vote.epoch = epoch;
    Votes agreed = changes_.Agree("reset", vote, seconds, masked_);
    agreed.turn.End();
    agreed.Check("reset");  // without one vote the processes could go on from different numbers
    for (const Vote& theirs : agreed.votes) epoch = std::max(epoch, theirs.epoch);
    std::lock_guard<std::mutex> dead_lock(dead_mutex_);
    dead_.insert(agreed.gone.begin(), agreed.gone.end());
    left_out_.insert(agreed.gone.begin(), agreed.gone.end());
  }
  if (groups_.across() && groups_.several_nodes()) SettleRails(seconds);
  // The new epoch is ahead of every epoch that a flag can hold. All flags are cleared too, so near the end of the range
  // the epochs may begin again.
  Restart(epoch > 0xFFFF0000u ? 2 : epoch + 2);
  if (groups_.across()) changes_.Agree("restarted", Vote{}, seconds, masked_);
}

void Recovery::Quiet(double seconds) {
  Interrupt(seconds);
  if (persistent_.made() && !persistent_.WaitIdle(seconds)) {
    Refuse("a GPU of this process was still busy after " + std::to_string(static_cast<int>(seconds)) +
           " s, not with an operation of this library: those have been told to end. Call join, boundary, recover and "
           "close of a group while no program runs: wait with jax.block_until_ready before the call");
  }
}

void Recovery::Adopt(const std::set<int>& gone, uint32_t epoch, uint32_t generation, const std::function<void()>& map,
                     double seconds) {
  const auto lock = changes_.Begin(seconds);
  elastic_ = true;
  if (!persistent_.made()) return;
  {
    std::lock_guard<std::mutex> dead_lock(dead_mutex_);
    dead_ = gone;
    left_out_ = gone;
  }
  map();
  {
    std::unique_lock<std::shared_mutex> launching(staging_.launching());
    persistent_.Remap();
    staging_.Remap(generation);
  }
  Restart(epoch);
}

std::set<int> Recovery::LeftOut() {
  std::lock_guard<std::mutex> lock(dead_mutex_);
  return left_out_;
}

// Waits for puts from before a failure, which may still be in progress: no memory may be cleared before they have
// arrived. Processes that have ended take no part; there are such processes only where programs have an `active` mask.
void Recovery::SettleRails(double seconds) {
  uint64_t gone[kGoneWords] = {};
  {
    std::lock_guard<std::mutex> lock(dead_mutex_);
    for (int rank = 0; masked_ && rank < groups_.ranks(); ++rank) {
      if (dead_.count(ProcessOf(groups_.DevicesOf(0)[rank]))) gone[rank / 64] |= uint64_t{1} << rank % 64;
    }
  }
  persistent_.rails().Settle(gone, seconds);
}

void Recovery::SetEpochForTest(uint32_t epoch) {
  const auto lock = changes_.Begin(10.0);
  if (persistent_.made() && persistent_.WaitIdle(10.0)) Restart(epoch);
}

void Recovery::Restart(uint32_t epoch) {
  std::unique_lock<std::shared_mutex> launching(staging_.launching());
  staging_.ClearFlags();
  for (size_t i = 0; i < groups_.local().size(); ++i) persistent_.Clear(i, epoch);
  WriteDead();
  staging_.WriteTables(true);
  for (size_t i = 0; i < groups_.local().size(); ++i) persistent_.ClearRecord(i);
  std::lock_guard<std::mutex> lock(runs_mutex_);
  runs_.fill(kNoRun);
}

// Tells the kernels of this process which ranks have died.
void Recovery::WriteDead() {
  std::lock_guard<std::mutex> lock(dead_mutex_);
  for (size_t i = 0; i < groups_.local().size(); ++i) {
    uint32_t dead[kRankWords] = {};
    for (int rank = 0; rank < groups_.ranks(); ++rank) {
      if (dead_.count(ProcessOf(groups_.DevicesOf(i)[rank]))) dead[rank / 32] |= 1u << rank % 32;
    }
    const Member& member = persistent_.members()[i];
    job_.gpus->Write(member.ordinal, member.mailbox->dead, dead, sizeof(dead));
  }
}

void Recovery::MarkDead(int process, bool clean) {
  {
    std::lock_guard<std::mutex> lock(dead_mutex_);
    dead_.insert(process);
  }
  if (!persistent_.settled()) return;
  if (masked_) return WriteDead();  // an operation that waits for that rank fails
  for (size_t i = 0; i < groups_.local().size(); ++i) {
    for (int rank = 0; rank < groups_.ranks(); ++rank) {
      if (ProcessOf(groups_.DevicesOf(i)[rank]) != process) continue;
      const uint64_t word =
          PackFailure({Cause::kDead, Operation::kDispatch, Step::kArrival, rank, groups_.local()[i].rank, 0});
      ErrorRecord* const record = persistent_.members()[i].record;
      if (!clean && LoadVolatile(&record->failure) == 0) record->failure = word;
      WriteFailure(i, word);
      break;
    }
  }
  WriteDead();
}

bool Recovery::Failed() const {
  if (!persistent_.settled()) return false;
  for (const Member& member : persistent_.members()) {
    if (LoadVolatile(&member.record->failure) != 0) return true;
  }
  return false;
}

std::string Recovery::Failure() const {
  if (!Failed()) return "";
  for (size_t i = 0; i < groups_.local().size(); ++i) {
    const ErrorRecord& record = *persistent_.members()[i].record;
    if (LoadVolatile(&record.failure) == 0) continue;
    std::atomic_thread_fence(std::memory_order_acquire);
    const Scope scope = elastic_ ? Scope::kElastic : groups_.across() ? Scope::kJob : Scope::kProcess;
    return FailureText(record, channel_, scope, masked_, [&](int rank) { return groups_.WhereIs(i, rank); });
  }
  return "";
}

bool Recovery::Admit(int64_t run, const std::function<bool()>& failed) {
  std::lock_guard<std::mutex> lock(runs_mutex_);
  int64_t& slot = runs_[static_cast<uint64_t>(run) % runs_.size()];
  if (slot == run) return true;
  if (failed()) return false;
  slot = run;
  return true;
}

}  // namespace xen_moe
