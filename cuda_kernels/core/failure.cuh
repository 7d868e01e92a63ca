// How an operation waits, gives up, and tells everybody.
//
// Every wait of every kernel is a WaitUntil. It ends when what it waits for has arrived, when the group has failed (the
// failure word in this rank's mailbox), when the other rank has announced another operation, or when the time is up.
// A rank that gives up first puts its failure word into the mailbox of the first rank that takes part: whoever comes
// first there decides, so that all ranks name the same root. Then the word goes to all mailboxes but those of the dead,
// and all waits of the group end. It stays until the host clears it. Nothing here is on the way of an operation that
// goes well: the slow half of WaitUntil runs after many polls.
#pragma once

#include "cuda_kernels/core/params.h"
#include "cuda_kernels/core/rank_mask.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

constexpr uint64_t kShowWaitingNs = 1000000;  // a wait that lasts longer is shown in `progress`, and again this often
constexpr uint64_t kDescriptorGraceNs =
    1000000000;  // for the operation that a failed rank has announced to be readable
constexpr uint64_t kMismatchGraceNs =
    200000000;  // for the other ranks' announcements, to see which one is odd; a quarter of the timeout at most
// For a rank that says it waits to say it again; an eighth of the timeout at most.
constexpr uint64_t kBeatGraceNs = 500000000;
// For a rank that seems to have gone on without this one; an eighth of the timeout at most. While a killed process is
// taken apart its kernels still run, but stores to it or from it may already be lost: that looks the same, until the
// host hears of the death, a second later.
constexpr uint64_t kProceededGraceNs = 5000000000;

// The operation that a block runs: in shared memory, written when it begins.
struct Running {
  char* half[kRanks];    // the current half of each rank's staging area: its flags
  char* data[kRanks];    // and its data
  uint64_t line_border;  // where lines begin in a half
  char* scratch;
  Control* control;
  Mailbox* mailbox;
  uint64_t timeout_ns;
  uint32_t epoch, signature;
  Operation operation;
  int ranks, rank;
  RankMask members;     // bit mask of the ranks that take part
  RankMask active;      // of those that this one exchanges anything with: none when it is out itself
  RankMask reachable;   // bit mask of the ranks whose memory this one has pointers to: those of its node
  RankMask meets;       // of those, the active ones: announcements go between them
  uint32_t generation;  // of the memory that it uses (low byte)
  uint32_t current;     // the one that Control::current had
  uint32_t reported;    // the one that the host knows of
  bool refused;         // the group had failed when this block started
  bool outside;         // this block could not check in: it has no part in the operation
  bool repeats;         // low latency: another block does the share of this one
  bool settled;         // low latency: Control has these members already
  bool last;            // this block is the last to finish
  bool all_refused;
};

// Whether the host has said that this rank's process has ended.
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

// The rank of this node through which everything of `rank`, of another node, comes: that of its place (rail_plan.h).
__device__ __forceinline__ int RailPeerOf(const Running& run, int rank) {
  return FirstRank(run.reachable) + rank % CountRanks(run.reachable);
}
// Whether `rank` can be told anything: it takes part, and its process has not ended.
__device__ __forceinline__ bool CanReceive(const Running& run, int rank) {
  return Holds(run.members & ~LoadDead(*run.mailbox), rank);
}
// The rank of this node that hands on to this one what comes from `rank`, of another node; past a rail it is this one.
__device__ __forceinline__ int ForwarderOf(const Running& run, int rank) {
  const int through = RailPeerOf(run, rank);
  return CanReceive(run, through) ? through : run.rank;
}
// Whether `rank`, of another node, hears for whom `about`, of this one, waits: of each node the one with its place, and
// where that one does not listen all others there.
__device__ __forceinline__ bool ReceivesNotice(const Running& run, int rank, int about) {
  const int per_node = CountRanks(run.reachable), of_place = rank / per_node * per_node + about % per_node;
  return CanReceive(run, rank) && (rank == of_place || !CanReceive(run, of_place));
}
// Where this node has heard for whom `rank`, of another one, waits.
__device__ __forceinline__ const uint64_t* NoticeOf(const Running& run, int rank) {
  return &run.control->mailbox[ForwarderOf(run, rank)]->told[rank];
}

// `most`, or this part of the timeout where that is less.
__device__ __forceinline__ uint64_t Grace(const Running& run, uint64_t most, uint64_t part) {
  return run.timeout_ns && run.timeout_ns / part < most ? run.timeout_ns / part : most;
}

// Whether the rank that shows at `where` that it waits, as `shown` said, has been stopped: a process that was killed in
// the middle of a wait shows it for ever.
__device__ __forceinline__ bool IsStalled(const Running& run, const uint64_t* where, uint64_t shown) {
  const uint64_t start = NowNs(), grace = Grace(run, kBeatGraceNs, 8);
  while (LoadRelaxedSystem(where) == shown) {
    if (LoadRelaxedSystem(&run.mailbox->failure)) return false;  // somebody else has found the root
    if (NowNs() - start > grace) return true;
  }
  return false;
}
// Whether this node goes on hearing that `rank`, of another one, waits, in this operation or the one before; in
// `*shown`, for whom.
__device__ __forceinline__ bool IsReportedWaiting(const Running& run, int rank, uint64_t* shown) {
  const uint64_t* const told = NoticeOf(run, rank);
  *shown = LoadRelaxedSystem(told);
  return ProgressWaits(*shown) && !EpochBefore(NextEpoch(ProgressEpoch(*shown)), run.epoch) &&
         !IsStalled(run, told, *shown);
}

// A time-out: the rank waited for may itself wait. Follows what the ranks show until one waits for nobody. What those
// of another node show is told here while one of them waits for a third node (transport.cuh). Of one that is not heard
// to wait, either it owes, or the one that hands on here what it sends, which shows whether it waits for it.
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
        if (asked != rank && EpochBefore(run.epoch, ProgressEpoch(shown))) break;  // it has handed on what came
        rank = asked;
        if (EpochBefore(ProgressEpoch(shown), run.epoch)) step = Step::kArrival;  // it has not even started
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

// What `rank` announced under this number, or what it came to join with.
__device__ __forceinline__ uint64_t AnnouncedWord(const Mailbox& mailbox, uint32_t epoch, int rank) {
  const uint64_t word = LoadRelaxedSystem(&mailbox.announcements[epoch & 1][rank]);
  return AnnouncedEpoch(word) == epoch ? word : LoadRelaxedSystem(&mailbox.joins[rank]);
}

// `rank` has announced another operation under this number. The odd one of more than two ranks is the root.
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
  const bool odd = with_me == with_them ? run.rank > rank : with_me < with_them;  // this rank
  Fail(run, Cause::kMismatch, Step::kArrival, odd ? run.rank : rank, odd ? rank : run.rank, 0);
}

// Whether `rank` has begun a later operation and never came to this one: it was told that this rank is out. One that
// agrees about the members does not end an operation before it has seen the announcements of all of them.
static __device__ __noinline__ bool ProceededWithout(const Running& run, int rank) {
  if (!Holds(run.reachable, rank)) return false;
  const uint64_t shown = LoadRelaxedSystem(&run.control->mailbox[rank]->progress);
  if (shown == 0 || !EpochBefore(run.epoch, ProgressEpoch(shown))) return false;
  __threadfence_system();
  return AnnouncedEpoch(LoadAcquireSystem(&run.mailbox->announcements[run.epoch & 1][rank])) != run.epoch &&
         LoadAcquireSystem(&run.mailbox->joins[rank]) == 0;
}

// Whether a wait for a credit steps back behind waits for rows (rounds.cuh): who gives none may itself wait for rows,
// of a rank that this one waits for too.
__device__ __forceinline__ bool YieldsToRows(Step step) { return kRings && step == Step::kCredit; }
// Whether this rank shows that it waits for rows.
__device__ __forceinline__ bool ShowsRows(const Running& run) {
  const uint64_t shown = LoadRelaxedSystem(&run.mailbox->progress);
  return ProgressEpoch(shown) == run.epoch && ProgressWaits(shown) && ProgressStep(shown) == Step::kRows;
}

struct Waiting {
  uint64_t start = 0, shown = 0;
  uint64_t alone = 0;  // since when the rank awaited seems to have gone on without this one
};

// The slow half of a wait. False: give up. `rank`: who is awaited; this rank for its own blocks. `here`: for what a
// rank of this node does; what comes from another node is handed on then, by a block that waits for it.
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
  // A block of this GPU that waits for a peer gives up first, and names that peer; so does a rank of another node that
  // waits for one of its own, and tells this one in time; and so does who hands on, before those that wait for it.
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

// Waits until `arrived()` is true. False: the group has failed, and what was awaited must not be used. The slow half
// takes about a microsecond: `kPolls` of memory take tens of them, of shared memory it must be more.
// `tell(waiting)` is called beside it, and says whether that is for something of this node (transport.cuh).
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

// Waits for rank `rank` to have written this operation's epoch.
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
