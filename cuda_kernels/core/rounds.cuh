// Operations of many tokens in groups of more than kSmallGroup ranks: rows go through rings, round by round.
//
// In such groups a staged row for every token of every rank would take gigabytes. Therefore each source has a ring of
// kRingRounds rounds of tokens on every rank (Staging::ring_tokens); routing, counts and flags have room for all
// tokens. A row of round q + kRingRounds is stored in the place of a row of round q, once every rank has announced that
// it has taken all rows of round q. This announcement is a credit: one flag for each pair of ranks and round. The rank
// that places or sums rows counts the finished items of a round (Control::taken), and the warp that finishes the last
// item gives the credit to all ranks.
//
// These kernels are a variant of their own, ranks256_ring (variant.h), in which kRings is true.
//
// Order on every rank: first the pushes of kRoundsAhead rounds, which wait for no rank. Then, in every block, some
// warps push the later rounds while the other warps take rows, both round after round; each kind of work is claimed
// from its own counter. Why every wait ends: order the items of both kinds on all ranks as take 0, push kRoundsAhead,
// take 1, push kRoundsAhead + 1, and so on. Each item waits only for earlier items: taking round q waits for the pushes
// of q; pushing round q + kRoundsAhead waits for the taking of round q + kRoundsAhead - kRingRounds = q - 1. A warp
// does its claimed items in that order, and claims the next item at the earliest while it works on the item before. So
// the first unfinished item of all ranks is held by a running warp, or such a warp will reach it, because every block
// has warps of both kinds; and that item waits for nothing. A single resident block on each rank suffices. No item is
// done twice, because a late row would overwrite a later one.
//
// Every push of round q + kRingRounds waits for the credits of all ranks, not only of the ranks that it stores to;
// after the last round that needs a credit no credits are given. So every credit is awaited before an operation ends,
// as workspace.h requires for everything that is stored at a rank.
//
// An inactive rank gives, awaits and receives no credits. A failure must name the rank that owes, by a rank that waits
// for it. Therefore credits are awaited round after round, by the taking warps too, before the rows of the round that
// needs them. A rank whose rows are awaited then has all credits that these rows need, and waits for no rank. A rank
// that owes a credit may itself wait for rows, but not for a credit: such a wait for a credit lasts half as long again
// as a wait for rows, and does not hide a wait for rows in what the rank shows (failure.cuh).
#pragma once

#include "cuda_kernels/core/claims.cuh"
#include "cuda_kernels/core/params.h"
#include "cuda_kernels/core/signal.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

constexpr int kRoundsAhead = kRingRounds - 1;
constexpr int kRoundPushers = kSignalWarp / 2;  // warps of a block that push the later rounds

// Returns the wire row of a token of `source` in its staging rows, as a number of rows.
__device__ __forceinline__ uint64_t StagedRow(const Routing& r, const Staging& s, int source, int token) {
  if constexpr (kRings) {
    return static_cast<uint64_t>(source) * s.ring_tokens + token % s.ring_tokens;
  } else {
    return static_cast<uint64_t>(source) * r.tokens + token;
  }
}
// Returns how many tokens are pushed before any wait: all tokens, unless they go through rings.
__device__ __forceinline__ int TokensAhead(const Routing& r, const Staging& s) {
  return kRings ? s.ring_tokens / kRingRounds * kRoundsAhead : r.tokens;
}

// The credits of an operation.
struct Rounds {
  const Running& run;
  uint64_t flags;  // Staging::credit_flags
  int tokens;      // of the operation
  int round;       // tokens of a round
  int count;       // number of rounds

  __device__ __forceinline__ Rounds(const Running& running, const Routing& r, const Staging& s)
      : run(running), flags(s.credit_flags), tokens(r.tokens), round(s.ring_tokens / kRingRounds) {
    count = (tokens + round - 1) / round;
  }
  // Waits until every rank has taken all rounds below `end`. `*credited`: the rounds that the warp has checked already.
  // All lanes call it. Returns false if the group has failed.
  __device__ __forceinline__ bool AwaitCredits(int end, int* credited) const {
    bool given = true;
    for (; *credited < end && given; ++*credited) {
      ForEachOwnRank(threadIdx.x & 31, run.ranks, [&](int rank) {
        if (!given || !Holds(run.meets, rank) || rank == run.rank) return;
        given = WaitFlag(Flag(run.half[run.rank], rank, *credited), run, run.epoch, Step::kCredit, rank);
      });
      given = __all_sync(0xFFFFFFFFu, given);
      __syncwarp();  // all lanes may rely on the lanes' acquires
    }
    return given;
  }
  // Counts one finished item of the `items` items of round `which`. With the last item of a round that other ranks wait
  // for, it gives them the credit. All lanes call it.
  __device__ __forceinline__ void Took(int which, int items) const {
    if (which + kRingRounds >= count) return;
    __syncwarp();
    uint32_t done = 0;
    uint32_t* const counter = &run.control->taken[which];
    if ((threadIdx.x & 31) == 0) {
      __threadfence();
      done = atomicAdd(counter, 1u) + 1;
      __threadfence();
    }
    if (__shfl_sync(0xFFFFFFFFu, done, 0) != static_cast<uint32_t>(items)) return;
    __syncwarp();  // all lanes may rely on lane 0's acquire
    if ((threadIdx.x & 31) == 0) *counter = 0;
    ForEachOwnRank(threadIdx.x & 31, run.ranks, [&](int rank) {
      if (!Holds(run.meets, rank) || rank == run.rank) return;
      FenceSystem();
      StoreRelaxedSystem(const_cast<uint32_t*>(Flag(run.half[rank], run.rank, which)), run.epoch);
    });
  }

 private:
  __device__ __forceinline__ const uint32_t* Flag(char* half, int rank, int which) const {
    return reinterpret_cast<const uint32_t*>(half + flags) + static_cast<uint32_t>(rank) * count + which;
  }
};

// The items of taking, with the interface of Claims: first the items that belong to no round, then `takes` items of
// each token, which are counted. It returns `items` when no item is left or the group has failed.
struct Taking {
  const Rounds& rounds;
  int takes;
};
class RoundClaims {
 public:
  __device__ __forceinline__ RoundClaims(uint32_t* counter, int items, bool, const Taking& taking)
      : claims_(counter, items, false),
        rounds_(taking.rounds),
        items_(items),
        per_round_(taking.takes * taking.rounds.round),
        own_(items - taking.takes * taking.rounds.tokens) {}
  __device__ __forceinline__ int First() { return Enter(claims_.First()); }
  __device__ __forceinline__ int Next() {
    if (round_ >= 0) rounds_.Took(round_, per_round_);
    return Enter(claims_.Next());
  }

 private:
  __device__ __forceinline__ int Enter(int item) {
    round_ = item < own_ ? -1 : (item - own_) / per_round_;
    return item >= items_ || rounds_.AwaitCredits(round_ - kRingRounds + 1, &credited_) ? item : items_;
  }
  Claims claims_;
  const Rounds& rounds_;
  const int items_, per_round_, own_;
  int round_ = -1, credited_ = 0;
};

// Calls push(item) for every item after the first kRoundsAhead rounds; a token has `pushes` items.
template <class Push>
__device__ __forceinline__ void PushLaterRounds(const Rounds& rounds, int pushes, Push push) {
  const int per_round = rounds.round * pushes, ahead = kRoundsAhead * per_round;
  const int items = max(0, rounds.tokens * pushes - ahead);
  Claims claims(&rounds.run.control->claimed[static_cast<int>(Work::kLaterRounds)], items, false);
  int credited = 0;
  for (int item = claims.First(); item < items; item = claims.Next()) {
    if (!rounds.AwaitCredits(item / per_round + kRoundsAhead - kRingRounds + 1, &credited)) return;
    push(ahead + item);
  }
}

// All work after the pushes of the first kRoundsAhead rounds. One warp raises the flags of the rows that
// `push(signaller, item)` pushes. A warp that has finished pushing takes rows too: `take(rounds)`. All threads of the
// block call it.
template <class Push, class TakeAll>
__device__ __forceinline__ void GoThroughRounds(const Running& run, SignalBox& signals, const Routing& r,
                                                const Staging& s, int pushes, Push push, TakeAll take) {
  const int warp = threadIdx.x / 32;
  const Rounds rounds(run, r, s);
  __syncthreads();
  InitSignalBox(signals);
  __syncthreads();
  Signaller signaller{signals, run, s.row_flags, run.epoch, false};
  if (warp == kSignalWarp) {
    signaller.RunSignalWarp();
  } else {
    if (warp < kRoundPushers) PushLaterRounds(rounds, pushes, [&](int item) { push(signaller, item); });
    signaller.Finish();
  }
  take(rounds);
}

}  // namespace xen_moe::XEN_MOE_VARIANT
