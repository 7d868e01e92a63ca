// Sets of ranks, and loops with a lane for each rank.
//
// The kernels are compiled for two numbers of ranks. For groups of up to kNarrowRanks ranks a set is one register, a
// lane looks after one rank, and nothing of what follows costs anything. A translation unit that begins with
// wide_rank_mask.cuh (wide_*.cu) has the kernels for up to kMaxRanks ranks, in a namespace of their own: there a set is
// several words, and a lane looks after every 32nd rank. Both see the same structures in memory (workspace.h), and
// nothing else differs: everything that knows how many ranks there can be is in these two files. What begins with
// rings_rank_mask.cuh (rings_*.cu) has dispatch and combine once more, for rows that go through rings (rounds.cuh).
#pragma once

#ifndef XEN_MOE_KERNELS
#define XEN_MOE_KERNELS xen_moe

#include "memory_order.cuh"
#include "workspace.h"

namespace XEN_MOE_KERNELS {

constexpr bool kWide = false;
constexpr bool kRings = false;        // rows go through rings: rounds.cuh
constexpr int kRanks = kNarrowRanks;  // that these kernels take
using RankMask = uint32_t;
using RankIndex = int;  // a rank, where many are kept

__device__ __forceinline__ RankMask NoRanks() { return 0; }
__device__ __forceinline__ RankMask EveryRank() { return ~0u; }  // also those that there are not
__device__ __forceinline__ RankMask AllRanks(int ranks) { return (1u << ranks) - 1; }
__device__ __forceinline__ RankMask OneRank(int rank) { return 1u << rank; }
__device__ __forceinline__ RankMask RanksBelow(int rank) { return (1u << rank) - 1; }
__device__ __forceinline__ RankMask RanksAbove(int rank) { return ~((2u << rank) - 1); }
// `count` ranks from `first` on.
__device__ __forceinline__ RankMask RanksFrom(int first, int count) { return ((1u << count) - 1) << first; }
__device__ __forceinline__ bool Holds(RankMask ranks, int rank) { return ranks >> rank & 1; }
__device__ __forceinline__ bool Any(RankMask ranks) { return ranks != 0; }
__device__ __forceinline__ uint32_t FirstWord(RankMask ranks) { return ranks; }
__device__ __forceinline__ int CountRanks(RankMask ranks) { return __popc(ranks); }
// Rank `first` becomes 0.
__device__ __forceinline__ RankMask Shifted(RankMask ranks, int first) { return ranks >> first; }
// for (RankMask m = ranks; Any(m); DropFirst(m)) { ... FirstRank(m) ... } goes through a set in ascending order.
__device__ __forceinline__ int FirstRank(RankMask ranks) { return __ffs(ranks) - 1; }  // -1: none
__device__ __forceinline__ void DropFirst(RankMask& ranks) { ranks &= ranks - 1; }

// f(rank) for every rank that this lane looks after; of those that there are not, it may come by too.
template <class F>
__device__ __forceinline__ void EachOwnRank(int lane, int, F f) {
  f(lane);
}
// What every lane says of its own ranks, and then the set of all whose lane said true: that part all lanes call.
struct RankVotes {
  bool own;
  template <class F>
  __device__ __forceinline__ RankVotes(int lane, int, F f) : own(f(lane)) {}
  __device__ __forceinline__ RankMask Ballot() const { return __ballot_sync(0xFFFFFFFFu, own); }
};
// The union of all lanes' sets, to all lanes.
__device__ __forceinline__ RankMask Union(RankMask ranks, int) { return __reduce_or_sync(0xFFFFFFFFu, ranks); }
// Whether lane 0's set holds any rank, to all lanes.
__device__ __forceinline__ bool AnyOfFirstLane(RankMask ranks) { return __shfl_sync(0xFFFFFFFFu, ranks, 0) != 0; }

__device__ __forceinline__ RankMask LoadDead(const Mailbox& mailbox) { return LoadRelaxedSystem(mailbox.dead); }
__device__ __forceinline__ bool LoadIsDead(const Mailbox& mailbox, int rank) {
  return LoadRelaxedSystem(mailbox.dead) >> rank & 1;
}
__device__ __forceinline__ RankMask LoadMembers(const MemoryTable& table) { return LoadRelaxedSystem(&table.members); }
__device__ __forceinline__ void StoreMembers(MemoryTable& table, RankMask members) { table.members = members; }
// In Descriptor::flags, the ranks that are out: a bit each.
__device__ __forceinline__ uint32_t DescribedOut(RankMask out) { return out << kDescribedOutShift; }

// What a lane needs of the staging areas of a memory table that the host or another block may just have written.
class OwnStaging {
 public:
  __device__ __forceinline__ explicit OwnStaging(const volatile MemoryTable& table)
      : own_(table.staging[threadIdx.x % kRanks]) {}
  __device__ __forceinline__ char* Of(int) const { return own_; }  // of a rank that this lane looks after
  __device__ __forceinline__ char* OfAny(int rank) const {         // all lanes call it
    return reinterpret_cast<char*>(__shfl_sync(0xFFFFFFFFu, reinterpret_cast<unsigned long long>(own_), rank));
  }

 private:
  char* own_;
};

// A set in the order from rank `first` on, then from rank 0.
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
  // The same, with the code of `f` there once.
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

}  // namespace XEN_MOE_KERNELS

#endif
