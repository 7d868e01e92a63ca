// One rank of a group whose ranks are processes, without JAX: memory and puts come from NCCL through ffi/nccl_memory.h,
// as they do under JAX. Virtual nodes: processes of one NCCL_HOSTID.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cuda_kernels/node/nccl_transport.cuh"
#include "tests/native/nodes/node_operations.cuh"
#include "tests/native/processes/rendezvous.h"
#include "tests/native/processes/tcp_rma.h"

namespace native {

struct ProcessOptions : NodeOptions {
  std::string nccl, log;
  std::string plugin, faults;  // none: NCCL's own network, between the nodes that there are
  std::string address;         // of rank 0, where the ranks were started one by one
  int rank = -1;
  double limit_s = 60;  // of a scenario
};

// The rank's part of an operation, and the known parts of the other ranks.
struct ProcessOperation {
  NodeOperation operation;
  std::vector<std::vector<int>> experts;  // [R][T, K]
  const Problem& problem() const { return operation.prepared->problem; }
};

class ProcessWorld {
 public:
  // Starts NCCL: the communicator, the mailbox's window, the device communicator. Collective, as Start is.
  ProcessWorld(const ProcessOptions& options, Rendezvous* rendezvous);
  ProcessOperation Add(Problem problem, int chunk_tokens, double timeout_s);
  // Makes the staging area for all operations that were added.
  void Start();
  // Launches the operation and checks its results. `poisoned`: they must be those of a failed operation.
  void Launch(const ProcessOperation& o, bool poisoned = false);
  void LaunchUnchecked(const ProcessOperation& o);
  std::vector<uint64_t> AllGather(uint64_t number = 0) { return rendezvous_->AllGather(number, options_.limit_s); }
  bool counts() const { return traffic_ != nullptr; }  // whether the network counts, and can be cut
  void Synchronize();
  uint32_t Wrong();  // words of results that were not as expected since the last call
  uint64_t Failure() const { return *reinterpret_cast<volatile uint64_t*>(&state.error->failure); }
  RmaTraffic Sent(int target) const;  // so far
  void Cut() const;                   // this rank's network
  char* staging() const { return staging_; }
  uint64_t staging_bytes() const { return staging_bytes_; }
  const std::string& started() const { return started_; }  // NCCL's version and parts

  RankState state;
  NcclLink link{};

 private:
  double StartSeconds() const { return 0.6 * options_.limit_s; }  // so that NCCL's reason comes before the limit
  char* Device(uint64_t bytes);
  char* Window(uint64_t bytes);  // symmetric memory of all ranks, zero

  const ProcessOptions options_;
  Rendezvous* const rendezvous_;
  std::string started_;
  Mailbox* mailbox_ = nullptr;
  char* staging_ = nullptr;
  uint64_t staging_bytes_ = 0;
  uint64_t* expected_ = nullptr;
  Needs needs_{};
  std::vector<std::unique_ptr<Prepared>> prepared_;
  uint32_t next_call_ = 1;
  int launched_ = 0;
  void (*traffic_)(int, int, RmaTraffic*) = nullptr;
  void (*kill_)(int) = nullptr;
};

}  // namespace native
