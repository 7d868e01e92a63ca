// Operations of many tokens in groups of more than kSmallGroup ranks: rows go through rings, round by round.
//
// There a row for every token of every rank would take gigabytes, so each source has a ring of kRingRounds rounds of
// tokens on every rank (Staging::ring_tokens); routing, counts and flags stay whole. A row of round q + kRingRounds is
// stored where one of round q lay, once every rank has said that it has taken all rows of round q: a credit, one flag
// for each pair of ranks and round. The rank that places, or adds up, counts the items of a round that are done
// (Control::taken), and whoever does the last one gives the credit to all ranks.
//
// The kernels that do so are a variant of their own, ranks256_ring (variant.h), in which kRings is true.
//
// Order, on every rank: first the pushes of kRoundsAhead rounds, which wait for nobody. Then, in every block, some
// warps push the rounds behind them while the others take, both round after round: each kind of work is claimed from a
// counter of its own. Of all items of both kinds on all ranks, in the order take 0, push kRoundsAhead, take 1, push
// kRoundsAhead + 1, and so on, an item waits only for earlier ones: taking round q for the pushes of q, pushing round
// q + kRoundsAhead for the taking of round q + kRoundsAhead - kRingRounds = q - 1. A warp does what it claims in that
// order, and claims the next item at the earliest while it works at one before it. So of all items that are not done
// anywhere, a warp that runs has the first one or comes to it, because every block has warps of both kinds, and that
// one waits for nothing: a single resident block on each rank suffices. Nothing is done twice, as a row that comes late
// would lie on a later one.
//
// Every push of round q + kRingRounds waits for the credits of all ranks, not only of those that it stores to, and
// after the last round that needs one no credits are given. So every credit is awaited before an operation ends, as
// workspace.h asks of all that is stored at a rank.
//
// A rank that is out itself gives, awaits and gets no credits. So that the rank that owes is named by one that waits
// for it: credits are awaited round after round, also by whoever takes, before the rows of the round that needs them. A
// rank whose rows are awaited then has all credits that it needs for them, and waits for nobody. Whoever waits for a
// credit waits for a rank that may itself wait for rows, but for no credit: such a wait lasts half as long again as one
// for rows and does not hide it in what the rank shows (failure.cuh).
#pragma once

#include "cuda_kernels/core/claims.cuh"
#include "cuda_kernels/core/params.h"
#include "cuda_kernels/core/signal.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

constexpr int kRoundsAhead = kRingRounds - 1;
constexpr int kRoundPushers = kSignalWarp / 2;  // warps of a block that push the rounds behind these

// The wire row of a token of `source` in its staging rows, as a number of rows.
__device__ __forceinline__ uint64_t StagedRow(const Routing& r, const Staging& s, int source, int token) {
  if constexpr (kRings) {
    return static_cast<uint64_t>(source) * s.ring_tokens + token % s.ring_tokens;
  } else {
    return static_cast<uint64_t>(source) * r.tokens + token;
  }
}
// Tokens that are pushed before anything is awaited: all, unless they go through rings.
__device__ __forceinline__ int TokensAhead(const Routing& r, const Staging& s) {
  return kRings ? s.ring_tokens / kRingRounds * kRoundsAhead : r.tokens;
}

// The credits of an operation.
struct Rounds {
  const Running& run;
  uint64_t flags;  // Staging::credit_flags
  int tokens;      // of the operation
  int round;       // tokens of a round
  int count;       // of rounds

  __device__ __forceinline__ Rounds(const Running& running, const Routing& r, const Staging& s)
      : run(running), flags(s.credit_flags), tokens(r.tokens), round(s.ring_tokens / kRingRounds) {
    count = (tokens + round - 1) / round;
  }
  // Until every rank has taken all rounds below `end`; `*credited`: those that the warp need not ask for. All lanes
  // call it. False: the group has failed.
  __device__ __forceinline__ bool AwaitCredits(int end, int* credited) const {
    bool given = true;
    for (; *credited < end && given; ++*credited) {
      ForEachOwnRank(threadIdx.x & 31, run.ranks, [&](int rank) {
        if (!given || !Holds(run.meets, rank) || rank == run.rank) return;
        given = WaitFlag(Flag(run.half[run.rank], rank, *credited), run, run.epoch, Step::kCredit, rank);
      });
      given = __all_sync(0xFFFFFFFFu, given);
      __syncwarp();  // what one lane has acquired, all lanes may rely on
    }
    return given;
  }
  // One of the `items` items of round `which` is taken; with the last one of a round that others wait for, they get the
  // credit. All lanes call it.
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
    __syncwarp();  // what lane 0 has acquired, all lanes may rely on
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

// Items of taking, as Claims: those of no round first, and then `takes` of each token, which are counted. `items`: none
// is left, or the group has failed.
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

// push(item) for every item behind those ahead, `pushes` for each token.
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

// All that comes behind the pushes ahead. One warp raises the flags of what `push(signaller, item)` pushes. Whoever is
// done with pushing takes too: `take(rounds)`. All threads of the block call it.
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
