// What the host asks of NCCL's headers, and the quiet after a failure.
#include <cstring>

#include "nccl_launch.h"
#include "nccl_transport.cuh"

namespace xen_moe {

int PreloadNcclDispatch();
int PreloadNcclCombine();

namespace {

template <class T>
std::string Bytes(const T& t) {
  return {reinterpret_cast<const char*>(&t), sizeof(t)};
}

template <class Condition>
__device__ bool Within(uint64_t start, uint64_t limit_ns, Condition condition) {
  while (!condition()) {
    if (NowNs() - start > limit_ns) return false;
  }
  return true;
}

// One block. Strong signals come after all that was put before, so when those of all ranks of other nodes have come,
// nothing is under way to this one: few tokens go from rank to rank, and so do failures then.
__global__ void SettleKernel(NcclLink link, RailPlan plan, uint32_t signals, uint64_t gone, uint64_t time,
                             uint64_t limit_ns, int* late) {
  const uint64_t start = NowNs();
  const int rank = plan.node * plan.per_node + plan.index, ranks = plan.nodes * plan.per_node;
  auto elsewhere = [&](int other) { return other / plan.per_node != plan.node && !(gone >> other & 1); };
  if (threadIdx.x == 0) {
    int missed = 0;
    link.table->gone = gone;
    if (!Within(start, limit_ns, [&] { return link.Pending() < 0; })) missed = 1 + link.Pending();
    for (int other = 0; other < ranks; ++other) {
      if (elsewhere(other)) link.Raise(other, rank);
    }
    for (int other = 0; missed == 0 && other < ranks; ++other) {
      if (elsewhere(other) && !Within(start, limit_ns, [&] { return link.Read(other) >= time; })) missed = 1 + other;
    }
    *late = missed;
  }
  __syncthreads();
  for (uint32_t signal = threadIdx.x; signal < signals; signal += blockDim.x) {
    link.table->base[signal] = link.Read(NcclLink::kSettleSignals + signal);
  }
}

}  // namespace

int PreloadNccl() {
  cudaFuncAttributes attributes;
  if (int e = cudaFuncGetAttributes(&attributes, SettleKernel)) return e;
  if (int e = PreloadNcclDispatch()) return e;
  return PreloadNcclCombine();
}

int NcclHeaders() { return NCCL_VERSION_CODE; }
size_t NcclDeviceCommBytes() { return sizeof(ncclDevComm); }
std::string NcclRequest(int nodes) { return Bytes(NcclRequirements(nodes)); }
std::string NcclQuestion() {
  ncclCommProperties_t asked{};
  asked.size = sizeof(asked), asked.magic = NCCL_API_MAGIC, asked.version = NCCL_VERSION_CODE;
  return Bytes(asked);
}
NcclFound NcclAnswer(const std::string& properties) {
  ncclCommProperties_t has{};
  std::memcpy(&has, properties.data(), sizeof(has));
  return {has.nRanks, has.nLsaTeams, has.deviceApiSupport && has.ginType != NCCL_GIN_TYPE_NONE};
}

int LaunchNcclSettle(const NcclSite& site, const RailPlan& plan, uint64_t gone, uint64_t time, uint64_t limit_ns,
                     int* late, cudaStream_t stream) {
  const uint32_t signals = NcclRequirements(plan.nodes).ginSignalCount - NcclLink::kSettleSignals;
  SettleKernel<<<1, 256, 0, stream>>>(NcclLink::Of(site), plan, signals, gone, time, limit_ns, late);
  return cudaGetLastError();
}

}  // namespace xen_moe
