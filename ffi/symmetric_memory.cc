#include "ffi/symmetric_memory.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <limits>
#include <thread>

namespace xen_moe {
namespace {

constexpr uint64_t kAlign = 256;
uint64_t AlignUp(uint64_t x) { return (x + kAlign - 1) / kAlign * kAlign; }
std::string Mib(uint64_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

Vote ErrorVote(const MemoryError& e) {
  const std::string prefix = "xen_moe_jax: ";
  Vote vote;
  vote.error = e.message.compare(0, prefix.size(), prefix) == 0 ? e.message.substr(prefix.size()) : e.message;
  return vote;
}

}  // namespace

Workspace::Workspace(Job job, std::vector<DeviceKey> devices, int ranks, int ranks_per_node, int channel,
                     Workspace* flights_of)
    : job_(std::move(job)),
      devices_(std::move(devices)),
      ranks_(ranks),
      ranks_per_node_(ranks_per_node),
      channel_(channel),
      flights_of_(flights_of) {
  runs_.fill(kNoRun);
  if (ranks < 1 || ranks > kMaxRanks || devices_.empty() || devices_.size() % ranks != 0) {
    Refuse("a mesh axis of " + std::to_string(ranks) + " ranks over " + std::to_string(devices_.size()) +
           " devices: the CUDA backend takes 1 to " + std::to_string(kMaxRanks) + " ranks");
  }
  if (ranks_per_node < 1 || ranks % ranks_per_node != 0) {
    Refuse("KernelConfig.ranks_per_node=" + std::to_string(ranks_per_node) + ": must divide the " +
           std::to_string(ranks) + " ranks of the axis");
  }
  if (SeveralNodes() && Nodes() > kMaxNodes) {
    Refuse("KernelConfig.ranks_per_node=" + std::to_string(ranks_per_node) + " on an axis of " + std::to_string(ranks) +
           " ranks makes " + std::to_string(Nodes()) + " nodes: the kernels between nodes take at most " +
           std::to_string(kMaxNodes) +
           "; put more ranks on a node or fewer on the axis, or use KernelConfig(backend='reference')");
  }
  MakeGroups();
  std::vector<int> ordinals;
  for (DeviceKey key : job_.devices) {
    if (ProcessOf(key) == job_.process) ordinals.push_back(OrdinalOf(key));
  }
  for (const Member& member : members_) ordinals.push_back(member.ordinal);
  if (!members_.empty()) job_.gpus->Prepare(ordinals, ranks_, Nodes(), across_);
  if (flights_of_ == nullptr) {
    flights_ = std::make_unique<Workspace>(job_, devices_, ranks_, ranks_per_node_, channel_, this);
  }
}

void Workspace::MakeGroups() {
  for (size_t first = 0; first < devices_.size(); first += ranks_) {
    Group group;
    group.devices.assign(devices_.begin() + first, devices_.begin() + first + ranks_);
    std::set<int> processes;
    const std::set<DeviceKey> distinct(group.devices.begin(), group.devices.end());
    if (distinct.size() != group.devices.size()) Refuse("a device appears twice in one expert-parallel group");
    int mine = 0;
    for (DeviceKey key : group.devices) {
      processes.insert(ProcessOf(key));
      mine += ProcessOf(key) == job_.process;
    }
    if (mine == 0) continue;
    const bool across = processes.size() > 1;
    across_ |= across;
    if (across && static_cast<int>(processes.size()) != ranks_) {
      Refuse("an expert-parallel group of " + std::to_string(ranks_) + " GPUs over " +
             std::to_string(processes.size()) +
             " processes: run one process with all GPUs of the group, or one process per GPU");
    }
    if (across && (job_.provider == nullptr || !job_.agree)) {
      Refuse(
          "the expert-parallel axis spans several processes and neither NVSHMEM nor NCCL has been started: install "
          "nvidia-nvshmem-cu13 or nvidia-nccl-cu13, and call xen_moe_jax.dispatch or open an xm.Buffer in every "
          "process");
    }
    if (across && static_cast<int>(devices_.size()) != job_.num_processes) {
      Refuse("a mesh of " + std::to_string(devices_.size()) + " devices in a job of " +
             std::to_string(job_.num_processes) + " processes: " + job_.provider->name +
             " allocates on all processes together, so the mesh must span them all");
    }
    if (across && SeveralNodes() && job_.provider->connect == nullptr) {
      Refuse("nodes of " + std::to_string(ranks_per_node_) + " of the " + std::to_string(ranks_) + " ranks, and " +
             job_.provider->name +
             " between processes, which has no way from a kernel to another node: set XEN_MOE_MEMORY=nccl in every "
             "process, or leave KernelConfig.ranks_per_node out where all ranks share NVLink");
    }
    if (across && SeveralNodes() && job_.link == nullptr) {
      Refuse("nodes of " + std::to_string(ranks_per_node_) + " of the " + std::to_string(ranks_) +
             " ranks, and xen_moe_jax._cuda was built without NCCL's headers, so it cannot put to another node: build "
             "it again with nvidia-nccl-cu13 2.32 or later installed, or with NCCL_HOME set");
    }
    for (int rank = 0; rank < ranks_; ++rank) {
      if (ProcessOf(group.devices[rank]) != job_.process) continue;
      Member member;
      member.rank = rank;
      member.ordinal = OrdinalOf(group.devices[rank]);
      members_.push_back(member);
      group_of_.push_back(groups_.size());
    }
    groups_.push_back(std::move(group));
  }
}

Workspace::~Workspace() {
  if (across_ || persistent_.empty()) return;  // between processes a workspace lives until the process ends
  for (Generation& generation : generations_) Drop(&generation);
  for (size_t i = 0; i < persistent_.size(); ++i) FreePersistent(i, persistent_[i]);
  job_.gpus->FreePinned(records_);
}

const Member* Workspace::Find(int ordinal) const {
  for (const Member& member : members_) {
    if (member.ordinal == ordinal) return &member;
  }
  return nullptr;
}

std::unique_lock<std::timed_mutex> Workspace::BeginChange(double seconds) {
  std::unique_lock<std::timed_mutex> lock(changing_, std::chrono::duration<double>(seconds));
  if (!lock.owns_lock()) {
    Refuse("another thread has been changing the symmetric memory on channel " + std::to_string(channel_) +
           " for more than " + std::to_string(static_cast<int>(seconds)) + " s");
  }
  return lock;
}

// Returns the sizes of a generation for `needs`.
Workspace::Generation Workspace::PlanGeneration(const Needs& needs) const {
  Generation next;
  next.flag_bytes = needs.flag_bytes;
  next.data_bytes = needs.data_bytes;
  next.scratch_bytes = needs.scratch_bytes;
  if (reserved_ != 0) {  // the rest of an open xm.Buffer is shared out, so that other shapes fit too
    const uint64_t half = Half(needs.flag_bytes, needs.data_bytes);
    const double share = half == 0 ? 0.0 : static_cast<double>(needs.flag_bytes) / static_cast<double>(half);
    next.flag_bytes += static_cast<uint64_t>(share * static_cast<double>(reserved_ - half)) / kAlign * kAlign;
    next.data_bytes = reserved_ - next.flag_bytes;
  }
  return next;
}

void Workspace::EnsureCapacity(const Needs& needs, double seconds) {
  if (HasCapacity(needs)) return;
  const auto lock = BeginChange(seconds);
  if (HasCapacity(needs)) return;
  const Needs all{std::max(needs_.flag_bytes, AlignUp(needs.flag_bytes)),
                  std::max(needs_.data_bytes, AlignUp(needs.data_bytes)),
                  std::max(needs_.scratch_bytes, AlignUp(needs.scratch_bytes))};
  const uint64_t half = Half(all.flag_bytes, all.data_bytes);
  if (reserved_ != 0 && half > reserved_) {
    throw MemoryError{
        true, "xen_moe_jax: the xm.Buffer on channel " + std::to_string(channel_) + " has " +
                  std::to_string(2 * reserved_) + " bytes and this operation needs " + std::to_string(2 * half) +
                  ": open it with larger num_tokens, hidden or size_bytes (xm.buffer_size_hint), or use another "
                  "KernelConfig.channel"};
  }
  Grow(all, PlanGeneration(all), seconds);
}

void Workspace::Reserve(uint64_t staging_bytes, double seconds) {
  const auto lock = BeginChange(seconds);
  if (reserved_ != 0)
    Refuse("an xm.Buffer is already open on channel " + std::to_string(channel_) + " of this mesh axis");
  const uint64_t asked = AlignUp(std::max<uint64_t>(staging_bytes, 2) / 2 + staging_bytes % 2);
  const uint64_t has = generations_.empty() ? 0 : staging_bytes_.load() / 2;
  reserved_ = std::max({asked, has, Half(needs_.flag_bytes, needs_.data_bytes)});
  if (has >= reserved_) return;
  try {
    const Needs known{std::max(needs_.flag_bytes, known_.flag_bytes), std::max(needs_.data_bytes, known_.data_bytes),
                      std::max(needs_.scratch_bytes, known_.scratch_bytes)};
    if (known.flag_bytes != 0 && Half(known.flag_bytes, known.data_bytes) <= reserved_) {
      Grow(needs_, PlanGeneration(known), seconds);  // a captured program finds it without a call of the host
    } else {                                         // the first operation divides it into flags and data
      Generation next;
      next.data_bytes = reserved_;
      Grow(needs_, std::move(next), seconds);
    }
  } catch (...) {
    reserved_ = 0;
    throw;
  }
}

void Workspace::Grow(const Needs& needs, Generation next, double seconds) {
  Reclaim();
  if (across_) {
    GrowAcross(&next, seconds);
  } else {
    GrowWithin(&next, seconds);
  }
  // Another process may have asked for more than `needs`.
  needs_.flag_bytes = std::max(needs_.flag_bytes, needs.flag_bytes);
  needs_.data_bytes = std::max(needs_.data_bytes, needs.data_bytes);
  needs_.scratch_bytes = std::max(needs_.scratch_bytes, needs.scratch_bytes);
}

// Returns whether the newest generation is an xm.Buffer's that no operation has divided into flags and data: then no
// operation can have run in it.
bool Workspace::Undivided() const {
  return !generations_.empty() && generations_.back().flag_bytes == 0 && generations_.back().data_bytes != 0;
}

void Workspace::GrowWithin(Generation* next, double seconds) {
  const auto began = std::chrono::steady_clock::now();
  if (persistent_.empty()) MakePersistentWithin();
  // The ranks of an operation agree on a generation through announcements, which do not go between nodes: there all of
  // them change at once, while nothing runs.
  const bool alone = generations_.empty() || SeveralNodes() || !WaitForRoom(seconds);
  const bool divide = Undivided() && next->flag_bytes != 0 &&
                      Half(next->flag_bytes, next->data_bytes) <= generations_.back().data_bytes;
  if (divide) {
    next->blocks = generations_.back().blocks;
    for (Block& block : next->blocks) block.scratch = nullptr;
  }
  try {
    Allocate(next);
  } catch (...) {
    if (divide) {
      for (Block& block : next->blocks) block.staging = nullptr;
    }
    Drop(next);
    throw;
  }
  if (divide) {
    Generation& whole = generations_.back();
    for (Block& block : whole.blocks) block.staging = nullptr;
    Drop(&whole);  // its scratch
    generations_.pop_back();
  }
  Publish(std::move(*next), alone, std::max(1.0, seconds - SecondsSince(began)));
}

// Between processes: vote, allocate in the order of the tickets, vote on how that went, publish. No process enters a
// collective that another one has not promised to enter.
void Workspace::GrowAcross(Generation* next, double seconds) {
  const std::string what =
      "memory of " + Mib(2 * Half(next->flag_bytes, next->data_bytes)) + " on channel " + std::to_string(channel_);
  const bool fresh = persistent_.empty();
  Vote mine;
  mine.needs = {next->flag_bytes, next->data_bytes, next->scratch_bytes};
  mine.undivided = Undivided();
  mine.has_room = generations_.empty() || HasRoom();
  mine.retired = RetiredTickets();
  Votes agreed = Agree("grow", mine, seconds);
  agreed.Check(what);
  bool all_room = true, all_undivided = true;
  for (const Vote& vote : agreed.votes) {
    next->flag_bytes = std::max(next->flag_bytes, vote.needs.flag_bytes);
    next->data_bytes = std::max(next->data_bytes, vote.needs.data_bytes);
    next->scratch_bytes = std::max(next->scratch_bytes, vote.needs.scratch_bytes);
    all_room &= vote.has_room;
    all_undivided &= vote.undivided;
  }
  const bool alone = generations_.empty() || SeveralNodes() || !all_room;  // as in GrowWithin
  const bool divide = all_undivided && next->flag_bytes != 0 &&
                      Half(next->flag_bytes, next->data_bytes) <= generations_.back().data_bytes;
  const bool in_steps = job_.provider->join != nullptr;
  next->ticket = agreed.ticket;
  Vote outcome;
  try {
    agreed.turn.Begin(seconds);
    ReleaseRetired(agreed.votes);
    if (fresh) MakePersistentAcross();
    if (fresh && !in_steps) JoinPersistent(seconds);
    if (divide) {
      next->blocks = generations_.back().blocks;
      for (Block& block : next->blocks) block.scratch = nullptr;
    }
    if (alone && !generations_.empty() && !WaitIdle(seconds)) {
      Refuse("GPU " + std::to_string(members_.front().ordinal) + " has been busy for " +
             std::to_string(static_cast<int>(seconds)) + " s without an operation on this channel");
    }
    Allocate(next);
  } catch (const MemoryError& e) {
    outcome = ErrorVote(e);
  }
  agreed.turn.End();
  try {
    if (in_steps) outcome = JoinInSteps(next, fresh, outcome, what, seconds);
    Agree("grown", outcome, seconds).Check(what);
  } catch (...) {
    if (divide) {
      for (Block& block : next->blocks) block.staging = nullptr;
    }
    Drop(next);
    if (fresh) LeavePersistent();
    throw;
  }
  if (divide) {
    Generation& whole = generations_.back();
    next->ticket = whole.ticket;
    for (Block& block : whole.blocks) block.staging = nullptr;
    Drop(&whole);
    generations_.pop_back();
  }
  Publish(std::move(*next), alone, seconds);
  if (alone) Agree("ready", Vote{}, seconds);  // a peer's first operation finds the table of this rank
}

// Up to here every process has made its own memory, or failed to. Only when all have made it do they show it to each
// other.
Vote Workspace::JoinInSteps(Generation* next, bool fresh, const Vote& outcome, const std::string& what,
                            double seconds) {
  Votes made = Agree("made", outcome, seconds);
  made.Check(what);
  Vote joined;
  try {
    made.turn.Begin(seconds);
    // Everything collective comes before anything that may fail in one process alone: no process waits in vain.
    if (fresh) Show(persistent_.front().mailbox, &persistent_.front().joined, seconds);
    for (Block& block : next->blocks) {
      if (block.staging != nullptr) Show(block.staging, &block.joined, seconds);
    }
    if (fresh && SeveralNodes()) Connect(seconds);
    if (fresh) JoinPersistent(seconds);
    Join(next, seconds);
  } catch (const MemoryError& e) {
    joined = ErrorVote(e);
  }
  return joined;
}

// Shows the block `own` to all processes, unless `*joined` says that this has been done. Afterwards `*joined` is true,
// also after an error. Collective where the provider has `join`.
void Workspace::Show(void* own, bool* joined, double seconds) {
  if (*joined) return;
  *joined = true;
  if (job_.provider->join != nullptr && !job_.provider->join(own, seconds)) Refuse(job_.provider->reason());
}

// Returns the block of `rank` that corresponds to `own`, as mapped into this process.
char* Workspace::Peer(void* own, int rank) const {
  const int process = ProcessOf(groups_.front().devices[rank]);
  char* const theirs = static_cast<char*>(job_.provider->peer(own, process));
  if (theirs == nullptr) {
    Refuse("the memory of process " + std::to_string(process) + " is not mapped into process " +
           std::to_string(job_.process) +
           ": the ranks of one axis must be on one NVLink domain, or be cut into nodes that are: pass "
           "KernelConfig.ranks_per_node, number ranks node by node, or use KernelConfig(backend='reference')");
  }
  return theirs;
}

void Workspace::Join(Generation* next, double seconds) {
  for (Block& block : next->blocks) {
    if (block.staging == nullptr) continue;
    Show(block.staging, &block.joined, seconds);
    for (int rank = 0; rank < ranks_; ++rank) {
      if (SameNode(0, rank)) block.peers[rank] = Peer(block.staging, rank);
    }
  }
}

void Workspace::MakePersistentWithin() {
  std::vector<PersistentBlock> blocks(members_.size());
  try {
    records_ = job_.gpus->AllocatePinned(members_.size() * sizeof(ErrorRecord));
    for (size_t i = 0; i < members_.size(); ++i) {
      std::vector<int> readers;
      for (DeviceKey key : groups_[group_of_[i]].devices) {
        readers.push_back(OrdinalOf(key));
        if (OrdinalOf(key) != members_[i].ordinal) job_.gpus->CheckPeerAccess(members_[i].ordinal, OrdinalOf(key));
      }
      blocks[i].mailbox = job_.gpus->Allocate(members_[i].ordinal, sizeof(Mailbox), readers);
      job_.gpus->Zero(members_[i].ordinal, blocks[i].mailbox, sizeof(Mailbox));
      blocks[i].control = job_.gpus->Allocate(members_[i].ordinal, sizeof(Control), {members_[i].ordinal});
    }
    if (SeveralNodes()) MakeRails(&blocks);
    for (size_t i = 0; i < members_.size(); ++i) {
      for (size_t j = 0; j < members_.size(); ++j) {
        if (group_of_[i] == group_of_[j]) blocks[i].mailboxes[members_[j].rank] = blocks[j].mailbox;
      }
    }
    persistent_ = blocks;
    for (size_t i = 0; i < members_.size(); ++i) {
      AddControl(i);
      if (SeveralNodes()) AddRail(i);
    }
  } catch (...) {
    persistent_.clear();
    for (size_t i = 0; i < members_.size(); ++i) FreePersistent(i, blocks[i]);
    if (records_.host != nullptr) job_.gpus->FreePinned(records_);
    records_ = Pinned{};
    throw;
  }
  settled_ = true;
}

void Workspace::MakePersistentAcross() {
  const Member& member = members_.front();
  persistent_.resize(1);
  PersistentBlock& block = persistent_.front();
  try {
    block.mailbox = static_cast<char*>(job_.provider->allocate(sizeof(Mailbox)));
    if (block.mailbox == nullptr)
      throw MemoryError{true, std::string("no symmetric memory for a mailbox: ") + job_.provider->reason()};
    records_ = job_.gpus->AllocatePinned(sizeof(ErrorRecord));
    block.control = job_.gpus->Allocate(member.ordinal, sizeof(Control), {member.ordinal});
    if (SeveralNodes()) block.rail = job_.gpus->Allocate(member.ordinal, RailBytes(ranks_, Nodes()), {member.ordinal});
    job_.gpus->Zero(member.ordinal, block.mailbox, sizeof(Mailbox));
  } catch (...) {
    LeavePersistent();
    throw;
  }
}

void Workspace::JoinPersistent(double seconds) {
  PersistentBlock& block = persistent_.front();
  try {
    Show(block.mailbox, &block.joined, seconds);
    for (int rank = 0; rank < ranks_; ++rank) {
      if (SameNode(0, rank)) block.mailboxes[rank] = Peer(block.mailbox, rank);
    }
    AddControl(0);
    if (SeveralNodes()) AddWindows();
  } catch (...) {
    LeavePersistent();
    throw;
  }
  settled_ = true;
}

// Called in all processes when one has failed to make its persistent memory. A mailbox that other processes may have
// mapped stays allocated, because not every process may have one to release.
void Workspace::LeavePersistent() {
  settled_ = false;
  for (const PersistentBlock& block : persistent_) {
    job_.gpus->Free(members_.front().ordinal, block.control);
    job_.gpus->Free(members_.front().ordinal, block.rail);
    const bool own = !block.joined && job_.provider->discard != nullptr;
    if (own && block.mailbox != nullptr) job_.provider->discard(block.mailbox);
  }
  persistent_.clear();
  if (records_.host != nullptr) job_.gpus->FreePinned(records_);
  records_ = Pinned{};
}

void Workspace::AddControl(size_t i) {
  Member& member = members_[i];
  const size_t at = i * sizeof(ErrorRecord);
  member.control = reinterpret_cast<Control*>(persistent_[i].control);
  member.mailbox = reinterpret_cast<Mailbox*>(persistent_[i].mailbox);
  member.record = reinterpret_cast<ErrorRecord*>(records_.host + at);
  std::memset(member.record, 0, sizeof(ErrorRecord));
  auto control = std::make_unique<Control>();
  std::memset(static_cast<void*>(control.get()), 0, sizeof(Control));
  for (int rank = 0; rank < ranks_; ++rank) {
    if (SameNode(i, rank)) control->mailbox[rank] = reinterpret_cast<Mailbox*>(persistent_[i].mailboxes[rank]);
  }
  control->error = reinterpret_cast<ErrorRecord*>(records_.device + at);
  job_.gpus->Write(member.ordinal, member.control, control.get(), sizeof(Control));
}

// Allocates the memory that `next` does not have yet, and zeroes its flags.
void Workspace::Allocate(Generation* next) {
  const uint64_t half = Half(next->flag_bytes, next->data_bytes);
  if (next->blocks.empty()) next->blocks.resize(members_.size());
  for (size_t i = 0; i < members_.size(); ++i) {
    Block& block = next->blocks[i];
    const int ordinal = members_[i].ordinal;
    const Group& group = groups_[group_of_[i]];
    if (next->scratch_bytes != 0) block.scratch = job_.gpus->Allocate(ordinal, next->scratch_bytes, {ordinal});
    if (block.staging == nullptr && half != 0) {
      if (across_) {
        block.staging = static_cast<char*>(job_.provider->allocate(2 * half));
        if (block.staging == nullptr)
          throw MemoryError{true, "a staging area of " + Mib(2 * half) + ": " + job_.provider->reason()};
      } else {
        std::vector<int> readers;
        for (DeviceKey key : group.devices) readers.push_back(OrdinalOf(key));
        block.staging = job_.gpus->Allocate(ordinal, 2 * half, readers);
      }
    }
    if (next->flag_bytes != 0) {
      job_.gpus->Zero(ordinal, block.staging, next->flag_bytes);
      job_.gpus->Zero(ordinal, block.staging + half, next->flag_bytes);
    }
  }
  if (across_) {
    if (job_.provider->join == nullptr) Join(next, 0.0);  // allocating has shown it to the other processes
    return;
  }
  for (size_t i = 0; i < members_.size(); ++i) {
    for (size_t j = 0; j < members_.size(); ++j) {
      if (group_of_[i] == group_of_[j]) next->blocks[i].peers[members_[j].rank] = next->blocks[j].staging;
    }
  }
}

// Frees a generation that no kernel uses any more. Memory that other processes may have mapped is retired: all
// processes release it together.
void Workspace::Drop(Generation* generation) {
  bool shared = false;
  for (size_t i = 0; i < generation->blocks.size(); ++i) {
    Block& block = generation->blocks[i];
    job_.gpus->Free(members_[i].ordinal, block.scratch);
    block.scratch = nullptr;
    if (block.staging == nullptr) continue;
    if (across_ && (block.joined || job_.provider->discard == nullptr)) {
      shared = true;
      continue;
    }
    if (across_) {
      job_.provider->discard(block.staging);
    } else {
      job_.gpus->Free(members_[i].ordinal, block.staging);
    }
    block.staging = nullptr;
  }
  if (shared) retired_.push_back(*generation);
}

std::vector<uint64_t> Workspace::RetiredTickets() const {
  std::vector<uint64_t> tickets;
  for (const Generation& generation : retired_) tickets.push_back(generation.ticket);
  return tickets;
}

// Releases the generations that every process has retired, in the order of their tickets.
void Workspace::ReleaseRetired(const std::vector<Vote>& votes) {
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
