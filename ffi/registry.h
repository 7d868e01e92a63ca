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
  // Whether this process knows its job, or has learned about it now. False: it has no GPUs.
  bool KnowsJob();
  void SetProvider(const MemoryProvider* provider);
  void SetAgree(Agree agree);
  // `devices`: groups of `ranks`, one after the other; a negative number -1-i stands for the i-th device of the job.
  // The workspace lives as long as somebody holds it; between processes, where no one can leave alone, for ever.
  // `flights`: the one for operations in flight, which lives as long as the other.
  // `ranks_per_node`: as in Workspace; 0: all ranks. Groups that are cut in another way share nothing.
  std::shared_ptr<Workspace> Find(std::vector<DeviceKey> devices, int ranks, int channel, bool flights = false,
                                  int ranks_per_node = 0);
  std::vector<std::shared_ptr<Workspace>> All();
  void ResetAll(double seconds);
  void MarkDead(int process, bool clean);
  // Processes that a reset has gone on without: the same in all that are left.
  std::set<int> Gone();
  // Empty, or the first failure of a group.
  std::string Failure();
  // The last user of `workspace` has gone. It is deleted when its GPUs have finished what they were given; if it has
  // failed by then, it stays until ResetAll, so that nobody misses the failure.
  void Leave(std::shared_ptr<Workspace> workspace);
  // For tests: forgets everything.
  void Clear();

 private:
  // The keys of devices that `devices` may name by their place in the job. `mutex_` is held.
  void ResolvePlaces(std::vector<DeviceKey>* devices) const;

  std::mutex mutex_;
  bool configured_ = false;
  Job job_;
  JobSetup setup_;
  // By devices, ranks, ranks of a node, channel.
  std::map<std::pair<std::vector<DeviceKey>, std::array<int, 3>>, std::weak_ptr<Workspace>> workspaces_;
  std::vector<std::shared_ptr<Workspace>> kept_;
  std::mutex leaving_mutex_;
  std::vector<std::shared_ptr<Workspace>> leaving_;
  void Forget(const Workspace* gone);
};

}  // namespace xen_moe
