// How a kernel reaches the ranks of other nodes: six calls, independent of the library that implements them.
//
// A kernel accesses the memory of ranks of its node by pointer. To other ranks it puts: it copies from its own memory
// into that of the other rank, and raises counters there. `Link` implements this; it has, for all lanes of a warp
// together,
//   kReserves        whether a put could wait for the network. If so,
//   Reserve(rank)    makes sure that the next put to `rank` need not, or returns false: one lane alone
//   Put(generation, rank, to, from, bytes)                  as Transport::Put, after a Reserve
//   PutSignal(generation, rank, to, from, bytes, signal)    as Transport::PutSignal, after a Reserve
//   Count(signal)    an own counter, with acquire semantics at system scope: any lane alone
//   Pending()        a rank to which a put of this context is still being read from here, or -1: any lane alone
//   Fail(rank, word) as Transport::Fail, after a Reserve: one lane alone
//   Notify(rank, about, word)
//                    puts `word`, which Mailbox::told[about] is here, or a later one, into that of `rank`, after a
//                    Reserve: one lane alone
// A context is a warp of an operation: statements about the order of puts are about the puts of one warp.
//
// Offsets count from the start of a generation's staging area, which has the same size on all ranks; offsets and sizes
// are multiples of 16 bytes. Counters only grow. Their values before an operation must be kept on the device: a CUDA
// graph repeats a launch with the host's numbers of the first time.
#pragma once

#include "cuda_kernels/core/failure.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

// other nodes are notified of a wait that lasts longer than this part of the timeout
constexpr uint64_t kNoticeShare = 4;
constexpr uint64_t kNoticeBeats = 4;  // notices within the time in which a rank must show another beat

// Notifies other nodes of the waits of this node's ranks, unless a warp of this rank has just done so: ranks there may
// wait for these ranks. One lane calls it.
template <class Link>
static __device__ __noinline__ void NotifyWaiting(const Link& link, const Running& run) {
  unsigned long long* const last = reinterpret_cast<unsigned long long*>(&run.control->told_ns);
  const uint64_t now = NowNs(), before = LoadRelaxedSystem(&run.control->told_ns);
  if (now - before < Grace(run, kBeatGraceNs, 8) / kNoticeBeats || atomicCAS(last, before, now) != before) return;
  for (RankMask near = run.reachable; Any(near); DropFirst(near)) {
    const int about = FirstRank(near);
    if (!CanReceive(run, about)) continue;
    const uint64_t word = LoadRelaxedSystem(&run.control->mailbox[about]->progress);
    StoreRelaxedSystem(&run.mailbox->told[about], word);
    __threadfence_system();
    for (RankMask far = run.members & ~run.reachable; Any(far); DropFirst(far)) {
      const int rank = FirstRank(far);
      if (!ReceivesNotice(run, rank, about)) continue;
      if constexpr (Link::kReserves) {
        if (!link.Reserve(rank)) continue;
      }
      link.Notify(rank, about, word);
    }
  }
}
// A wait for an event of another node; other nodes are notified if it takes long.
template <class Link>
struct NotifyPeers {
  static constexpr bool kHere = false;
  const Link& link;
  const Running& run;
  __device__ __forceinline__ void operator()(const Waiting& waiting) const {
    if (run.timeout_ns && waiting.shown > waiting.start + run.timeout_ns / kNoticeShare) NotifyWaiting(link, run);
  }
};

template <class Link>
class Transport {
 public:
  __device__ __forceinline__ Transport(const Link& link, const Running& run) : link_(link), run_(run) {}

  // Copies `bytes` bytes at `from` of this rank's memory to `to` of `rank`'s, in no order with any other put. It copies
  // what the lanes of this warp stored to `from` before. All lanes call it.
  __device__ __forceinline__ void Put(int rank, uint64_t to, uint64_t from, uint64_t bytes) const {
    Publish();
    if (Reserve(rank)) link_.Put(run_.generation, rank, to, from, bytes);
  }
  // Puts as Put does; then `rank`'s counter `signal` grows by one, and a reader of the new value sees this put and all
  // earlier puts of this warp to that rank. With 0 bytes it only signals.
  __device__ __forceinline__ void PutSignal(int rank, uint64_t to, uint64_t from, uint64_t bytes,
                                            uint32_t signal) const {
    Publish();
    if (Reserve(rank)) link_.PutSignal(run_.generation, rank, to, from, bytes, signal);
  }
  // Waits until this rank's counter `signal` has reached `value`; `rank` raises it. Returns false if the group has
  // failed. All lanes call it.
  __device__ __forceinline__ bool Wait(uint32_t signal, uint64_t value, Step step, int rank) const {
    bool arrived = true;
    if ((threadIdx.x & 31) == 0) {
      arrived = WaitFor([&] { return link_.Count(signal) >= value; }, step, rank);
    }
    arrived = __shfl_sync(0xFFFFFFFFu, arrived, 0);
    __syncwarp();  // all lanes may read what one lane has acquired
    return arrived;
  }
  // WaitUntil for an event that `rank`, of another node, causes. Any lane alone.
  template <class Arrived>
  __device__ __forceinline__ bool WaitFor(Arrived arrived, Step step, int rank) const {
    return WaitUntil(arrived, run_, step, rank, NotifyPeers<Link>{link_, run_});
  }
  // Returns this rank's counter `signal`, with acquire semantics at system scope. Any lane alone.
  __device__ __forceinline__ uint64_t Count(uint32_t signal) const { return link_.Count(signal); }
  // Waits until the sources of all puts of this warp may be written again. Returns false if the group has failed.
  __device__ __forceinline__ bool Flush() const {
    bool done = true;
    if ((threadIdx.x & 31) == 0) {
      for (int rank; done && (rank = link_.Pending()) >= 0;) {
        done = WaitFor([&] { return link_.Pending() != rank; }, Step::kCredit, rank);
      }
    }
    done = __shfl_sync(0xFFFFFFFFu, done, 0);
    __syncwarp();
    return done;
  }
  // A barrier with the ranks of `ranks`, which all call it: their counters `first` + rank grow to `value`, one more
  // than at the barrier before. Only for operations that ranks join. Returns false if the group has failed.
  __device__ __forceinline__ bool Barrier(const RankMask& ranks, uint32_t first, uint64_t value) const {
    for (RankMask m = ranks; Any(m); DropFirst(m)) PutSignal(FirstRank(m), 0, 0, 0, first + run_.rank);
    bool met = true;
    for (RankMask m = ranks; met && Any(m); DropFirst(m)) {
      const int rank = FirstRank(m);
      met = Wait(first + rank, value, Step::kArrival, rank);
    }
    return met;
  }
  // Puts a failure word into `rank`'s mailbox, unless there is one already, and does not wait. One lane calls it.
  __device__ __forceinline__ void Fail(int rank, uint64_t word) const {
    if constexpr (Link::kReserves) {
      if (!link_.Reserve(rank)) return;
    }
    link_.Fail(rank, word);
  }

 private:
  __device__ __forceinline__ static void Publish() {
    __threadfence_system();
    __syncwarp();
  }
  // Returns false if the group has failed; then nothing is put.
  __device__ __forceinline__ bool Reserve(int rank) const {
    bool room = true;
    if constexpr (Link::kReserves) {
      if ((threadIdx.x & 31) == 0) {
        room = WaitFor([&] { return link_.Reserve(rank); }, Step::kCredit, rank);
      }
      room = __shfl_sync(0xFFFFFFFFu, room, 0);
    }
    return room;
  }
  const Link& link_;
  const Running& run_;
};

}  // namespace xen_moe::XEN_MOE_VARIANT
