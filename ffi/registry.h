// All workspaces of this process, and its job.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ffi/workspace.h"

namespace xen_moe {

class Registry {
 public:
  static Registry& Get();
  void Configure(Job job);
  void SetUp(JobSetup setup);
  // Returns whether this process knows its job, after asking JobSetup where it does not. False: it has no GPUs.
  bool KnowsJob();
  void SetProvider(const MemoryProvider* provider);
  void SetAgree(Agree agree);
  // `devices`: groups of `ranks`, one after the other; a negative number -1-i stands for the i-th device of the job.
  // Within one process the workspace lives as long as a caller holds it. Between processes, where no process can leave
  // alone, it lives until the process ends.
  // `flights`: returns the workspace for asynchronous operations, which lives as long as the other one.
  // `ranks_per_node`: as in Workspace; 0 stands for all ranks. Groups of another `ranks_per_node` have another
  // workspace.
  std::shared_ptr<Workspace> Find(std::vector<DeviceKey> devices, int ranks, int channel, bool flights = false,
                                  int ranks_per_node = 0);
  std::vector<std::shared_ptr<Workspace>> All();
  void ResetAll(double seconds);
  void MarkDead(int process, bool clean);
  // Returns the processes that have died and that a reset has left out: the same set in every process that is left.
  std::set<int> Gone();
  // Returns "", or the first failure of a group.
  std::string Failure();
  // Called when no caller holds `workspace` any more. It is deleted when its GPUs are idle; if it has failed by then,
  // it stays until ResetAll, so that Failure still returns its failure.
  void Leave(std::shared_ptr<Workspace> workspace);
  // For tests: forgets everything.
  void Clear();

 private:
  // Replaces places in the job (negative numbers) by the keys of these devices. `mutex_` is held.
  void ResolvePlaces(std::vector<DeviceKey>* devices) const;

  std::mutex mutex_;
  bool configured_ = false;
  Job job_;
  JobSetup setup_;
  // By devices; ranks, ranks per node and channel.
  std::map<std::pair<std::vector<DeviceKey>, std::array<int, 3>>, std::weak_ptr<Workspace>> workspaces_;
  std::vector<std::shared_ptr<Workspace>> kept_;
  std::mutex leaving_mutex_;
  std::vector<std::shared_ptr<Workspace>> leaving_;
  void Forget(const Workspace* gone);
};

}  // namespace xen_moe
