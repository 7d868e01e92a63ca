#include "ffi/workspace.h"

namespace xen_moe {

Workspace::Workspace(Job job, std::vector<DeviceKey> devices, int ranks, int ranks_per_node, int channel,
                     Workspace* flights_of)
    : job_(std::move(job)),
      groups_(job_, std::move(devices), ranks, ranks_per_node),
      channel_(channel),
      flights_of_(flights_of),
      changes_(job_, groups_, channel, flights_of != nullptr),
      persistent_(job_, groups_),
      staging_(job_, groups_, changes_, persistent_, channel),
      recovery_(job_, groups_, changes_, persistent_, staging_, channel) {
  std::vector<int> ordinals;
  for (DeviceKey key : job_.devices) {
    if (ProcessOf(key) == job_.process) ordinals.push_back(OrdinalOf(key));
  }
  for (const Member& member : members()) ordinals.push_back(member.ordinal);
  if (!members().empty()) job_.gpus->Prepare(ordinals, groups_.ranks(), groups_.nodes(), groups_.across());
  if (flights_of_ == nullptr) {
    flights_ = std::make_unique<Workspace>(job_, groups_.devices(), ranks, ranks_per_node, channel_, this);
  }
}

Workspace::~Workspace() {
  if (across() || !persistent_.made()) return;  // between processes a workspace lives until the process ends
  staging_.FreeAll();
  persistent_.Free();
}

const Member* Workspace::Find(int ordinal) const {
  for (const Member& member : members()) {
    if (member.ordinal == ordinal) return &member;
  }
  return nullptr;
}

std::pair<void*, void*> Workspace::Shown(Needs* needs) const {
  if (!across() || !persistent_.made()) return {nullptr, nullptr};
  return {persistent_.own(0), staging_.Newest(needs)};
}

bool Workspace::Failed() const { return (flights_ && flights_->Failed()) || recovery_.Failed(); }

std::string Workspace::Failure() const {
  if (flights_ && flights_->Failed()) return flights_->Failure();
  return recovery_.Failure();
}

std::string Workspace::Admit(int64_t run) {
  if (flights_of_) return flights_of_->Admit(run);  // both workspaces fail together
  if (recovery_.Admit(run, [this] { return Failed(); })) return "";
  return Failure();
}

}  // namespace xen_moe
