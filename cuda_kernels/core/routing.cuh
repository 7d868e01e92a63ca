// Questions about the routing arrays: which ranks a token goes to, and where a source's arrays lie.
#pragma once

#include "cuda_kernels/core/params.h"
#include "cuda_kernels/core/rank_mask.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

// Returns the ranks of `active` that own an expert of the token, to all lanes of the warp. Entries outside [0, E) are
// ignored.
__device__ __forceinline__ RankMask RanksOf(const int* topk_idx, int token, const Routing& r, const RankMask& active) {
  RankMask ranks = NoRanks();
#pragma unroll 1
  for (int k = threadIdx.x & 31; k < r.top_k; k += 32) {
    const int expert = topk_idx[static_cast<int64_t>(token) * r.top_k + k];
    if (expert >= 0 && expert < r.experts) ranks |= OneRank(expert / r.local_experts);
  }
  return Union(ranks, r.ranks) & active;
}

// Returns the [T, K] array of source `s`: this rank's own array is the operand, those of other ranks lie at `offset` in
// the staging area.
template <class T>
__device__ __forceinline__ const T* OfSource(const T* own, const char* data, uint64_t offset, const Routing& r, int s) {
  if (s == r.rank) return own;
  return reinterpret_cast<const T*>(data + offset) + static_cast<int64_t>(s) * r.tokens * r.top_k;
}

// Maps an item number to a pair of another rank and a token: token by token, and for each token all other ranks,
// beginning with the next one.
__device__ __forceinline__ void PairOfOthers(const Routing& r, int pair, int* source, int* token) {
  *token = pair / (r.ranks - 1);
  *source = r.rank + 1 + pair % (r.ranks - 1);
  if (*source >= r.ranks) *source -= r.ranks;
}

// Returns the local number of a global expert, or -1 if another rank owns it.
__device__ __forceinline__ int LocalExpert(int expert, const Routing& r) {
  const int local = expert - r.rank * r.local_experts;
  return expert >= 0 && expert < r.experts && local >= 0 && local < r.local_experts ? local : -1;
}

}  // namespace xen_moe::XEN_MOE_VARIANT
