// A group of ranks in one process, without JAX: the host's work for the kernels, in its smallest form. Ranks may
// share a GPU, as long as all their blocks are resident together.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda_kernels/kernels.h"
#include "tests/native/reference.h"

namespace native {

// Throws std::runtime_error with the place and the CUDA error.
void Check(int error, const char* what);
#define NATIVE_CHECK(call) ::native::Check(static_cast<int>(call), #call)

constexpr int kStreams = 2;  // of every rank

struct RankState {
  int rank = 0, device = 0;
  xen_moe::Control* control = nullptr;
  xen_moe::Mailbox* mailbox = nullptr;
  xen_moe::ErrorRecord* error = nullptr;  // mapped host memory
  cudaStream_t stream[kStreams] = {}, side = nullptr;
  uint32_t* wrong = nullptr;  // device: words of results that were not as expected
  uint32_t* begun = nullptr;  // device: the call that began last (Call::begun)
};

// An operation of one rank with its arrays on the device.
class Prepared {
 public:
  Prepared(const Problem& problem, const RankCase& c, const RankState& rank, uint32_t call_id, uint64_t timeout_ns);
  Prepared(Prepared&&) = default;
  // The operation, then the check of its results, which also puts the fill byte back. `poisoned`: the result must be
  // that of a failed operation.
  void Launch(cudaStream_t stream) const;
  void Verify(cudaStream_t stream, bool poisoned) const;
  void LaunchAndVerify(cudaStream_t stream, bool poisoned = false) const { Launch(stream), Verify(stream, poisoned); }
  // The result must be right or that of a failed operation, all of it.
  void VerifyEither(cudaStream_t stream) const;
  // Checks the bytes between the results, which must not change, independent of the results.
  void VerifyBorders(cudaStream_t stream) const;
  const xen_moe::Needs& needs() const { return call().needs; }
  uint32_t signature() const { return call().signature; }
  uint32_t call_id() const { return call().call_id; }
  xen_moe::DispatchParams dispatch{};
  xen_moe::CombineParams combine{};
  xen_moe::ExchangeParams exchange{};
  Problem problem;
  int* Input(size_t i) const { return reinterpret_cast<int*>(inputs_[i]); }

 private:
  const xen_moe::Call& call() const;
  void AwaitIfQueuesAreShared(cudaStream_t stream) const;
  std::vector<char*> inputs_;
  char *arena_ = nullptr, *expected_ = nullptr, *mask_ = nullptr, *poisoned_ = nullptr, *borders_ = nullptr;
  char* initial_ = nullptr;
  uint64_t bytes_ = 0;
  uint32_t* wrong_ = nullptr;
};

class World {
 public:
  // Rank r lives on GPU r % gpus. Device memory of a world is given back with it.
  World(int ranks, int gpus, uint32_t epochs_done = 0);
  ~World();
  World(const World&) = delete;

  int ranks() const { return static_cast<int>(states.size()); }
  // Allocates the memory of another generation on all ranks, without publishing it. Returns its number.
  uint32_t Allocate(const xen_moe::Needs& needs);
  // Lets one rank use generations up to `generation`: while kernels run, if wanted.
  void Publish(int rank, uint32_t generation);
  // Allocates and makes it the current generation of all. Nothing may be running.
  void Start(const xen_moe::Needs& needs);
  // Does what the host's reset() does: asks the kernels to leave, waits, clears, and goes on with a later epoch.
  void Reset();
  // Runs `body(rank)` in a thread per rank, on its GPU. Throws the exception of a body.
  template <class Body>
  void Each(Body body);
  // Fills all flags with the numbers of `count` operations that are still to come, behind the next two: as words that
  // were last written 2^32 operations ago may hold. Nothing may be running.
  void LeaveOldFlags(int count);
  void Synchronize();
  uint64_t Wrong();  // sum of `wrong`
  void ClearWrong();
  Bytes Staged(int rank);  // contents of its staging area
  // The present step of each rank, for the report of a scenario that failed.
  std::string Picture();
  uint64_t FailureOf(int rank) const { return *reinterpret_cast<volatile uint64_t*>(&states[rank].error->failure); }
  Prepared* Add(const Problem& problem, const RankCase& c, int rank, uint32_t call_id, double timeout_s);
  // One problem, as every rank sees it: [rank].
  std::vector<Prepared*> AddAll(const Problem& problem, double timeout_s, uint32_t call_id = 0);

  std::vector<RankState> states;

 private:
  std::vector<std::vector<xen_moe::MemoryTable>> generations_;
  std::vector<std::unique_ptr<Prepared>> prepared_;
  uint32_t next_call_ = 1;
};

// Occupies `stream` for that long.
void Sleep(cudaStream_t stream, double microseconds);
// Fills all but `leave` multiprocessors of the current GPU until *stop (mapped host memory) is not 0, for `most_s` at
// most.
void Occupy(cudaStream_t stream, int leave, const int* stop, double most_s);
int Multiprocessors(int device);

void RunThreads(const std::vector<RankState>& states, void (*call)(void*, int), void* context);
template <class Body>
void World::Each(Body body) {
  RunThreads(states, [](void* context, int rank) { (*static_cast<Body*>(context))(rank); }, &body);
}

}  // namespace native
