// all_to_all and ragged_all_to_all: contiguous bytes from every rank to every other, through rings in the staging
// areas.
//
// What moves: the message to rank p is cut into chunks; lane j of `lanes` carries chunks j, j + lanes, ... A sending
// block copies a chunk into a ring slot at rank p and raises the chunk's flag; a receiving block at p copies it to the
// output and returns a credit. The ring bounds the symmetric memory, whatever the message. Who waits for whom: a
// receiver for chunks (and, ragged, for the sender's offsets), a sender for the credit of the chunk that used the slot
// before. Senders and receivers are different blocks and all are resident, so both always progress. Memory order: as in
// dispatch.cuh; a credit is released after the block has read the slot.
#include "memory_order.cuh"
#include "params.h"

namespace xen_moe {
namespace {

template <class Vec>
__device__ __forceinline__ void CopyVectors(char* to, const char* from, uint64_t bytes) {
  constexpr int kInFlight = 8;
  const Vec* src = reinterpret_cast<const Vec*>(from);
  Vec* dst = reinterpret_cast<Vec*>(to);
  const uint64_t n = bytes / sizeof(Vec);
  for (uint64_t base = threadIdx.x; base < n; base += kInFlight * kThreads) {
    Vec v[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (base + i * kThreads < n) v[i] = __ldcs(src + base + i * kThreads);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (base + i * kThreads < n) dst[base + i * kThreads] = v[i];
    }
  }
  for (uint64_t b = n * sizeof(Vec) + threadIdx.x; b < bytes; b += kThreads) to[b] = from[b];
}
__device__ __forceinline__ void CopyBytes(char* to, const char* from, uint64_t bytes) {
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
// Each rank's current half.
struct Halves {
  char* flags[kMaxRanks];
  char* data[kMaxRanks];
};
// The lane `lane` from `source` to `target`, as seen by either.
__device__ __forceinline__ Lane LaneOf(const ExchangeParams& p, const Halves& half, int source, int target, int lane) {
  const uint64_t in = static_cast<uint64_t>(source) * p.lanes + lane,
                 out = static_cast<uint64_t>(target) * p.lanes + lane;
  return {reinterpret_cast<uint32_t*>(half.flags[target] + p.chunk_flags) + in * p.max_chunks,
          reinterpret_cast<uint32_t*>(half.flags[source] + p.credit_flags) + out * p.max_chunks,
          half.data[target] + p.ring + in * p.ring_chunks * p.chunk_bytes};
}

// What this rank sends to `target`; a size or offset outside the operand sends nothing.
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

__device__ __forceinline__ void Send(const ExchangeParams& p, const Halves& half, int target, int lane,
                                     const Patience& patience) {
  uint64_t first;
  const Message message = Outgoing(p, target, &first);
  if (threadIdx.x == 0 && lane == 0) {
    reinterpret_cast<Message*>(half.data[target] + p.offsets)[p.rank] = message;
    __threadfence_system();
    StoreRelaxedSystem(reinterpret_cast<uint32_t*>(half.flags[target] + p.presence_flags) + p.rank, patience.epoch);
  }
  const Lane way = LaneOf(p, half, p.rank, target, lane);
  const uint64_t bytes = static_cast<uint64_t>(message.units) * p.unit_bytes;
  const char* from = p.operand + first * p.unit_bytes;
  for (uint64_t n = 0;; ++n) {
    const uint64_t begin = (n * p.lanes + lane) * p.chunk_bytes;
    if (begin >= bytes) break;
    if (n >= static_cast<uint64_t>(p.ring_chunks)) {
      if (threadIdx.x == 0) WaitFlag(way.credit_flags + n - p.ring_chunks, patience, Step::kCredit, target);
      __syncthreads();
    }
    CopyBytes(way.ring + n % p.ring_chunks * p.chunk_bytes, from + begin, min(p.chunk_bytes, bytes - begin));
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence_system();
      StoreRelaxedSystem(way.chunk_flags + n, patience.epoch);
    }
  }
}

__device__ __forceinline__ void Receive(const ExchangeParams& p, const Halves& half, int source, int lane,
                                        const Patience& patience) {
  __shared__ Message message;
  __shared__ bool arrived;
  if (threadIdx.x == 0) {
    const uint32_t* presence = reinterpret_cast<const uint32_t*>(half.flags[p.rank] + p.presence_flags) + source;
    arrived = WaitFlag(presence, patience, Step::kPresence, source);
    message = arrived ? reinterpret_cast<const Message*>(half.data[p.rank] + p.offsets)[source] : Message{0, 0};
  }
  __syncthreads();
  const Lane way = LaneOf(p, half, source, p.rank, lane);
  const uint64_t bytes = static_cast<uint64_t>(message.units) * p.unit_bytes;
  const bool fits = Fits(p, message);
  char* to = p.output + static_cast<int64_t>(message.offset) * static_cast<int64_t>(p.unit_bytes);
  for (uint64_t n = 0; arrived; ++n) {
    const uint64_t begin = (n * p.lanes + lane) * p.chunk_bytes;
    if (begin >= bytes || n >= p.max_chunks) break;
    __syncthreads();
    if (threadIdx.x == 0) arrived = WaitFlag(way.chunk_flags + n, patience, Step::kRows, source);
    __syncthreads();
    if (!arrived) break;
    if (fits) CopyBytes(to + begin, way.ring + n % p.ring_chunks * p.chunk_bytes, min(p.chunk_bytes, bytes - begin));
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence_system();
      StoreRelaxedSystem(way.credit_flags + n, patience.epoch);
    }
  }
}

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

// Blocks: [sending, receiving] x lanes x ranks; the receiving blocks of the own rank copy the own part.
__global__ void __launch_bounds__(kThreads, 1) ExchangeKernel(const __grid_constant__ ExchangeParams p) {
  __shared__ Halves half;
  const uint32_t epoch = *static_cast<volatile uint32_t*>(&p.control->epoch) + 1;
  if (threadIdx.x < p.ranks) {
    const uint64_t half_bytes = p.control->half_bytes;
    half.flags[threadIdx.x] = p.control->staging[threadIdx.x] + (epoch & 1) * half_bytes;
    half.data[threadIdx.x] = half.flags[threadIdx.x] + half_bytes - p.data_bytes;
  }
  __syncthreads();
  const Patience patience{p.control, p.timeout_ns, epoch, Operation::kExchange};
  if (!HasMemory(patience, p.flag_bytes, p.data_bytes, p.rank)) return FinishOperation(p.control, epoch);
  const int pairs = p.ranks * p.lanes;
  const bool sending = blockIdx.x < pairs;
  const int index = blockIdx.x % pairs;
  const int peer = (index % p.ranks + p.rank + 1) % p.ranks, lane = index / p.ranks;
  if (peer == p.rank) {
    if (!sending) CopyOwn(p, lane);
  } else if (sending) {
    Send(p, half, peer, lane, patience);
  } else {
    Receive(p, half, peer, lane, patience);
  }
  FinishOperation(p.control, epoch);
}

}  // namespace

int LaunchExchange(const ExchangeParams& p, cudaStream_t stream) {
  ExchangeKernel<<<2 * p.ranks * p.lanes, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}
int PreloadExchange() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, ExchangeKernel);
}

}  // namespace xen_moe
