// The groups of one mesh axis that have ranks in this process. Nothing here changes after the constructor.
#pragma once

#include <string>
#include <vector>

#include "ffi/job.h"

namespace xen_moe {

// A rank that runs on a GPU of this process.
struct LocalRank {
  int rank = -1;
  int ordinal = -1;  // CUDA ordinal of its GPU
  size_t group = 0;
};

class Groups {
 public:
  // `devices`: groups of `ranks`, one after the other. `ranks_per_node`: consecutive ranks of a group that share
  // NVLink. Throws MemoryError where the kernels, or the job's memory, cannot serve such groups.
  Groups(const Job& job, std::vector<DeviceKey> devices, int ranks, int ranks_per_node);

  const std::vector<DeviceKey>& devices() const { return devices_; }
  int ranks() const { return ranks_; }
  int ranks_per_node() const { return ranks_per_node_; }
  int nodes() const { return ranks_ / ranks_per_node_; }
  bool several_nodes() const { return ranks_per_node_ != ranks_; }
  bool across() const { return across_; }  // each rank is a process of its own
  // The ranks of this process, group after group.
  const std::vector<LocalRank>& local() const { return local_; }
  // The devices of the group of local rank `i`, in rank order.
  const std::vector<DeviceKey>& DevicesOf(size_t i) const { return groups_[local_[i].group]; }
  // The CUDA ordinals of these devices: the GPUs that read and write the symmetric memory of local rank `i`.
  std::vector<int> OrdinalsOf(size_t i) const;
  bool SameGroup(size_t i, size_t j) const { return local_[i].group == local_[j].group; }
  // Whether kernels of local rank `i` may use pointers to memory of `rank` of its group.
  bool SameNode(size_t i, int rank) const { return local_[i].rank / ranks_per_node_ == rank / ranks_per_node_; }
  // "GPU 1 of process 2", for error texts.
  std::string WhereIs(size_t i, int rank) const;

 private:
  void CheckSizes() const;
  void CheckAcross(size_t processes_of_group) const;

  const Job& job_;
  const std::vector<DeviceKey> devices_;
  const int ranks_, ranks_per_node_;
  bool across_ = false;
  std::vector<std::vector<DeviceKey>> groups_;
  std::vector<LocalRank> local_;
};

}  // namespace xen_moe
