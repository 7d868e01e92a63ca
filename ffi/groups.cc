#include "ffi/groups.h"

#include <set>

#include "cuda_kernels/node/rail_memory.h"

namespace xen_moe {

Groups::Groups(const Job& job, std::vector<DeviceKey> devices, int ranks, int ranks_per_node)
    : job_(job), devices_(std::move(devices)), ranks_(ranks), ranks_per_node_(ranks_per_node) {
  CheckSizes();
  for (size_t first = 0; first < devices_.size(); first += ranks_) {
    const std::vector<DeviceKey> group(devices_.begin() + first, devices_.begin() + first + ranks_);
    if (std::set<DeviceKey>(group.begin(), group.end()).size() != group.size()) {
      Refuse("a device appears twice in one expert-parallel group");
    }
    std::set<int> processes;
    for (DeviceKey key : group) processes.insert(ProcessOf(key));
    if (!processes.count(job_.process)) continue;
    if (processes.size() > 1) {
      across_ = true;
      CheckAcross(processes.size());
    }
    for (int rank = 0; rank < ranks_; ++rank) {
      if (ProcessOf(group[rank]) == job_.process) local_.push_back({rank, OrdinalOf(group[rank]), groups_.size()});
    }
    groups_.push_back(group);
  }
}

void Groups::CheckSizes() const {
  if (ranks_ < 1 || ranks_ > kMaxRanks || devices_.empty() || devices_.size() % ranks_ != 0) {
    Refuse("a mesh axis of " + std::to_string(ranks_) + " ranks over " + std::to_string(devices_.size()) +
           " devices: the CUDA backend takes 1 to " + std::to_string(kMaxRanks) + " ranks");
  }
  if (ranks_per_node_ < 1 || ranks_ % ranks_per_node_ != 0) {
    Refuse("KernelConfig.ranks_per_node=" + std::to_string(ranks_per_node_) + ": must divide the " +
           std::to_string(ranks_) + " ranks of the axis");
  }
  if (several_nodes() && nodes() > kMaxNodes) {
    Refuse("KernelConfig.ranks_per_node=" + std::to_string(ranks_per_node_) + " on an axis of " +
           std::to_string(ranks_) + " ranks makes " + std::to_string(nodes()) +
           " nodes: the kernels between nodes take at most " + std::to_string(kMaxNodes) +
           "; put more ranks on a node or fewer on the axis, or use KernelConfig(backend='reference')");
  }
}

void Groups::CheckAcross(size_t processes_of_group) const {
  if (static_cast<int>(processes_of_group) != ranks_) {
    Refuse("an expert-parallel group of " + std::to_string(ranks_) + " GPUs over " +
           std::to_string(processes_of_group) +
           " processes: run one process with all GPUs of the group, or one process per GPU");
  }
  if (job_.provider == nullptr || !job_.agree) {
    Refuse(
        "the expert-parallel axis spans several processes and neither NVSHMEM nor NCCL has been started: install "
        "nvidia-nvshmem-cu13 or nvidia-nccl-cu13, and call xen_moe_jax.dispatch or open an xm.Buffer in every "
        "process");
  }
  if (static_cast<int>(devices_.size()) != job_.num_processes) {
    Refuse("a mesh of " + std::to_string(devices_.size()) + " devices in a job of " +
           std::to_string(job_.num_processes) + " processes: " + job_.provider->name +
           " allocates on all processes together, so the mesh must span them all");
  }
  if (several_nodes() && job_.provider->connect == nullptr) {
    Refuse("nodes of " + std::to_string(ranks_per_node_) + " of the " + std::to_string(ranks_) + " ranks, and " +
           job_.provider->name +
           " between processes, which has no way from a kernel to another node: set XEN_MOE_MEMORY=nccl in every "
           "process, or leave KernelConfig.ranks_per_node out where all ranks share NVLink");
  }
  if (several_nodes() && job_.link == nullptr) {
    Refuse("nodes of " + std::to_string(ranks_per_node_) + " of the " + std::to_string(ranks_) +
           " ranks, and xen_moe_jax._cuda was built without NCCL's headers, so it cannot put to another node: build "
           "it again with nvidia-nccl-cu13 2.32 or later installed, or with NCCL_HOME set");
  }
}

std::vector<int> Groups::OrdinalsOf(size_t i) const {
  std::vector<int> ordinals;
  for (DeviceKey key : DevicesOf(i)) ordinals.push_back(OrdinalOf(key));
  return ordinals;
}

std::string Groups::WhereIs(size_t i, int rank) const {
  if (rank < 0 || rank >= ranks_) return "unknown";
  const DeviceKey key = DevicesOf(i)[rank];
  const std::string gpu = "GPU " + std::to_string(OrdinalOf(key));
  return job_.num_processes == 1 ? gpu : gpu + " of process " + std::to_string(ProcessOf(key));
}

}  // namespace xen_moe
