// all_gather of large operands: every rank sends its rows to every other rank, through rings (ring.cuh). With
// ExchangeParams::round, one launch runs one round of it. low_latency/gather.cu gathers small operands.
//
// A crew is a warp. A block carries kBlockLanes lanes at a time, and each lane has a warp that sends and a warp that
// receives. While one warp waits for a fence or a flag, the block's other warps copy.
#include "cuda_kernels/exchange/ring.cuh"

namespace xen_moe::XEN_MOE_VARIANT {
namespace {

using Warp = Crew<32, kBlockLanes, 8>;

// Copies the chunks of one lane of this rank's own rows to the output. A warp calls it.
__device__ __forceinline__ void CopyOwn(const ExchangeParams& p, int lane) {
  const uint64_t bytes = p.operand_units * p.unit_bytes;
  char* const to = p.output + static_cast<uint64_t>(p.rank) * bytes;
  for (uint64_t begin = lane * p.chunk_bytes; begin < bytes; begin += p.lanes * p.chunk_bytes) {
    CopyBytes<Warp>(to + begin, p.operand + begin, min(p.chunk_bytes, bytes - begin));
  }
}

__global__ void __launch_bounds__(Warp::kBlockThreads, 1) GatherKernel(const __grid_constant__ ExchangeParams p) {
  __shared__ Running run;
  BeginOperation(run, p.call, Operation::kExchange, p.ranks, p.rank);
  if (!run.refused) {
    const uint64_t bytes = p.operand_units * p.unit_bytes;
    TakePairs<Warp>(
        p, run,
        [&](int lane) {
          if (!Warp::Sends() && p.round < 0) CopyOwn(p, lane);
        },
        [&](int target, int lane) {
          return SendChunks<Warp>(p, run, target, lane, ContiguousChunks(p, 0, bytes, lane));
        },
        [&](int source, int lane) {
          return ReceiveChunks<Warp>(p, run, source, lane, true, ContiguousChunks(p, source * bytes, bytes, lane));
        });
  }
  FinishOperation(run, [&](uint32_t index, uint32_t count) {
    FillBytes(p.output, p.output_units * p.unit_bytes, p.poison, index, count);
  });
}

// Poisons `out` if the group of `mailbox` has failed. The kernels that have computed `out` do not check that.
__global__ void __launch_bounds__(kThreads)
    PoisonKernel(const Mailbox* mailbox, char* out, uint64_t bytes, uint8_t poison) {
  if (LoadRelaxedSystem(&mailbox->failure)) FillBytes(out, bytes, poison, blockIdx.x, gridDim.x);
}

}  // namespace

int LaunchPoison(const Mailbox* mailbox, char* out, uint64_t bytes, uint8_t poison, cudaStream_t stream) {
  return Launch(PoisonKernel, 64, kThreads, 0, stream, mailbox, out, bytes, poison);
}
int LaunchRingGather(const ExchangeParams& p, cudaStream_t stream) {
  if (Unfit(p) || p.ranks > kRanks) return cudaErrorInvalidValue;
  return Launch(GatherKernel, ExchangeBlocks(p), Warp::kBlockThreads, 0, stream, p);
}
int PreloadRingGather() {
  if (int e = LoadKernel(PoisonKernel)) return e;
  return LoadKernel(GatherKernel);
}

}  // namespace xen_moe::XEN_MOE_VARIANT
