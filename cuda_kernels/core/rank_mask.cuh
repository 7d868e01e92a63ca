// Sets of ranks, and loops in which each lane takes its own ranks.
//
// The ranks16 variant (variant.h) takes groups of up to kSmallGroup ranks: a set is one register, a lane has one rank,
// and nothing of what follows costs anything. The ranks256 variants take groups of up to kMaxRanks ranks: a set is
// several words, and a lane has every 32nd rank. Both variants see the same structures in memory (workspace.h); only
// this file and the constants of variant.h know how many ranks there can be. The first half of this file, for one word,
// has the comments; the second half has the same functions over several words.
#pragma once

#include "cuda_kernels/core/memory_order.cuh"
#include "cuda_kernels/core/variant.h"
#include "cuda_kernels/core/workspace.h"

namespace xen_moe::XEN_MOE_VARIANT {

#if XEN_MOE_MAX_RANKS == 16

using RankMask = uint32_t;
using RankIndex = int;  // a rank, in arrays of many

__device__ __forceinline__ RankMask NoRanks() { return 0; }
__device__ __forceinline__ RankMask EveryRank() { return ~0u; }  // also bits >= ranks
__device__ __forceinline__ RankMask AllRanks(int ranks) { return (1u << ranks) - 1; }
__device__ __forceinline__ RankMask OneRank(int rank) { return 1u << rank; }
__device__ __forceinline__ RankMask RanksBelow(int rank) { return (1u << rank) - 1; }
__device__ __forceinline__ RankMask RanksAbove(int rank) { return ~((2u << rank) - 1); }
// Returns `count` ranks from `first` on.
__device__ __forceinline__ RankMask RanksFrom(int first, int count) { return ((1u << count) - 1) << first; }
__device__ __forceinline__ bool Holds(RankMask ranks, int rank) { return ranks >> rank & 1; }
__device__ __forceinline__ bool Any(RankMask ranks) { return ranks != 0; }
__device__ __forceinline__ uint32_t FirstWord(RankMask ranks) { return ranks; }
__device__ __forceinline__ int CountRanks(RankMask ranks) { return __popc(ranks); }
// Returns the set in which rank `first` has become 0.
__device__ __forceinline__ RankMask Shifted(RankMask ranks, int first) { return ranks >> first; }
// for (RankMask m = ranks; Any(m); DropFirst(m)) { ... FirstRank(m) ... } iterates over a set in ascending order.
__device__ __forceinline__ int FirstRank(RankMask ranks) { return __ffs(ranks) - 1; }  // -1: none
__device__ __forceinline__ void DropFirst(RankMask& ranks) { ranks &= ranks - 1; }

// Calls f(rank) for each rank assigned to this lane. May also call it with rank >= ranks; f must ignore those.
template <class F>
__device__ __forceinline__ void ForEachOwnRank(int lane, int, F f) {
  f(lane);
}
// The constructor evaluates f(rank) for each rank assigned to a lane; Ballot returns the set of ranks whose lane got
// true. All lanes call Ballot.
struct RankVotes {
  bool own;
  template <class F>
  __device__ __forceinline__ RankVotes(int lane, int, F f) : own(f(lane)) {}
  __device__ __forceinline__ RankMask Ballot() const { return __ballot_sync(0xFFFFFFFFu, own); }
};
// Returns the union of all lanes' sets, to all lanes.
__device__ __forceinline__ RankMask Union(RankMask ranks, int) { return __reduce_or_sync(0xFFFFFFFFu, ranks); }
// Returns whether lane 0's set holds any rank, to all lanes.
__device__ __forceinline__ bool AnyOfFirstLane(RankMask ranks) { return __shfl_sync(0xFFFFFFFFu, ranks, 0) != 0; }

__device__ __forceinline__ RankMask LoadDead(const Mailbox& mailbox) { return LoadRelaxedSystem(mailbox.dead); }
__device__ __forceinline__ bool LoadIsDead(const Mailbox& mailbox, int rank) {
  return LoadRelaxedSystem(mailbox.dead) >> rank & 1;
}
__device__ __forceinline__ RankMask LoadMembers(const MemoryTable& table) { return LoadRelaxedSystem(&table.members); }
__device__ __forceinline__ void StoreMembers(MemoryTable& table, RankMask members) { table.members = members; }
// Returns the inactive ranks as they stand in Descriptor::flags: one bit each.
__device__ __forceinline__ uint32_t DescribedInactive(RankMask out) { return out << kDescribedInactiveShift; }

// The staging areas that a lane needs of a memory table that the host or another block may just have written.
class OwnStaging {
 public:
  __device__ __forceinline__ explicit OwnStaging(const volatile MemoryTable& table)
      : own_(table.staging[threadIdx.x % kRanks]) {}
  __device__ __forceinline__ char* Of(int) const { return own_; }  // `rank` is assigned to this lane
  __device__ __forceinline__ char* OfAny(int rank) const {         // all lanes call it
    return reinterpret_cast<char*>(__shfl_sync(0xFFFFFFFFu, reinterpret_cast<unsigned long long>(own_), rank));
  }

 private:
  char* own_;
};

// A set that is iterated from rank `first` on, and then from rank 0.
struct TurnedRanks {
  uint32_t mask;  // rotated right by `first`
  int first, ranks;
  __device__ __forceinline__ static TurnedRanks Of(RankMask set, int first, int ranks) {
    return {(set >> first) | (set << (ranks - first) & ((1u << ranks) - 1)), first, ranks};
  }
  __device__ __forceinline__ static TurnedRanks Only(int rank, int ranks) { return {1u, rank, ranks}; }
  template <class F>
  __device__ __forceinline__ void ForEach(F f) const {
    for (uint32_t m = mask; m; m &= m - 1) {
      int rank = __ffs(m) - 1 + first;
      if (rank >= ranks) rank -= ranks;
      f(rank);
    }
  }
  // ForEach, but the compiler emits the code of `f` once.
  template <class F>
  __device__ __forceinline__ void ForEachOnce(F f) const {
#pragma unroll 1
    for (uint32_t m = mask; m; m &= m - 1) {
      int rank = __ffs(m) - 1 + first;
      if (rank >= ranks) rank -= ranks;
      f(rank);
    }
  }
};

#else  // XEN_MOE_MAX_RANKS == 256

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
__device__ __forceinline__ void ForEachOwnRank(int lane, int ranks, F f) {
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
// A large group has more ranks than the flags have bits: a hash, never 0 if a rank is inactive.
__device__ __forceinline__ uint32_t DescribedInactive(const RankMask& out) {
  if (!Any(out)) return 0;
  uint32_t h = 2166136261u;
  for (int w = 0; w < kRankWords; ++w) {
    h = (h ^ out.word[w]) * 16777619u;
    h ^= h >> 15;
  }
  return (h >> 16 | 1u) << kDescribedInactiveShift;
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

#endif

}  // namespace xen_moe::XEN_MOE_VARIANT
