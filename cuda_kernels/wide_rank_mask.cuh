// What rank_mask.cuh has, for groups of up to kMaxRanks ranks: the first include of a translation unit that wants it.
#pragma once

#ifdef XEN_MOE_KERNELS
#error "wide_rank_mask.cuh comes before every other header of the kernels"
#endif
#ifdef XEN_MOE_RINGS  // by rings_rank_mask.cuh
#define XEN_MOE_KERNELS xen_moe::rings
#else
#define XEN_MOE_KERNELS xen_moe::wide
#endif

#include "memory_order.cuh"
#include "workspace.h"

namespace XEN_MOE_KERNELS {

constexpr bool kWide = true;
#ifdef XEN_MOE_RINGS
constexpr bool kRings = true;
#else
constexpr bool kRings = false;
#endif
constexpr int kRanks = kMaxRanks;
using RankIndex = uint8_t;

struct RankMask {
  uint32_t word[kRankWords];
};
template <class F>
__device__ __forceinline__ RankMask ByWord(F f) {
  RankMask out;
#pragma unroll
  for (int w = 0; w < kRankWords; ++w) out.word[w] = f(w);
  return out;
}
__device__ __forceinline__ RankMask operator&(const RankMask& a, const RankMask& b) {
  return ByWord([&](int w) { return a.word[w] & b.word[w]; });
}
__device__ __forceinline__ RankMask operator|(const RankMask& a, const RankMask& b) {
  return ByWord([&](int w) { return a.word[w] | b.word[w]; });
}
__device__ __forceinline__ RankMask operator~(const RankMask& a) {
  return ByWord([&](int w) { return ~a.word[w]; });
}
__device__ __forceinline__ RankMask& operator|=(RankMask& a, const RankMask& b) { return a = a | b; }

__device__ __forceinline__ RankMask NoRanks() {
  return ByWord([](int) { return 0u; });
}
__device__ __forceinline__ RankMask EveryRank() { return ~NoRanks(); }
__device__ __forceinline__ RankMask RanksBelow(int rank) {
  return ByWord([&](int w) {
    const int bits = rank - w * 32;
    return bits <= 0 ? 0u : bits >= 32 ? ~0u : (1u << bits) - 1;
  });
}
__device__ __forceinline__ RankMask AllRanks(int ranks) { return RanksBelow(ranks); }
__device__ __forceinline__ RankMask RanksFrom(int first, int count) {
  return RanksBelow(first + count) & ~RanksBelow(first);
}
__device__ __forceinline__ RankMask OneRank(int rank) { return RanksFrom(rank, 1); }
__device__ __forceinline__ RankMask RanksAbove(int rank) { return ~RanksBelow(rank + 1); }
__device__ __forceinline__ bool Holds(const RankMask& ranks, int rank) {
  return ranks.word[rank / 32] >> (rank % 32) & 1;
}
__device__ __forceinline__ uint32_t FirstWord(const RankMask& ranks) { return ranks.word[0]; }
__device__ __forceinline__ bool Any(const RankMask& ranks) {
  uint32_t all = 0;
#pragma unroll
  for (int w = 0; w < kRankWords; ++w) all |= ranks.word[w];
  return all != 0;
}
__device__ __forceinline__ int CountRanks(const RankMask& ranks) {
  int count = 0;
#pragma unroll
  for (int w = 0; w < kRankWords; ++w) count += __popc(ranks.word[w]);
  return count;
}
__device__ __forceinline__ int FirstRank(const RankMask& ranks) {
  int first = -1;
#pragma unroll
  for (int w = kRankWords - 1; w >= 0; --w) {
    if (ranks.word[w]) first = w * 32 + __ffs(ranks.word[w]) - 1;
  }
  return first;
}
__device__ __forceinline__ void DropFirst(RankMask& ranks) {
  bool dropped = false;
#pragma unroll
  for (int w = 0; w < kRankWords; ++w) {
    const uint32_t word = ranks.word[w];
    if (!dropped) ranks.word[w] = word & (word - 1);
    dropped |= word != 0;
  }
}

__device__ __forceinline__ RankMask Shifted(const RankMask& ranks, int first) {
  RankMask out = NoRanks();
#pragma unroll 1
  for (RankMask m = ranks; Any(m); DropFirst(m)) out |= OneRank(FirstRank(m) - first);
  return out;
}

template <class F>
__device__ __forceinline__ void EachOwnRank(int lane, int ranks, F f) {
#pragma unroll 1
  for (int rank = lane; rank < ranks; rank += 32) f(rank);
}
struct RankVotes {
  bool own[kRankWords];
  template <class F>
  __device__ __forceinline__ RankVotes(int lane, int ranks, F f) {
#pragma unroll
    for (int w = 0; w < kRankWords; ++w) own[w] = w * 32 + lane < ranks && f(w * 32 + lane);
  }
  __device__ __forceinline__ RankMask Ballot() const {
    return ByWord([&](int w) { return __ballot_sync(0xFFFFFFFFu, own[w]); });
  }
};
__device__ __forceinline__ RankMask Union(const RankMask& own, int ranks) {
  return ByWord([&](int w) { return w * 32 < ranks ? __reduce_or_sync(0xFFFFFFFFu, own.word[w]) : 0u; });
}
__device__ __forceinline__ bool AnyOfFirstLane(const RankMask& ranks) {
  return __shfl_sync(0xFFFFFFFFu, static_cast<int>(Any(ranks)), 0);
}

__device__ __forceinline__ RankMask LoadDead(const Mailbox& mailbox) {
  return ByWord([&](int w) { return LoadRelaxedSystem(mailbox.dead + w); });
}
__device__ __forceinline__ bool LoadIsDead(const Mailbox& mailbox, int rank) {
  return LoadRelaxedSystem(mailbox.dead + rank / 32) >> (rank % 32) & 1;
}
__device__ __forceinline__ RankMask LoadMembers(const MemoryTable& table) {
  return ByWord([&](int w) { return LoadRelaxedSystem(w ? table.more_members + w - 1 : &table.members); });
}
__device__ __forceinline__ void StoreMembers(MemoryTable& table, const RankMask& members) {
  table.members = members.word[0];
  for (int w = 1; w < kRankWords; ++w) table.more_members[w - 1] = members.word[w];
}
// There are more ranks than bits: a hash, never 0 where any rank is out.
__device__ __forceinline__ uint32_t DescribedOut(const RankMask& out) {
  if (!Any(out)) return 0;
  uint32_t h = 2166136261u;
  for (int w = 0; w < kRankWords; ++w) {
    h = (h ^ out.word[w]) * 16777619u;
    h ^= h >> 15;
  }
  return (h >> 16 | 1u) << kDescribedOutShift;
}

class OwnStaging {
 public:
  __device__ __forceinline__ explicit OwnStaging(const volatile MemoryTable& table) : table_(&table) {}
  __device__ __forceinline__ char* Of(int rank) const { return table_->staging[rank]; }
  __device__ __forceinline__ char* OfAny(int rank) const { return table_->staging[rank]; }

 private:
  const volatile MemoryTable* table_;
};

struct TurnedRanks {
  RankMask set;
  int first;
  __device__ __forceinline__ static TurnedRanks Of(const RankMask& set, int first, int) { return {set, first}; }
  __device__ __forceinline__ static TurnedRanks Only(int rank, int) { return {OneRank(rank), rank}; }
  template <class F>
  __device__ __forceinline__ void ForEach(F f) const {
    const RankMask before = RanksBelow(first);
    RankMask left = set & ~before;
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn, left = set & before) {
#pragma unroll 1
      for (; Any(left); DropFirst(left)) f(FirstRank(left));
    }
  }
  template <class F>
  __device__ __forceinline__ void ForEachOnce(F f) const {
    ForEach(f);
  }
};

}  // namespace XEN_MOE_KERNELS
