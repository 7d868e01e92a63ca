// What the host asks of NCCL's headers, and all kernels over NCCL together.
#include <cstring>

#include "nccl_launch.h"
#include "nccl_transport.cuh"

namespace xen_moe {

namespace {

template <class T>
std::string Bytes(const T& t) {
  return {reinterpret_cast<const char*>(&t), sizeof(t)};
}

}  // namespace

int PreloadNccl(int ranks) {
  if (ranks > kNarrowRanks) {
    if (int e = wide::PreloadNcclSettle()) return e;
    if (int e = wide::PreloadNcclDispatch()) return e;
    return wide::PreloadNcclCombine();
  }
  if (int e = PreloadNcclSettle()) return e;
  if (int e = PreloadNcclDispatch()) return e;
  return PreloadNcclCombine();
}

int NcclHeaders() { return NCCL_VERSION_CODE; }
size_t NcclDeviceCommBytes() { return sizeof(ncclDevComm); }
std::string NcclRequest(int ranks, int nodes) { return Bytes(NcclRequirements(ranks, nodes)); }
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

}  // namespace xen_moe
