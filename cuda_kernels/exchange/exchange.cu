// all_to_all and ragged_all_to_all: contiguous bytes from every rank to every other, through rings in the staging
// areas. And move_weights: units of every rank to the ranks that a table names, where the message to a rank consists of
// the units for it, one after another.
//
// What moves: the message to rank p is divided into chunks; lane j of `lanes` carries chunks j, j + lanes, ... Who does
// it: one half of a block copies chunks into ring slots at rank p and raises their flags; the other half copies the
// chunks that p has sent on the same lane to the output and returns credits. The ring bounds the symmetric memory,
// whatever the message size. Who waits for whom: a receiver waits for chunks (and, ragged, for the sender's offsets), a
// sender for the credit of the chunk that used the slot before. In round k, rank r is paired with rank (k - r) mod R;
// blocks claim (round, lane) in ascending order. So every wait ends, with any number of resident blocks: the smallest
// unfinished pair of a lane has been claimed by a running block on both its ranks, and either half of the block waits
// only for the other rank's. Memory order: as in dispatch.cuh; a credit is released after the half block has read the
// slot. After a failed wait nothing more is stored at a peer.
#include "cuda_kernels/core/claims.cuh"
#include "cuda_kernels/core/launch.cuh"
#include "cuda_kernels/core/operation.cuh"

namespace xen_moe::XEN_MOE_VARIANT {
namespace {

constexpr int kHalfThreads = kThreads;
constexpr int kBlockThreads = 2 * kHalfThreads;  // the first half sends, the second receives

// A barrier of the threads of this half of the block.
__device__ __forceinline__ void SyncHalf() {
  if (threadIdx.x < kHalfThreads) {
    asm volatile("bar.sync 1, %0;" ::"n"(kHalfThreads) : "memory");
  } else {
    asm volatile("bar.sync 2, %0;" ::"n"(kHalfThreads) : "memory");
  }
}
__device__ __forceinline__ bool Leads() { return threadIdx.x % kHalfThreads == 0; }

template <class Vec>
__device__ __forceinline__ void CopyVectors(char* to, const char* from, uint64_t bytes) {
  constexpr int kInFlight = 4;
  const Vec* src = reinterpret_cast<const Vec*>(from);
  Vec* dst = reinterpret_cast<Vec*>(to);
  const uint64_t n = bytes / sizeof(Vec);
  for (uint64_t base = threadIdx.x % kHalfThreads; base < n; base += kInFlight * kHalfThreads) {
    Vec v[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (base + i * kHalfThreads < n) v[i] = __ldcs(src + base + i * kHalfThreads);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (base + i * kHalfThreads < n) dst[base + i * kHalfThreads] = v[i];
    }
  }
  for (uint64_t b = n * sizeof(Vec) + threadIdx.x % kHalfThreads; b < bytes; b += kHalfThreads) to[b] = from[b];
}
__device__ __noinline__ void CopyBytes(char* to, const char* from, uint64_t bytes) {
  const uint64_t both = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from);
  if (both % 16 == 0) {
    CopyVectors<int4>(to, from, bytes);
  } else if (both % 4 == 0) {
    CopyVectors<unsigned int>(to, from, bytes);
  } else {
    CopyVectors<unsigned char>(to, from, bytes);
  }
}

struct Message {
  int offset;  // units into the receiver's output
  int units;
};

struct Lane {
  uint32_t* chunk_flags;   // at the receiver
  uint32_t* credit_flags;  // at the sender
  char* ring;              // at the receiver
};
// Returns lane `lane` from `source` to `target`; both ranks compute the same.
__device__ __forceinline__ Lane LaneOf(const ExchangeParams& p, const Running& run, int source, int target, int lane) {
  const uint64_t in = static_cast<uint64_t>(source) * p.lanes + lane,
                 out = static_cast<uint64_t>(target) * p.lanes + lane;
  return {reinterpret_cast<uint32_t*>(run.half[target] + p.chunk_flags) + in * p.max_chunks,
          reinterpret_cast<uint32_t*>(run.half[source] + p.credit_flags) + out * p.max_chunks,
          run.data[target] + p.ring + in * p.ring_chunks * p.chunk_bytes};
}

// Returns what this rank sends to `target`; with a size or offset outside the operand it sends nothing.
__device__ __forceinline__ Message Outgoing(const ExchangeParams& p, int target, uint64_t* first) {
  if (!p.send_sizes) {
    const int units = static_cast<int>(p.operand_units / p.ranks);
    *first = static_cast<uint64_t>(target) * units;
    return {p.rank * units, units};
  }
  const int64_t begin = p.input_offsets[target], units = p.send_sizes[target];
  *first = static_cast<uint64_t>(begin);
  const bool inside = begin >= 0 && units >= 0 && begin + units <= static_cast<int64_t>(p.operand_units);
  return {p.output_offsets[target], inside ? static_cast<int>(units) : 0};
}
__device__ __forceinline__ bool Fits(const ExchangeParams& p, const Message& m) {
  return m.offset >= 0 && static_cast<int64_t>(m.offset) + m.units <= static_cast<int64_t>(p.output_units);
}

__device__ __forceinline__ uint32_t* MessageFlag(const ExchangeParams& p, const Running& run, int source, int target) {
  return reinterpret_cast<uint32_t*>(run.half[target] + p.message_flags) + source;
}

// Where a chunk lies at its sender or at its receiver.
struct Chunk {
  uint64_t at;  // the first byte in the operand (at the sender) or in the output (at the receiver)
  uint64_t bytes;
};

// The chunks that one lane carries of `bytes` contiguous bytes from byte `first` on.
struct ContiguousChunks {
  uint64_t first, bytes, chunk_bytes, lanes, lane;
  uint64_t count;
  __device__ __forceinline__ ContiguousChunks(const ExchangeParams& p, uint64_t first, uint64_t bytes, int lane)
      : first(first), bytes(bytes), chunk_bytes(p.chunk_bytes), lanes(p.lanes), lane(lane) {
    const uint64_t all = (bytes + chunk_bytes - 1) / chunk_bytes;
    count = min(all > this->lane ? (all - this->lane + lanes - 1) / lanes : 0, p.max_chunks);
  }
  __device__ __forceinline__ Chunk operator()(uint64_t n) {
    const uint64_t begin = (n * lanes + lane) * chunk_bytes;
    return {first + begin, min(chunk_bytes, bytes - begin)};
  }
};

// The chunks that one lane carries of the units that `target` gets from `source`, one unit after another. The caller
// asks for them in ascending order. kSending: the chunks' places in the operand; otherwise those in the output.
template <bool kSending>
struct UnitChunks {
  const ExchangeParams& p;
  const int* sources;  // of the target's units
  uint64_t per_unit, count;
  int source, lane, unit = -1;
  int64_t number = -1;  // of `unit` among the source's
  __device__ __forceinline__ UnitChunks(const ExchangeParams& params, int from, int target, int carrier)
      : p(params), sources(params.sources + target * params.output_units), source(from), lane(carrier) {
    per_unit = (p.unit_bytes + p.chunk_bytes - 1) / p.chunk_bytes;
    uint64_t units = 0;
    for (int i = 0; i < static_cast<int>(p.output_units); ++i) units += Comes(i);
    const uint64_t all = units * per_unit, first = static_cast<uint64_t>(lane);
    count = min(all > first ? (all - first + p.lanes - 1) / p.lanes : 0, p.max_chunks);
  }
  __device__ __forceinline__ bool Comes(int i) const {
    return sources[i] >= 0 && sources[i] / static_cast<int>(p.operand_units) == source;
  }
  __device__ __forceinline__ Chunk operator()(uint64_t n) {
    const uint64_t piece = n * p.lanes + lane;
    while (number < static_cast<int64_t>(piece / per_unit)) {
      ++unit;
      number += Comes(unit);
    }
    const uint64_t begin = piece % per_unit * p.chunk_bytes;
    const uint64_t row = kSending ? sources[unit] % static_cast<int>(p.operand_units) : unit;
    return {row * p.unit_bytes + begin, min(p.chunk_bytes, p.unit_bytes - begin)};
  }
};

// Sends one lane to `target`. Returns false if the group has failed.
template <class Chunks>
__device__ __forceinline__ bool SendChunks(const ExchangeParams& p, const Running& run, int target, int lane,
                                           Chunks chunks) {
  const uint32_t epoch = run.epoch;
  __shared__ bool free_slot;
  const Lane way = LaneOf(p, run, p.rank, target, lane);
  for (uint64_t n = 0; n < chunks.count; ++n) {
    if (n >= static_cast<uint64_t>(p.ring_chunks)) {
      if (Leads()) free_slot = WaitFlag(way.credit_flags + n - p.ring_chunks, run, epoch, Step::kCredit, target);
      SyncHalf();
      if (!free_slot) return false;
    }
    const Chunk chunk = chunks(n);
    CopyBytes(way.ring + n % p.ring_chunks * p.chunk_bytes, p.operand + chunk.at, chunk.bytes);
    SyncHalf();
    if (Leads()) {
      __threadfence_system();
      StoreRelaxedSystem(way.chunk_flags + n, epoch);
    }
  }
  return true;
}
__device__ __forceinline__ bool Send(const ExchangeParams& p, const Running& run, int target, int lane) {
  if (p.sources) return SendChunks(p, run, target, lane, UnitChunks<true>(p, p.rank, target, lane));
  uint64_t first;
  const Message message = Outgoing(p, target, &first);
  if (p.send_sizes && Leads() && lane == 0) {
    reinterpret_cast<Message*>(run.data[target] + p.offsets)[p.rank] = message;
    __threadfence_system();
    StoreRelaxedSystem(MessageFlag(p, run, p.rank, target), run.epoch);
  }
  const uint64_t bytes = static_cast<uint64_t>(message.units) * p.unit_bytes;
  return SendChunks(p, run, target, lane, ContiguousChunks(p, first * p.unit_bytes, bytes, lane));
}

// Receives one lane from `source`. Without `fits` the chunks are awaited and dropped. Returns false if the group has
// failed.
template <class Chunks>
__device__ __forceinline__ bool ReceiveChunks(const ExchangeParams& p, const Running& run, int source, int lane,
                                              bool fits, Chunks chunks) {
  __shared__ bool arrived;
  const uint32_t epoch = run.epoch;
  const Lane way = LaneOf(p, run, source, p.rank, lane);
  for (uint64_t n = 0; n < chunks.count; ++n) {
    SyncHalf();
    if (Leads()) arrived = WaitFlag(way.chunk_flags + n, run, epoch, Step::kRows, source);
    SyncHalf();
    if (!arrived) return false;
    const Chunk chunk = chunks(n);
    if (fits) CopyBytes(p.output + chunk.at, way.ring + n % p.ring_chunks * p.chunk_bytes, chunk.bytes);
    SyncHalf();
    // Only credits that the sender awaits: any other might arrive when the sender is two operations ahead
    // (workspace.h).
    if (Leads() && n + p.ring_chunks < chunks.count) {
      __threadfence_system();
      StoreRelaxedSystem(way.credit_flags + n, epoch);
    }
  }
  return true;
}
__device__ __forceinline__ bool Receive(const ExchangeParams& p, const Running& run, int source, int lane) {
  __shared__ Message message;
  __shared__ bool arrived;
  const uint32_t epoch = run.epoch;
  if (p.sources) return ReceiveChunks(p, run, source, lane, true, UnitChunks<false>(p, source, p.rank, lane));
  if (Leads()) {
    arrived = true;
    if (p.send_sizes) {
      arrived = WaitFlag(MessageFlag(p, run, source, p.rank), run, epoch, Step::kMetadata, source);
      const uint32_t* from = reinterpret_cast<const uint32_t*>(run.data[p.rank] + p.offsets) + 2 * source;
      message = {0, 0};
      if (arrived) message = {static_cast<int>(LoadRelaxedSystem(from)), static_cast<int>(LoadRelaxedSystem(from + 1))};
    } else {
      const int units = static_cast<int>(p.operand_units / p.ranks);
      message = {source * units, units};
    }
  }
  SyncHalf();
  if (!arrived) return false;
  const uint64_t bytes = static_cast<uint64_t>(max(0, message.units)) * p.unit_bytes;
  const uint64_t to = static_cast<uint64_t>(message.offset) * p.unit_bytes;
  return ReceiveChunks(p, run, source, lane, Fits(p, message), ContiguousChunks(p, to, bytes, lane));
}

// Copies one lane of the units that this rank gets from itself, and fills the units that it gets from no rank. The
// halves of the block take chunks in turn.
__device__ __forceinline__ void CopyOwnUnits(const ExchangeParams& p, int lane) {
  UnitChunks<true> from(p, p.rank, p.rank, lane);
  UnitChunks<false> to(p, p.rank, p.rank, lane);
  for (uint64_t n = threadIdx.x / kHalfThreads; n < from.count; n += 2) {
    const Chunk chunk = from(n);
    CopyBytes(p.output + to(n).at, p.operand + chunk.at, chunk.bytes);
  }
  for (uint64_t unit = 0; unit < p.output_units; ++unit) {
    const int source = p.sources[p.rank * p.output_units + unit];
    if (source != -1 && source != -2) continue;
    FillBytes(p.output + unit * p.unit_bytes, p.unit_bytes, source == -1 ? 0 : p.lost, lane, p.lanes);
  }
}

// Copies this rank's own message; the receiving half does it.
__device__ __forceinline__ void CopyOwn(const ExchangeParams& p, int lane) {
  uint64_t first;
  const Message message = Outgoing(p, p.rank, &first);
  if (!Fits(p, message)) return;
  const uint64_t bytes = static_cast<uint64_t>(message.units) * p.unit_bytes;
  for (uint64_t begin = lane * p.chunk_bytes; begin < bytes; begin += p.lanes * p.chunk_bytes) {
    CopyBytes(p.output + static_cast<uint64_t>(message.offset) * p.unit_bytes + begin,
              p.operand + first * p.unit_bytes + begin, min(p.chunk_bytes, bytes - begin));
  }
}

__global__ void __launch_bounds__(kBlockThreads, 1) ExchangeKernel(const __grid_constant__ ExchangeParams p) {
  __shared__ Running run;
  BeginOperation(run, p.call, Operation::kExchange, p.ranks, p.rank);
  if (!run.refused) {
    const int pairs = p.ranks * p.lanes;
    for (;;) {
      const int claimed = BlockClaim(&run.control->claimed[static_cast<int>(Work::kPush)], 1);
      if (claimed >= pairs) break;
      const int round = claimed / p.lanes, lane = claimed % p.lanes;
      const int peer = (round - p.rank + p.ranks) % p.ranks;
      const bool sending = threadIdx.x < kHalfThreads;
      bool going = true;
      if (peer == p.rank && p.sources) {
        CopyOwnUnits(p, lane);
      } else if (peer == p.rank) {
        if (!sending) CopyOwn(p, lane);
      } else if (!Holds(run.active, peer)) {  // only where weights move by a table, which names active ranks alone
      } else if (sending) {
        going = Send(p, run, peer, lane);
      } else {
        going = Receive(p, run, peer, lane);
      }
      if (!__syncthreads_and(going)) break;
    }
  }
  FinishOperation(run, [&](uint32_t index, uint32_t count) {
    FillBytes(p.output, p.output_units * p.unit_bytes, p.poison, index, count);
  });
}

}  // namespace

int LaunchRingExchange(const ExchangeParams& p, cudaStream_t stream) {
  if (Unfit(p) || p.ranks > kRanks) return cudaErrorInvalidValue;
  ExchangeKernel<<<ExchangeBlocks(p), kBlockThreads, 0, stream>>>(p);
  return cudaGetLastError();
}
int PreloadRingExchange() { return LoadKernel(ExchangeKernel); }

}  // namespace xen_moe::XEN_MOE_VARIANT
