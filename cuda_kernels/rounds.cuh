// Operations of many tokens in groups of more than kNarrowRanks ranks: rows go through rings, round by round.
//
// There a row for every token of every rank would take gigabytes, so each source has a ring of kRingRounds rounds of
// tokens on every rank (Staging::ring_tokens); routing, counts and flags stay whole. A row of round q + kRingRounds is
// stored where one of round q lay, once every rank has said that it has taken all rows of round q: a credit, one flag
// for each pair of ranks and round. The rank that places, or adds up, counts the items of a round that are done
// (Control::taken), and whoever does the last one gives the credit to all ranks.
//
// Order, on every rank: first the pushes of kRoundsAhead rounds, which wait for nobody. Then everything else is claimed
// from one counter: the taking of round q, then the pushes of round q + kRoundsAhead, then the taking of q + 1, and so
// on. An item waits only for items that are earlier in this order, on any rank: taking round q for the pushes of q,
// pushing round q + kRoundsAhead for the taking of round q + kRoundsAhead - kRingRounds = q - 1. A warp claims in
// order, and claims the next item at the earliest while it works at one before it. So of all items that are not done
// anywhere, a warp that runs has the first one or comes to it, and that one waits for nothing: a single resident block
// on each rank suffices. Nothing is done twice, as a row that comes late would lie on a later one.
//
// Every push of round q + kRingRounds waits for the credits of all ranks, not only of those that it stores to, and
// after the last round that needs one no credits are given. So every credit is awaited before an operation ends, as
// workspace.h asks of all that is stored at a rank.
//
// A rank that is out itself gives, awaits and gets no credits. Whoever waits for a credit may wait because the other
// rank waits for rows, so such a wait lasts half as long again as one for rows and does not hide it in what the rank
// shows (failure.cuh): the rank that owes is named by one that waits for it.
#pragma once

#include <type_traits>

#include "claims.cuh"
#include "params.h"
#include "signal.cuh"

namespace XEN_MOE_KERNELS {

constexpr int kRoundsAhead = kRingRounds - 1;

// The wire row of a token of `source` in its staging rows, as a number of rows.
__device__ __forceinline__ uint64_t StagedRow(const Routing& r, const Staging& s, int source, int token) {
  if constexpr (kWide) {
    if (s.ring_tokens) return static_cast<uint64_t>(source) * s.ring_tokens + token % s.ring_tokens;
  }
  return static_cast<uint64_t>(source) * r.tokens + token;
}
// Tokens that are pushed before anything is awaited: all, unless they go through rings.
__device__ __forceinline__ int TokensAhead(const Routing& r, const Staging& s) {
  if constexpr (kWide) {
    if (s.ring_tokens) return s.ring_tokens / kRingRounds * kRoundsAhead;
  }
  return r.tokens;
}
__device__ __forceinline__ bool InRounds(const Staging& s) { return kWide && s.ring_tokens > 0; }

// How an operation goes through its rings: each token has `takes` items of taking and `pushes` of pushing, by
// `push(item)`.
template <class Push>
struct Rounds {
  const Running& run;
  const Routing& routing;
  const Staging& staging;
  int takes, pushes;
  const Push& push;
};

// What is claimed behind the pushes ahead, as Claims: First and Next give the `items` items of taking, first those of
// no round, then a round after the other; and in between they push. `items`: nothing is left, or the group has failed.
template <class Through>
class RoundClaims {
 public:
  __device__ __forceinline__ RoundClaims(uint32_t* counter, int items, bool, const Through& rounds)
      : through_(rounds),
        run_(rounds.run),
        counter_(counter),
        flags_(rounds.staging.credit_flags),
        end_(items),
        own_(items - rounds.takes * rounds.routing.tokens),
        takes_(rounds.takes),
        pushes_(rounds.pushes),
        tokens_(rounds.routing.tokens) {
    round_ = rounds.staging.ring_tokens / kRingRounds;
    rounds_ = (tokens_ + round_ - 1) / round_;
  }
  __device__ __forceinline__ int First() {
    next_ = Take();
    return Find();
  }
  __device__ __forceinline__ int Next() { return Find(); }

 private:
  __device__ __forceinline__ int Take() {
    return (threadIdx.x & 31) == 0 ? static_cast<int>(atomicAdd(counter_, 1u)) : 0;
  }
  __device__ __forceinline__ const uint32_t* Flag(char* half, int rank, int round) const {
    return reinterpret_cast<const uint32_t*>(half + flags_) + static_cast<uint32_t>(rank) * rounds_ + round;
  }

  // No part of the loop that takes: what is pushed in between would need the registers of that one.
  __device__ __noinline__ int Find() {
    Done();
    const int all = end_ + pushes_ * max(0, tokens_ - kRoundsAhead * round_);
    for (;;) {
      const int item = __shfl_sync(0xFFFFFFFFu, next_, 0);
      if (item >= all) return end_;
      next_ = Take();
      if (item < own_) return item;
      // Blocks of a round that is taken and a whole one that is pushed, then the same with the last that is pushed,
      // then what is left to take.
      const int taken = round_ * takes_, pushed = round_ * pushes_, whole = rounds_ - 1 - kRoundsAhead;
      int rest = item - own_;
      const int block = min(rest / (taken + pushed), whole);
      rest -= block * (taken + pushed);
      const int last = block < whole ? pushed : (tokens_ - (rounds_ - 1) * round_) * pushes_;
      if (rest < taken || rest >= taken + last) {
        const int take = block * taken + (rest < taken ? rest : rest - last);
        taking_ = take / taken;
        return own_ + take;
      }
      if (!AwaitCredits(block + kRoundsAhead - kRingRounds)) return end_;
      through_.push((block + kRoundsAhead) * pushed + rest - taken);
    }
  }

  // Until every rank has taken `round`. False: the group has failed.
  __device__ __forceinline__ bool AwaitCredits(int round) {
    if (round < 0 || round == credited_) return true;
    bool given = true;
    EachOwnRank(threadIdx.x & 31, run_.ranks, [&](int rank) {
      if (!given || !Holds(run_.meets, rank) || rank == run_.rank) return;
      given = WaitFlag(Flag(run_.half[run_.rank], rank, round), run_, run_.epoch, Step::kCredit, rank);
    });
    credited_ = round;
    given = __all_sync(0xFFFFFFFFu, given);
    __syncwarp();  // what one lane has acquired, all lanes may rely on
    return given;
  }
  // An item of taking is done; with the last one of a round that others wait for, they get the credit.
  __device__ __forceinline__ void Done() {
    const int round = taking_;
    taking_ = -1;
    if (round < 0 || round + kRingRounds >= rounds_) return;
    __syncwarp();
    uint32_t done = 0;
    uint32_t* const counter = &run_.control->taken[round];
    if ((threadIdx.x & 31) == 0) {
      __threadfence();
      done = atomicAdd(counter, 1u) + 1;
      __threadfence();
    }
    if (__shfl_sync(0xFFFFFFFFu, done, 0) != static_cast<uint32_t>(round_ * takes_)) return;
    if ((threadIdx.x & 31) == 0) *counter = 0;
    EachOwnRank(threadIdx.x & 31, run_.ranks, [&](int rank) {
      if (!Holds(run_.meets, rank) || rank == run_.rank) return;
      FenceSystem();
      StoreRelaxedSystem(const_cast<uint32_t*>(Flag(run_.half[rank], run_.rank, round)), run_.epoch);
    });
  }

  const Through& through_;
  const Running& run_;
  uint32_t* const counter_;
  const uint64_t flags_;
  const int end_, own_, takes_, pushes_, tokens_;
  int round_, rounds_;  // tokens of a round, and how many rounds there are
  int next_ = 0, taking_ = -1, credited_ = -1;
};

// `take(rounds)` by all warps but the signalling one, which raises the flags of what `push(signaller, item)` pushes.
// All threads of the block call it.
template <class Push, class TakeAll>
__device__ __forceinline__ void GoThroughRounds(const Running& run, SignalBox& signals, const Routing& r,
                                                const Staging& s, int takes, int pushes, Push push, TakeAll take) {
  __syncthreads();
  InitSignalBox(signals);
  __syncthreads();
  Signaller signaller{signals, run, s.row_flags, run.epoch, false};
  if (threadIdx.x / 32 == kSignalWarp) return signaller.Serve();
  const auto push_one = [&](int item) { push(signaller, item); };
  take(Rounds<decltype(push_one)>{run, r, s, takes, pushes, push_one});
  signaller.Finish();
}

}  // namespace XEN_MOE_KERNELS
