#include "ffi/nccl_link.h"

#include <cuda_runtime_api.h>

#include <chrono>
#include <string>
#include <thread>

#include "cuda_kernels/core/cuda_error.h"
#include "ffi/nccl_memory.h"

namespace xen_moe {

#ifdef XEN_MOE_NCCL_KERNELS

namespace {

using Clock = std::chrono::steady_clock;

void Check(int e, const std::string& what) {
  const cudaError_t error = Taken(static_cast<cudaError_t>(e));
  if (error != cudaSuccess) Refuse(what + ": " + cudaGetErrorString(error));
}

struct OnGpu {
  int before;
  explicit OnGpu(int ordinal) : before(CudaDevices().Select(ordinal)) {}
  ~OnGpu() { Taken(cudaSetDevice(before)); }
};

void Prepare(int ordinal, int ranks) {
  const OnGpu on(ordinal);
  Check(PreloadNccl(ranks), "loading the kernels between processes");
}

// Returns whether the kernel on `stream` ended. The kernel ends by itself within `seconds`; five seconds more are for
// other work of the GPU before it.
bool Ended(cudaStream_t stream, double seconds) {
  const auto until = Clock::now() + std::chrono::duration<double>(seconds + 5.0);
  while (true) {
    const cudaError_t e = Taken(cudaStreamQuery(stream));
    if (e != cudaErrorNotReady) {
      Check(e, "waiting for the network after a failure");
      return true;
    }
    if (Clock::now() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void Settle(int ordinal, const std::string& made, RailMemory* rail, int rank, int ranks, int per_node,
            const uint64_t* gone, uint64_t time, double seconds) {
  const OnGpu on(ordinal);
  RailPlan plan{};
  plan.nodes = ranks / per_node, plan.per_node = per_node;
  plan.node = rank / per_node, plan.index = rank % per_node;
  cudaStream_t stream = nullptr;
  Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  const Pinned late = CudaDevices().AllocatePinned(sizeof(int));
  const int rc =
      NcclSettleFor(ranks)({made.data(), &rail->windows}, plan, gone, time, static_cast<uint64_t>(seconds * 1e9),
                           reinterpret_cast<int*>(late.device), stream);
  // A stream that is still busy, and the memory that its kernel writes, are leaked.
  const bool ended = rc == cudaSuccess && Ended(stream, seconds);
  const int waited = ended ? *reinterpret_cast<volatile int*>(late.host) : 0;
  if (ended || rc != cudaSuccess) {
    Taken(cudaStreamDestroy(stream));
    CudaDevices().FreePinned(late);
  }
  Check(rc, "waiting for the network after a failure");
  if (ended && waited == 0) return;
  Refuse("reset: puts between nodes were still under way after " + std::to_string(static_cast<int>(seconds)) + " s" +
         (ended ? ", to or from rank " + std::to_string(waited - 1) : std::string()) +
         ". Nobody knows what they will write to: start all processes of the job again");
}

}  // namespace

const LinkKernels* NcclLinkKernels() {
  static const LinkKernels kernels{NcclRequest, NcclDeviceCommBytes(), Prepare, Settle};
  return &kernels;
}
int NcclLinkHeaders() { return NcclHeaders(); }
int NcclRanksPerNode() {
  std::string properties = NcclQuestion();
  QueryNccl(&properties);
  const NcclFound found = NcclAnswer(properties);
  if (found.domains < 1 || found.ranks % found.domains != 0) {
    Refuse("NCCL finds " + std::to_string(found.domains) + " NVLink domains among " + std::to_string(found.ranks) +
           " processes: domains of several sizes are not supported");
  }
  if (found.domains > 1 && !found.puts) {
    Refuse("NCCL finds " + std::to_string(found.domains) + " NVLink domains among " + std::to_string(found.ranks) +
           " processes and no network that kernels can put over: NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,ENV tells "
           "what it has looked for");
  }
  return found.ranks / found.domains;
}

#else

const LinkKernels* NcclLinkKernels() { return nullptr; }
int NcclLinkHeaders() { return 0; }
int NcclRanksPerNode() { return 0; }

#endif

}  // namespace xen_moe
