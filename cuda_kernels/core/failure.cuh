// How an operation waits, gives up, and notifies the group.
//
// Every wait of every kernel is a WaitUntil. It ends when the awaited event has happened, when the group has failed
// (the failure word in this rank's mailbox), when the awaited rank has announced another operation, or when the time is
// up. The rank that gives up first puts its failure word into the mailbox of the first active rank. The first word
// there decides, so that all ranks name the same root. Then the word goes to the mailboxes of all living ranks, and all
// waits of the group end. It stays until the host clears it. A successful operation runs none of this code: the slow
// half of WaitUntil runs only after many polls.
#pragma once

#include "cuda_kernels/core/params.h"
#include "cuda_kernels/core/rank_mask.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

constexpr uint64_t kShowWaitingNs = 1000000;  // a longer wait is shown in `progress`, and shown again this often
// How long to wait for a readable descriptor of the operation that a failed rank has announced.
constexpr uint64_t kDescriptorGraceNs = 1000000000;
// How long to wait for the other ranks' announcements, to find the rank that differs; a quarter of the timeout at most.
constexpr uint64_t kMismatchGraceNs = 200000000;
// How long a rank that shows that it waits may take to show it again; an eighth of the timeout at most.
constexpr uint64_t kBeatGraceNs = 500000000;
// How long a rank may seem to have proceeded without this one; an eighth of the timeout at most. While the system takes
// a killed process apart, its kernels still run, but stores to it or from it may already be lost. That looks the same
// until the host learns of the death, a second later.
constexpr uint64_t kProceededGraceNs = 5000000000;

// The operation that a block runs: in shared memory, written when the block begins.
struct Running {
  char* half[kRanks];    // of each rank: the current half of its staging area, which begins with the flags
  char* data[kRanks];    // of each rank: the data of that half
  uint64_t line_border;  // where LL128 lines begin in a half
  char* scratch;
  Control* control;
  Mailbox* mailbox;
  uint64_t timeout_ns;
  uint32_t epoch, signature;
  Operation operation;
  int ranks, rank;
  RankMask members;     // the active ranks
  RankMask active;      // the ranks that this one exchanges data with: `members`, or none if this rank is inactive
  RankMask reachable;   // the ranks whose memory this one has pointers to: those of its node
  RankMask meets;       // reachable and active ranks: they exchange announcements
  uint32_t generation;  // of the memory that this operation uses (low byte)
  uint32_t current;     // the generation in Control::current
  uint32_t reported;    // the generation that the host has been told
  bool refused;         // the group had failed when this block started
  bool outside;         // this block could not check in: it takes no part in the operation
  bool repeats;         // low latency: another block has taken over this block's share
  bool settled;         // low latency: Control already has these members
  bool last;            // this block is the last to finish
  bool all_refused;
};

// Returns whether the host has reported that the process of `rank` has ended.
__device__ __forceinline__ bool IsDead(const Running& run, int rank) { return LoadIsDead(*run.mailbox, rank); }

static __device__ __noinline__ void Fail(const Running& run, Cause cause, Step step, int rank, int other,
                                         uint64_t waited_ns) {
  uint64_t word = PackFailure({cause, run.operation, step, rank, other, run.epoch});
  StoreRelaxedSystem(&run.mailbox->waited_ns, waited_ns);
  __threadfence_system();
  const RankMask alive = run.reachable & ~LoadDead(*run.mailbox);
  const RankMask deciding = Any(run.meets & alive) ? run.meets & alive : OneRank(run.rank);
  const uint64_t first = ClaimWordSystem(&run.control->mailbox[FirstRank(deciding)]->failure, word);
  if (first) word = first;
  for (int r = 0; r < run.ranks; ++r) {
    if (Holds(alive, r)) ClaimWordSystem(&run.control->mailbox[r]->failure, word);
  }
}

// Returns the rank of this node with the same place as `rank`, a rank of another node: everything from `rank` arrives
// through it (node/rail_plan.h).
__device__ __forceinline__ int RailPeerOf(const Running& run, int rank) {
  return FirstRank(run.reachable) + rank % CountRanks(run.reachable);
}
// Returns whether `rank` can be notified: it is active, and its process has not ended.
__device__ __forceinline__ bool CanReceive(const Running& run, int rank) {
  return Holds(run.members & ~LoadDead(*run.mailbox), rank);
}
// Returns the rank of this node that forwards to this rank what comes from `rank`, a rank of another node. It is this
// rank itself where the rail is bypassed.
__device__ __forceinline__ int ForwarderOf(const Running& run, int rank) {
  const int through = RailPeerOf(run, rank);
  return CanReceive(run, through) ? through : run.rank;
}
// Returns whether `rank`, of another node, receives the notices about `about`, a rank of this node. In each node that
// is the rank with the same place; if that rank cannot receive, all other ranks there receive them.
__device__ __forceinline__ bool ReceivesNotice(const Running& run, int rank, int about) {
  const int per_node = CountRanks(run.reachable), of_place = rank / per_node * per_node + about % per_node;
  return CanReceive(run, rank) && (rank == of_place || !CanReceive(run, of_place));
}
// Returns where this node finds the latest notice about `rank`, a rank of another node.
__device__ __forceinline__ const uint64_t* NoticeOf(const Running& run, int rank) {
  return &run.control->mailbox[ForwarderOf(run, rank)]->told[rank];
}

// Returns `most`, or the timeout divided by `part` if that is less.
__device__ __forceinline__ uint64_t Grace(const Running& run, uint64_t most, uint64_t part) {
  return run.timeout_ns && run.timeout_ns / part < most ? run.timeout_ns / part : most;
}

// Returns whether a rank has been stopped, given the word `shown` at `where` by which it shows that it waits. A process
// that was killed during a wait shows the same word for ever.
__device__ __forceinline__ bool IsStalled(const Running& run, const uint64_t* where, uint64_t shown) {
  const uint64_t start = NowNs(), grace = Grace(run, kBeatGraceNs, 8);
  while (LoadRelaxedSystem(where) == shown) {
    if (LoadRelaxedSystem(&run.mailbox->failure)) return false;  // another rank has found the root
    if (NowNs() - start > grace) return true;
  }
  return false;
}
// Returns whether this node still receives notices that `rank`, of another node, waits in this operation or the one
// before. `*shown` says what it waits for.
__device__ __forceinline__ bool IsReportedWaiting(const Running& run, int rank, uint64_t* shown) {
  const uint64_t* const told = NoticeOf(run, rank);
  *shown = LoadRelaxedSystem(told);
  return ProgressWaits(*shown) && !EpochBefore(NextEpoch(ProgressEpoch(*shown)), run.epoch) &&
         !IsStalled(run, told, *shown);
}

// Handles a time-out. The awaited rank may itself wait: this function follows what the ranks show until it reaches a
// rank that waits for no other. The progress of ranks of another node is known here while one of them waits for a third
// node (node/transport.cuh). If a rank of another node is not reported as waiting, the root is either that rank or the
// rank that forwards its data to this one; the forwarder shows whether it waits for that rank.
static __device__ __noinline__ void FailTimeout(const Running& run, Step step, int rank, uint64_t waited_ns) {
  RankMask seen = OneRank(run.rank);
  while (!Holds(seen, rank)) {
    seen |= OneRank(rank);
    if (IsDead(run, rank)) break;
    uint64_t shown;
    if (Holds(run.reachable, rank) || !IsReportedWaiting(run, rank, &shown)) {
      const int asked = Holds(run.reachable, rank) ? rank : RailPeerOf(run, rank);
      if (asked == run.rank) break;
      const uint64_t* const progress = &run.control->mailbox[asked]->progress;
      shown = LoadRelaxedSystem(progress);
      if (IsDead(run, asked) || !ProgressWaits(shown) || IsStalled(run, progress, shown)) {
        // it has forwarded everything that came
        if (asked != rank && EpochBefore(run.epoch, ProgressEpoch(shown))) break;
        rank = asked;
        // it has not even started the operation
        if (EpochBefore(ProgressEpoch(shown), run.epoch)) step = Step::kArrival;
        break;
      }
    }
    const int next = ProgressRank(shown);
    if (next >= run.ranks || Holds(seen, next)) break;
    step = ProgressStep(shown);
    rank = next;
  }
  Fail(run, Cause::kTimeout, step, rank, run.rank, waited_ns);
}

// Returns what `rank` announced under this epoch, or the word by which it joined.
__device__ __forceinline__ uint64_t AnnouncedWord(const Mailbox& mailbox, uint32_t epoch, int rank) {
  const uint64_t word = LoadRelaxedSystem(&mailbox.announcements[epoch & 1][rank]);
  return AnnouncedEpoch(word) == epoch ? word : LoadRelaxedSystem(&mailbox.joins[rank]);
}

// Handles an announcement by `rank` of another operation under this epoch. Of more than two ranks, the one that differs
// is the root.
static __device__ __noinline__ void FailMismatch(const Running& run, int rank) {
  auto said = [&](int r) { return AnnouncedWord(*run.mailbox, run.epoch, r); };
  const uint32_t theirs = AnnouncedSignature(said(rank));
  const uint64_t start = NowNs(), grace = Grace(run, kMismatchGraceNs, 4);
  int with_me, with_them, arrived;
  do {
    with_me = with_them = arrived = 0;
    for (RankMask m = run.meets; Any(m); DropFirst(m)) {
      const uint64_t word = said(FirstRank(m));
      if (AnnouncedEpoch(word) != run.epoch) continue;
      ++arrived;
      with_me += AnnouncedSignature(word) == run.signature;
      with_them += AnnouncedSignature(word) == theirs;
    }
  } while (arrived < CountRanks(run.meets) && NowNs() - start < grace && !LoadRelaxedSystem(&run.mailbox->failure));
  const bool odd = with_me == with_them ? run.rank > rank : with_me < with_them;  // whether this rank differs
  Fail(run, Cause::kMismatch, Step::kArrival, odd ? run.rank : rank, odd ? rank : run.rank, 0);
}

// Returns whether `rank` has begun a later operation without this one, because its mask says that this rank is
// inactive. A rank with the same mask does not end an operation before it has seen the announcements of all members.
static __device__ __noinline__ bool ProceededWithout(const Running& run, int rank) {
  if (!Holds(run.reachable, rank)) return false;
  const uint64_t shown = LoadRelaxedSystem(&run.control->mailbox[rank]->progress);
  if (shown == 0 || !EpochBefore(run.epoch, ProgressEpoch(shown))) return false;
  __threadfence_system();
  return AnnouncedEpoch(LoadAcquireSystem(&run.mailbox->announcements[run.epoch & 1][rank])) != run.epoch &&
         LoadAcquireSystem(&run.mailbox->joins[rank]) == 0;
}

// Returns whether a wait for this step yields to waits for rows: a wait for a credit does (rounds.cuh). The rank that
// owes the credit may itself wait for rows of a rank that this one waits for too.
__device__ __forceinline__ bool YieldsToRows(Step step) { return kRings && step == Step::kCredit; }
// Returns whether this rank shows that it waits for rows.
__device__ __forceinline__ bool ShowsRows(const Running& run) {
  const uint64_t shown = LoadRelaxedSystem(&run.mailbox->progress);
  return ProgressEpoch(shown) == run.epoch && ProgressWaits(shown) && ProgressStep(shown) == Step::kRows;
}

struct Waiting {
  uint64_t start = 0, shown = 0;
  uint64_t alone = 0;  // since when the awaited rank seems to have proceeded without this one
};

// The slow half of a wait. Returns false to give up. `rank`: the awaited rank; this rank itself for its own blocks.
// `here`: the awaited event is caused by a rank of this node. Data from another node is then forwarded here by a block
// that waits for it.
static __device__ __noinline__ bool KeepWaiting(const Running& run, Step step, int rank, Waiting* waiting,
                                                bool here = true) {
  const bool near = Holds(run.reachable, rank), handed_on = here && !near;
  if (LoadRelaxedSystem(&run.mailbox->failure)) return false;
  if (rank != run.rank) {
    const uint64_t word = LoadRelaxedSystem(&run.mailbox->announcements[run.epoch & 1][rank]);
    if (AnnouncedEpoch(word) == run.epoch && AnnouncedSignature(word) != run.signature) {
      FailMismatch(run, rank);
      return false;
    }
    if (IsDead(run, rank)) {
      Fail(run, Cause::kDead, step, rank, run.rank, 0);
      return false;
    }
  }
  const uint64_t now = NowNs();
  if (waiting->start == 0) waiting->start = now;
  const uint64_t waited = now - waiting->start;
  if (rank != run.rank && waited > kShowWaitingNs && now - waiting->shown > kShowWaitingNs) {
    waiting->shown = now;
    const int awaited = handed_on ? ForwarderOf(run, rank) : rank;
    if (awaited != run.rank && (!YieldsToRows(step) || !ShowsRows(run))) {
      StoreRelaxedSystem(&run.mailbox->progress,
                         PackWaiting(run.epoch, step, awaited, static_cast<uint32_t>(now / kShowWaitingNs)));
    }
    if (!ProceededWithout(run, rank)) {
      waiting->alone = 0;
    } else if (waiting->alone == 0) {
      waiting->alone = now;
    } else if (now - waiting->alone > Grace(run, kProceededGraceNs, 8)) {
      FailMismatch(run, rank);
      return false;
    }
  }
  // Ranks must give up in an order in which each names the true root. A block that waits for a peer gives up before the
  // blocks of the same GPU that wait for it. A rank that waits for a rank of its own node gives up before ranks of
  // other nodes, and notifies them in time. A forwarder gives up before the ranks that wait for it.
  const uint64_t counts = rank == run.rank              ? waited / 2
                          : handed_on                   ? waited / 7 * 4
                          : near && !YieldsToRows(step) ? waited
                                                        : waited / 3 * 2;
  if (run.timeout_ns && counts > run.timeout_ns) {
    FailTimeout(run, step, rank, waited);
    return false;
  }
  return true;
}

// Waits until `arrived()` is true. Returns false if the group has failed; the awaited data must not be used then. The
// slow half takes about a microsecond. `kPolls` polls of global memory take tens of microseconds; polls of shared
// memory are faster and need a larger number. `notify(waiting)` is called beside the slow half, and Notify::kHere says
// whether the wait is for an event of this node (node/transport.cuh).
struct NoNotice {
  static constexpr bool kHere = true;
  __device__ __forceinline__ void operator()(const Waiting&) const {}
};
template <int kPolls = 64, class Arrived, class Notify = NoNotice>
__device__ __forceinline__ bool WaitUntil(Arrived arrived, const Running& run, Step step, int rank,
                                          Notify notify = {}) {
  if (arrived()) return true;
  Waiting waiting;
  do {
#pragma unroll 1
    for (int poll = 0; poll < kPolls; ++poll) {
      if (!arrived()) continue;
      if (waiting.shown) StoreRelaxedSystem(&run.mailbox->progress, PackProgress(run.epoch));
      return true;
    }
  } while (KeepWaiting(run, step, rank, &waiting, Notify::kHere) && (notify(waiting), true));
  return false;
}

// Waits until rank `rank` has written this operation's epoch into the flag.
__device__ __forceinline__ bool WaitFlag(const uint32_t* flag, const Running& run, uint32_t epoch, Step step,
                                         int rank) {
  return WaitUntil([&] { return LoadAcquireSystem(flag) == epoch; }, run, step, rank);
}

// Waits until a counter of this GPU has reached `target`. All threads of the block call it; all get the answer.
__device__ __forceinline__ bool BlockAwait(const uint32_t* counter, uint32_t target, const Running& run) {
  bool arrived = true;
  if (threadIdx.x == 0) {
    arrived = WaitUntil([&] { return LoadAcquireGpu(counter) >= target; }, run, Step::kLocalBlocks, run.rank);
  }
  return __syncthreads_and(arrived);
}

}  // namespace xen_moe::XEN_MOE_VARIANT
