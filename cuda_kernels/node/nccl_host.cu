// The host's questions to NCCL's headers.
#include <cstring>

#include "cuda_kernels/node/nccl_kernels.h"
#include "cuda_kernels/node/nccl_transport.cuh"

namespace xen_moe {

namespace {

template <class T>
std::string Bytes(const T& t) {
  return {reinterpret_cast<const char*>(&t), sizeof(t)};
}

}  // namespace

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
