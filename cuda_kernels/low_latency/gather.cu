// all_gather of small operands: every rank's bytes to every rank, with no fence and no flag beside the data.
//
// What moves: this rank's operand in LL128 lines (ll128.cuh), 480 bytes a round, to the same lines at every other rank;
// from there to the output. Who does it: each block pushes a share of the rounds, copies it to its own part of the
// output, and then takes the same share of every other rank's rounds out of the lines. The operand is read before the
// epoch is known. Who waits for whom: pushing waits for no rank. A warp that takes rounds waits for lines; if that
// takes long, it first pushes the shares that no block of this GPU has started (claims.cuh), so every wait ends with
// any number of resident blocks. Memory order: ll128.cuh; nothing else is shared between GPUs.
#include "cuda_kernels/core/launch.cuh"
#include "cuda_kernels/low_latency/low_latency.cuh"

namespace xen_moe::XEN_MOE_VARIANT {
namespace {

constexpr int kGatherAhead = 4;  // rounds that a warp moves at once

struct LowLatencyGather {
  const ExchangeParams& p;
  const Running& run;
  const Piece piece;
  const uint32_t bytes, rounds;  // of an operand
  const int last_lines;          // lines of its last round

  __device__ __forceinline__ LowLatencyGather(const ExchangeParams& params, const Running& running)
      : p(params),
        run(running),
        bytes(static_cast<uint32_t>(params.operand_units * params.unit_bytes)),
        rounds((bytes + kRoundData - 1) / kRoundData),
        last_lines(LastLines(bytes)) {}

  // The rounds of share `share`: [first, end).
  __device__ __forceinline__ uint32_t First(int share) const {
    return rounds * static_cast<uint32_t>(share) / gridDim.x;
  }
  __device__ __forceinline__ int Lines(uint32_t round) const { return round == rounds - 1 ? last_lines : kRoundLines; }
  // A round of `source`, in the lines of rank `on`.
  __device__ __forceinline__ char* Round(int on, int source, uint32_t round) const {
    return run.half[on] + run.line_border + (static_cast<uint64_t>(source) * rounds + round) * kRoundBytes;
  }
  // Where this lane's bytes of a round begin in an operand.
  __device__ __forceinline__ uint32_t At(uint32_t round) const { return round * kRoundData + piece.offset; }
  // Where the rows of `source` begin in the output.
  __device__ __forceinline__ char* Part(int source) const { return p.output + static_cast<uint64_t>(source) * bytes; }

  // Pushes the rounds of share `share` that fall to warp `warp` of `warps`, and copies them to this rank's part of the
  // output. `begin()` runs when the epoch is needed; it returns false if nothing is to be sent.
  template <class Begin>
  __device__ __forceinline__ void PushShare(int share, int warp, int warps, Begin begin) const {
    const uint32_t end = First(share + 1);
    const int next = p.rank + 1 < p.ranks ? p.rank + 1 : 0;
    const RankMask others = AllRanks(p.ranks) & ~OneRank(p.rank);
#pragma unroll 1
    for (uint32_t base = First(share) + warp; base < end; base += kGatherAhead * warps) {
      uint4 v[kGatherAhead];
#pragma unroll
      for (int i = 0; i < kGatherAhead; ++i) {
        const uint32_t round = base + i * warps;
        v[i] = make_uint4(0, 0, 0, 0);
        if (round < end && At(round) < bytes) v[i] = LoadPiece(p.operand + At(round), piece);
      }
      if (!begin()) return;
#pragma unroll
      for (int i = 0; i < kGatherAhead; ++i) {
        const uint32_t round = base + i * warps;
        if (round >= end) break;
        const int lines = Lines(round);
        TurnedRanks::Of(others, next, p.ranks).ForEachOnce([&](int rank) {
          StoreRound(Round(rank, p.rank, round), piece, v[i], lines, run.epoch);
        });
        if (At(round) < bytes) StorePiece(Part(p.rank) + At(round), piece, v[i]);
      }
    }
  }

  // One warp: pushes the shares that no block of this GPU has started. It is static and makes an object of its own,
  // because the caller's object would otherwise have to lie in memory.
  static __device__ __noinline__ void AdoptShares(const ExchangeParams& p, const Running& run) {
    const LowLatencyGather work(p, run);
    const int lane = threadIdx.x & 31, shares = static_cast<int>(gridDim.x);
    for (int base = 0; base < shares; base += 32) {
      const bool idle = base + lane < shares && LoadRelaxedGpu(&run.control->started[base + lane]) != run.epoch;
      for (uint32_t m = __ballot_sync(0xFFFFFFFFu, idle); m; m &= m - 1) {
        const int share = base + __ffs(m) - 1;
        bool adopted = false;
        if (lane == 0) adopted = atomicExch(&run.control->started[share], run.epoch) != run.epoch;
        if (__shfl_sync(0xFFFFFFFFu, adopted, 0)) work.PushShare(share, 0, 1, [] { return true; });
      }
    }
  }

  // One warp: takes its rounds of share `share` of every other rank out of the lines. Returns false if the group has
  // failed, or, if `*stalled` was false, when it is time to look for shares that no block has started (then `*stalled`
  // is set to true). `*item`: the first of the rounds that are still to be taken, kept between calls.
  __device__ __forceinline__ bool TakeShare(int share, int warp, bool* stalled, uint32_t* item) const {
    const uint32_t first = First(share), count = First(share + 1) - first;
    const uint32_t items = count * static_cast<uint32_t>(p.ranks - 1);
#pragma unroll 1
    for (; *item < items; *item += kGatherAhead * kWarps) {
      uint4 v[kGatherAhead];
      int source[kGatherAhead];
      uint32_t round[kGatherAhead], missing = 0;
#pragma unroll
      for (int i = 0; i < kGatherAhead; ++i) {
        const uint32_t now = *item + warp + i * kWarps, other = now / count;
        round[i] = first + now - other * count;
        source[i] = p.rank + 1 + static_cast<int>(other);
        if (source[i] >= p.ranks) source[i] -= p.ranks;
        if (now < items) missing |= 1u << i;
      }
      const uint32_t wanted = missing;
      auto look = [&] {
#pragma unroll
        for (int i = 0; i < kGatherAhead; ++i) {
          if (missing >> i & 1) v[i] = LoadRound(Round(p.rank, source[i], round[i]));
        }
#pragma unroll
        for (int i = 0; i < kGatherAhead; ++i) {
          if (missing >> i & 1 && !__any_sync(0xFFFFFFFFu, Missing(piece, v[i], Lines(round[i]), run.epoch))) {
            missing &= ~(1u << i);
          }
        }
        return missing;
      };
      while (!KeepLooking(look)) {
        int awaited = 0;
        uint32_t last = 0;
#pragma unroll
        for (int i = 0; i < kGatherAhead; ++i) {
          if (missing >> i & 1) awaited = source[i], last = round[i];  // the last one, which usually arrives last
        }
        const char* const at = Round(p.rank, awaited, last);
        const int lines = Lines(last);
        auto absent = [&] { return __ballot_sync(0xFFFFFFFFu, Missing(piece, LoadRound(at), lines, run.epoch)); };
        auto leave = [&] { return *stalled ? false : *stalled = true; };
        if (!AwaitLines(absent, [&](uint32_t) { return awaited; }, leave, run, Step::kRows)) return false;
        missing = wanted;
      }
#pragma unroll
      for (int i = 0; i < kGatherAhead; ++i) {
        if (wanted >> i & 1 && At(round[i]) < bytes) StorePiece(Part(source[i]) + At(round[i]), piece, v[i]);
      }
    }
    return true;
  }
};

__global__ void __launch_bounds__(kThreads, 1) LowLatencyGatherKernel(const __grid_constant__ ExchangeParams p) {
  __shared__ Running run;
  const LowLatencyGather work(p, run);
  AwaitKernelBefore();
  const int block = static_cast<int>(blockIdx.x), warp = static_cast<int>(threadIdx.x / 32);
  if (warp == 0) BeginLowLatency(run, p.call, Operation::kExchange, p.ranks, p.rank);
  bool begun = false;
  auto begin = [&] {  // all threads run it once: the first warp knows the epoch
    if (!begun) {
      __syncthreads();
      begun = true;
      if (!run.refused) StartShare(run.control, block, run.epoch);
    }
    return !run.refused;
  };
  if (warp == 0) begin();  // the first warp knows the epoch already: the other warps need not wait for its rounds
  work.PushShare(block, LateFirstWarp(), kWarps, begin);
  bool good = begin(), stalled = false;
  for (uint32_t item = 0; good;) {
    const bool before = stalled;
    if (work.TakeShare(block, LateFirstWarp(), &stalled, &item)) break;
    good = before != stalled;
    if (good) LowLatencyGather::AdoptShares(p, run);  // then it tries again, with nothing held in registers meanwhile
  }
  FinishLowLatency(run, good, [&](uint32_t index, uint32_t count) {
    FillBytes(p.output, p.output_units * p.unit_bytes, p.poison, index, count);
  });
}

}  // namespace

int LaunchLowLatencyGather(const ExchangeParams& p, cudaStream_t stream) {
  if (Unfit(p) || p.ranks > kRanks) return cudaErrorInvalidValue;
  return LaunchEarly(LowLatencyGatherKernel, ExchangeBlocks(p), 0, stream, p);
}
int PreloadLowLatencyGather() { return LoadKernel(LowLatencyGatherKernel); }

}  // namespace xen_moe::XEN_MOE_VARIANT
