// Combine in one launch.
//
// What moves: on the expert rank, the rows of (source, token) are added in slot order in float32 (times their weights),
// rounded to the wire, and pushed to the token's rank, staging row [this rank][token]; there the partial rows are added
// in ascending rank order and rounded to the output. This rank's own partial is added up in place and never staged. Who
// does it: the first `push_blocks` blocks reduce and push, the others sum what has arrived; a block whose pushing is
// done joins the summing. Who waits for whom: reducing waits for nobody; summing waits for a flag per (expert rank,
// token, part). Every rank in a token's topk_idx sends one partial row, also when all its rows were dropped, so the
// flags to wait for follow from topk_idx. Memory order: as in dispatch.cuh. Multiply and add are rounded separately:
// __fmul_rn, __fadd_rn.
#pragma once

#include "memory_order.cuh"
#include "octet.cuh"
#include "params.h"

namespace xen_moe {

struct CombineShared {
  char* half[kMaxRanks];             // the current half of each rank's staging area: its flags
  char* data[kMaxRanks];             // and its data
  int rows[kWarps][kMaxSlots];       // rows of y to add, in slot order
  float weights[kWarps][kMaxSlots];  // their weights
};

// The rows of one (source, token) that this rank holds. `belongs`: the token names this rank at all.
struct TokenRows {
  int count;
  bool belongs;
};

__device__ __forceinline__ TokenRows GatherRows(const CombineParams& p, CombineShared& shared, int source, int token) {
  const Routing& r = p.routing;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const int* positions = p.positions + (static_cast<int64_t>(source) * r.tokens + token) * r.slots;
  TokenRows out{0, false};
  __syncwarp();
  for (int base = 0; base < r.slots; base += 32) {
    const int slot = base + lane;
    const int position = slot < r.slots ? positions[slot] : -1;
    const bool real = position >= 0 && position < r.capacity;
    const uint32_t placed = __ballot_sync(0xFFFFFFFFu, real);
    if (real) {
      const int at = out.count + __popc(placed & ((1u << lane) - 1));
      shared.rows[warp][at] = position;
      shared.weights[warp][at] = p.weights ? p.weights[position] : 1.0f;
    }
    out.count += __popc(placed);
    out.belongs |= __any_sync(0xFFFFFFFFu, position != -1);
  }
  __syncwarp();
  return out;
}

template <class Y>
__device__ __forceinline__ void AddRow(Octet& acc, const RawOctet<Y>& raw, float weight, bool weighted) {
  const Octet y = Widen(raw);
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    acc.v[i] = __fadd_rn(acc.v[i], weighted ? __fmul_rn(weight, y.v[i]) : y.v[i]);
  }
}
__device__ __forceinline__ void Add(Octet& acc, const Octet& other) {
#pragma unroll
  for (int i = 0; i < kOctet; ++i) acc.v[i] = __fadd_rn(acc.v[i], other.v[i]);
}
template <int kSteps>
__device__ __forceinline__ void Clear(Octet (&acc)[kSteps]) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) acc[s] = Octet{};
}

// acc = sum over the gathered rows of weight * y, `kSteps` warp steps from element `base`. kPairs: two rows' loads are
// in flight, at the price of registers.
template <class Y, int kSteps, bool kPairs>
__device__ __forceinline__ void ReduceRows(const CombineParams& p, const CombineShared& shared, int count, int base,
                                           int end, bool vector, Octet (&acc)[kSteps]) {
  const int warp = threadIdx.x / 32, e = base + (threadIdx.x & 31) * kOctet;
  const bool weighted = p.weights != nullptr;
  const Y* y = static_cast<const Y*>(p.y);
  Clear(acc);
  auto load = [&](int i, RawOctet<Y>(&raw)[kSteps]) {
    const Y* row = y + static_cast<int64_t>(shared.rows[warp][i]) * p.routing.hidden;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) raw[s] = LoadOctet(row, e + s * kWarpElements, end, vector);
  };
  auto add = [&](int i, const RawOctet<Y>(&raw)[kSteps]) {
    const float weight = shared.weights[warp][i];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) AddRow(acc[s], raw[s], weight, weighted);
  };
  RawOctet<Y> first[kSteps];
  if constexpr (kPairs) {
    RawOctet<Y> second[kSteps];
    for (int i = 0; i < count; i += 2) {
      const bool two = i + 1 < count;
      load(i, first);
      if (two) load(i + 1, second);
      add(i, first);
      if (two) add(i + 1, second);
    }
  } else {
    for (int i = 0; i < count; ++i) {
      load(i, first);
      add(i, first);
    }
  }
}

// What the wire makes of a partial row, without the wire.
template <class Y, WireType kWire>
__device__ __forceinline__ Octet RoundToWire(const Octet& partial, bool ue8m0) {
  if constexpr (kWire == WireType::kNative) {
    return Widen(Narrow<Y>(partial));
  } else {
    return Dequantize<kWire>(Quantize<kWire>(partial, ue8m0));
  }
}

__device__ __forceinline__ uint32_t* PartialFlag(char* half, const CombineParams& p, int source, int token, int part) {
  const int64_t index = (static_cast<int64_t>(source) * p.routing.tokens + token) * p.schedule.parts + part;
  return reinterpret_cast<uint32_t*>(half + p.staging.row_flags) + index;
}

template <class Y, WireType kWire, int kSteps>
__device__ __forceinline__ void PushPartials(const CombineParams& p, CombineShared& shared, bool vector,
                                             uint32_t epoch) {
  const Routing& r = p.routing;
  const int lane = threadIdx.x & 31;
  const int items = (r.ranks - 1) * r.tokens * p.schedule.parts;
  auto claim = [&] { return lane == 0 ? static_cast<int>(atomicAdd(&p.control->work[0], 1u)) : 0; };
  int next = claim();
  for (;;) {
    const int item = __shfl_sync(0xFFFFFFFFu, next, 0);
    if (item >= items) break;
    next = claim();
    const int pair = item / p.schedule.parts, part = item % p.schedule.parts;
    const int token = pair / (r.ranks - 1);
    int source = r.rank + 1 + pair % (r.ranks - 1);
    if (source >= r.ranks) source -= r.ranks;
    const TokenRows rows = GatherRows(p, shared, source, token);
    if (!rows.belongs) continue;
    char* wire =
        shared.data[source] + p.staging.rows + (static_cast<uint64_t>(r.rank) * r.tokens + token) * p.staging.row_bytes;
    const int begin = min(r.hidden, part * p.schedule.part_elements);
    const int end = min(r.hidden, begin + p.schedule.part_elements);
    for (int base = begin; base < end; base += kSteps * kWarpElements) {
      Octet acc[kSteps];
      ReduceRows<Y, kSteps, true>(p, shared, rows.count, base, end, vector, acc);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int e = base + s * kWarpElements + lane * kOctet;
        if constexpr (kWire == WireType::kNative) {
          StoreOctet(reinterpret_cast<Y*>(wire), e, end, vector, Narrow<Y>(acc[s]));
        } else {
          StoreQuantized(wire, p.staging.scale_offset, e, end, Quantize<kWire>(acc[s], p.ue8m0));
        }
      }
    }
    __syncwarp();
    if (lane == 0) {
      __threadfence_system();
      StoreRelaxedSystem(PartialFlag(shared.half[source], p, r.rank, token, part), epoch);
    }
  }
}

template <class Y, WireType kWire, int kSteps>
__device__ __forceinline__ void LoadPartial(const CombineParams& p, const char* wire, int base, int end, bool vector,
                                            Octet (&partial)[kSteps]) {
  const int e = base + (threadIdx.x & 31) * kOctet;
  if constexpr (kWire == WireType::kNative) {
    RawOctet<Y> raw[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      raw[s] = LoadOctet(reinterpret_cast<const Y*>(wire), e + s * kWarpElements, end, vector);
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) partial[s] = Widen(raw[s]);
  } else {
    QuantizedOctet q[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) q[s] = LoadQuantized(wire, p.staging.scale_offset, e + s * kWarpElements, end);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) partial[s] = Dequantize<kWire>(q[s]);
  }
}

// kNodes: partial rows are added inside each node first, rounded to the wire, then over the nodes.
template <class Y, WireType kWire, int kSteps, bool kNodes>
__device__ __forceinline__ void SumPartials(const CombineParams& p, CombineShared& shared, bool vector,
                                            const Patience& patience) {
  const Routing& r = p.routing;
  const int lane = threadIdx.x & 31;
  const int items = r.tokens * p.schedule.parts;
  char* half = shared.half[r.rank];
  auto claim = [&] { return lane == 0 ? static_cast<int>(atomicAdd(&p.control->work[1], 1u)) : 0; };
  int next = claim();
  for (;;) {
    const int item = __shfl_sync(0xFFFFFFFFu, next, 0);
    if (item >= items) break;
    next = claim();
    const int token = item / p.schedule.parts, part = item % p.schedule.parts;
    uint32_t ranks = 0;
    for (int k = lane; k < r.top_k; k += 32) {
      const int expert = p.topk_idx[static_cast<int64_t>(token) * r.top_k + k];
      if (expert >= 0 && expert < r.experts) ranks |= 1u << (expert / r.local_experts);
    }
    ranks = __reduce_or_sync(0xFFFFFFFFu, ranks);
    const TokenRows own = GatherRows(p, shared, r.rank, token);
    bool arrived = true;
    if ((ranks >> lane & 1) && lane != r.rank) {
      arrived = WaitFlag(PartialFlag(half, p, lane, token, part), patience, Step::kRows, lane);
    }
    if (!__all_sync(0xFFFFFFFFu, arrived)) continue;
    const int begin = min(r.hidden, part * p.schedule.part_elements);
    const int end = min(r.hidden, begin + p.schedule.part_elements);
    Y* out = static_cast<Y*>(p.out) + static_cast<int64_t>(token) * r.hidden;
    for (int base = begin; base < end; base += kSteps * kWarpElements) {
      Octet total[kSteps], nodes[kNodes ? kSteps : 1];
      Clear(total);
      if constexpr (kNodes) Clear(nodes);
      int node = 0;
      auto close_node = [&] {
        if constexpr (kNodes) {
#pragma unroll
          for (int s = 0; s < kSteps; ++s) Add(nodes[s], RoundToWire<Y, kWire>(total[s], p.ue8m0));
          Clear(total);
        }
      };
      for (uint32_t m = ranks; m; m &= m - 1) {
        const int rank = __ffs(m) - 1;
        if constexpr (kNodes) {
          if (rank / r.ranks_per_node != node) {
            close_node();
            node = rank / r.ranks_per_node;
          }
        }
        Octet partial[kSteps];
        if (rank == r.rank) {
          ReduceRows<Y, kSteps, false>(p, shared, own.count, base, end, vector, partial);
#pragma unroll
          for (int s = 0; s < kSteps; ++s) partial[s] = RoundToWire<Y, kWire>(partial[s], p.ue8m0);
        } else {
          const char* wire = shared.data[r.rank] + p.staging.rows +
                             (static_cast<uint64_t>(rank) * r.tokens + token) * p.staging.row_bytes;
          LoadPartial<Y, kWire, kSteps>(p, wire, base, end, vector, partial);
        }
#pragma unroll
        for (int s = 0; s < kSteps; ++s) Add(total[s], partial[s]);
      }
      close_node();
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int e = base + s * kWarpElements + lane * kOctet;
        StoreOctet(out, e, end, vector, Narrow<Y>(kNodes ? nodes[kNodes ? s : 0] : total[s]));
      }
    }
  }
}

template <class Y, WireType kWire, bool kNodes>
__global__ void __launch_bounds__(kThreads, 1) CombineKernel(const __grid_constant__ CombineParams p) {
  constexpr int kSteps = kNodes || sizeof(Y) == 4 ? 2 : 4;
  __shared__ CombineShared shared;
  const Routing& r = p.routing;
  const uint32_t epoch = *static_cast<volatile uint32_t*>(&p.control->epoch) + 1;
  if (threadIdx.x < r.ranks) {
    const uint64_t half_bytes = p.control->half_bytes;
    shared.half[threadIdx.x] = p.control->staging[threadIdx.x] + (epoch & 1) * half_bytes;
    shared.data[threadIdx.x] = shared.half[threadIdx.x] + half_bytes - p.staging.data_bytes;
  }
  __syncthreads();
  const Patience patience{p.control, p.schedule.timeout_ns, epoch, Operation::kCombine};
  if (!HasMemory(patience, p.staging.flag_bytes, p.staging.data_bytes, r.rank))
    return FinishOperation(p.control, epoch);
  const bool vector = r.hidden % kOctet == 0;
  uint32_t* presence =
      reinterpret_cast<uint32_t*>(shared.half[threadIdx.x < r.ranks ? threadIdx.x : r.rank] + p.staging.presence_flags);
  const bool peer = threadIdx.x < r.ranks && threadIdx.x != r.rank;
  if (blockIdx.x == 0 && peer) StoreRelaxedSystem(presence + r.rank * kMaxBlocks, epoch);
  if (blockIdx.x < p.schedule.push_blocks) PushPartials<Y, kWire, kSteps>(p, shared, vector, epoch);
  SumPartials<Y, kWire, kSteps, kNodes>(p, shared, vector, patience);
  if (blockIdx.x == gridDim.x - 1 && peer) {
    const uint32_t* mine = reinterpret_cast<const uint32_t*>(shared.half[r.rank] + p.staging.presence_flags);
    WaitFlag(mine + threadIdx.x * kMaxBlocks, patience, Step::kPresence, threadIdx.x);
  }
  FinishOperation(p.control, epoch);
}

template <class Y, WireType kWire>
int LaunchCombineWire(const CombineParams& p, cudaStream_t stream) {
  if (p.routing.ranks_per_node == p.routing.ranks) {
    CombineKernel<Y, kWire, false><<<p.schedule.blocks, kThreads, 0, stream>>>(p);
  } else {
    CombineKernel<Y, kWire, true><<<p.schedule.blocks, kThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}
template <class Y>
int LaunchCombineOf(const CombineParams& p, cudaStream_t stream) {
  switch (p.wire) {
    case WireType::kNative:
      return LaunchCombineWire<Y, WireType::kNative>(p, stream);
    case WireType::kFp8:
      return LaunchCombineWire<Y, WireType::kFp8>(p, stream);
    default:
      return LaunchCombineWire<Y, WireType::kInt8>(p, stream);
  }
}
template <class Y, WireType kWire>
int PreloadCombineWire() {
  cudaFuncAttributes attributes;
  if (int e = cudaFuncGetAttributes(&attributes, CombineKernel<Y, kWire, false>)) return e;
  return cudaFuncGetAttributes(&attributes, CombineKernel<Y, kWire, true>);
}
template <class Y>
int PreloadCombineOf() {
  if (int e = PreloadCombineWire<Y, WireType::kNative>()) return e;
  if (int e = PreloadCombineWire<Y, WireType::kFp8>()) return e;
  return PreloadCombineWire<Y, WireType::kInt8>();
}

}  // namespace xen_moe
