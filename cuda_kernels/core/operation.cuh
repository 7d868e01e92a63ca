// The beginning and the end of every operation.
//
// Begin: each block checks in, so that two operations on one channel never mix. Block 0 announces the operation to all
// active ranks. Each block finds the memory that this operation uses. End: the last block to finish waits for every
// rank's announcement of this operation (workspace.h says what follows from that), poisons the results if the group has
// failed, and makes room for the next operation.
//
// Only the end waits for blocks that the GPU has not started yet: an operation makes progress with any number of
// resident blocks, and a block that has finished leaves its place to the next.
//
// Memory order: check-in and end use the word {owner, epoch} with GPU-scope acquire and a fence before the store. An
// announcement is relaxed: it says that this kernel has started, hence that the kernel before it on this rank has
// ended, and a kernel's reads and writes are complete when it ends.
#pragma once

#include "cuda_kernels/core/failure.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

// Thread 0: waits until no other operation holds the channel. The claim and the load access the same word, one after
// the other. The load counts only if it shows this call as the owner; then the epoch beside it cannot change before
// this block has finished. The operation that holds the channel always ends by itself, because all its waits end.
static __device__ __noinline__ bool AwaitOwner(Running& run, uint32_t call_id) {
  const uint64_t start = NowNs();
  for (bool told = false;;) {
    ClaimWordGpu(&run.control->owner, call_id);
    const uint64_t word = LoadAcquireGpu(reinterpret_cast<const uint64_t*>(&run.control->owner));
    run.epoch = NextEpoch(static_cast<uint32_t>(word >> 32));
    if (static_cast<uint32_t>(word) == call_id) return true;
    const uint64_t waited = NowNs() - start;
    if (run.timeout_ns && !told && waited / 4 > run.timeout_ns) {
      told = true;
      Fail(run, Cause::kConcurrent, Step::kOwner, run.rank, run.rank, waited);
    }
    if (run.timeout_ns && waited / 8 > run.timeout_ns) return false;  // the channel is broken: take no part
    __nanosleep(500);
  }
}
__device__ __forceinline__ bool CheckIn(Running& run, uint32_t call_id) {
  ClaimWordGpu(&run.control->owner, call_id);
  const uint64_t word = LoadAcquireGpu(reinterpret_cast<const uint64_t*>(&run.control->owner));
  run.epoch = NextEpoch(static_cast<uint32_t>(word >> 32));
  return static_cast<uint32_t>(word) == call_id || AwaitOwner(run, call_id);
}

// The announcements of this operation that a warp has seen. Lane `rank` keeps that rank's word; in large groups, where
// a lane has several ranks, the words are read again.
struct Announcements {
  const Running& run;
  uint64_t word = 0;

  __device__ __forceinline__ explicit Announcements(const Running& running) : run(running) {}
  // Block 0 of a joining rank announces only when all other ranks have joined, and until then shows which rank is
  // missing. The other blocks first wait for that announcement: otherwise they would show that they wait for a rank
  // that itself waits for this one, and a time-out would name it as the root.
  __device__ __forceinline__ void AwaitOwn() {
    if ((threadIdx.x & 31) == 0) {
      const uint64_t* at = At(run.rank);
      WaitUntil([&] { return AnnouncedEpoch(LoadAcquireSystem(at)) == run.epoch; }, run, Step::kLocalBlocks, run.rank);
    }
    __syncwarp();
  }
  // Each lane waits for its own ranks. All lanes call it.
  __device__ __forceinline__ void Await() {
    const uint32_t epoch = run.epoch;
    ForEachOwnRank(threadIdx.x & 31, run.ranks, [&](int rank) {
      if (!Holds(run.meets, rank)) return;
      const uint64_t* at = At(rank);
      if (WaitUntil([&] { return AnnouncedEpoch(word = LoadAcquireSystem(at)) == epoch; }, run, Step::kArrival, rank) &&
          AnnouncedSignature(word) != run.signature) {
        FailMismatch(run, rank);
      }
    });
    __syncwarp();
  }
  // Returns whether all of this lane's ranks in `meets` have announced this operation.
  __device__ __forceinline__ bool Match() const {
    bool match = true;
    ForEachOwnRank(threadIdx.x & 31, run.ranks, [&](int rank) {
      const uint64_t said = kLargeGroups ? LoadRelaxedSystem(At(rank)) : word;
      match &=
          !Holds(run.meets, rank) || (AnnouncedEpoch(said) == run.epoch && AnnouncedSignature(said) == run.signature);
    });
    return match;
  }
  // Returns the oldest generation among `ranks`, a set that is not empty, to all lanes; `*rank` is a rank that has it.
  // All lanes call it.
  __device__ __forceinline__ uint32_t OldestGeneration(const RankMask& ranks, int* rank) const {
    *rank = FirstRank(ranks);
    uint32_t oldest = Generation(*rank);
    RankMask others = ranks;
    DropFirst(others);
    for (; Any(others); DropFirst(others)) {
      const int r = FirstRank(others);
      const uint32_t generation = Generation(r);
      if (OlderGeneration(generation, oldest)) oldest = generation, *rank = r;
    }
    return oldest;
  }

 private:
  __device__ __forceinline__ const uint64_t* At(int rank) const {
    return &run.mailbox->announcements[run.epoch & 1][rank];
  }
  // Broadcasts one lane's value: the lanes of a warp need not have loaded at the same time.
  __device__ __forceinline__ uint32_t Generation(int rank) const {
    if constexpr (kLargeGroups) {
      return AnnouncedGeneration(__shfl_sync(0xFFFFFFFFu, LoadRelaxedSystem(At(rank)), 0));
    } else {
      return AnnouncedGeneration(__shfl_sync(0xFFFFFFFFu, word, rank));
    }
  }
};

// The active ranks of this operation meet, because some of them were not active in the operation before (workspace.h).
// The first warp of block 0 calls it before it announces. Returns false if the group has failed. A rank that has
// already passed this point has been here too.
static __device__ __noinline__ bool Join(const Running& run) {
  const int lane = threadIdx.x & 31;
  bool joined = true;
  ForEachOwnRank(lane, run.ranks, [&](int rank) {
    if (!Holds(run.meets, rank)) return;
    StoreRelaxedSystem(&run.control->mailbox[rank]->joins[run.rank], PackAnnouncement(run.epoch, run.signature, 0));
  });
  ForEachOwnRank(lane, run.ranks, [&](int rank) {
    if (!joined || !Holds(run.meets, rank)) return;
    const uint64_t* const at = &run.mailbox->joins[rank];
    uint64_t word = 0;
    joined = WaitUntil([&] { return (word = LoadAcquireSystem(at)) && !EpochBefore(AnnouncedEpoch(word), run.epoch); },
                       run, Step::kArrival, rank);
    if (joined && AnnouncedEpoch(word) == run.epoch && AnnouncedSignature(word) != run.signature) {
      FailMismatch(run, rank);
      joined = false;
    }
  });
  joined = __all_sync(0xFFFFFFFFu, joined);
  if (!joined) return false;
  ForEachOwnRank(lane, run.ranks, [&](int rank) {
    if (!Holds(run.meets, rank)) return;
    uint64_t* const at = &run.mailbox->joins[rank];
    const uint64_t word = LoadRelaxedSystem(at);
    if (word && AnnouncedEpoch(word) == run.epoch) ClearWordSystem(at, word);
  });
  return true;
}

// The fields of a memory table that a lane needs, when the host or another block may just have written the table. All
// loads are in flight together.
struct LaneMemory {
  OwnStaging staging;
  char* scratch;  // of this rank
  uint64_t flag_bytes, data_bytes, scratch_bytes;
  uint32_t generation;
  __device__ __forceinline__ explicit LaneMemory(const MemoryTable* table) : staging(*table) {
    const volatile MemoryTable& seen = *table;
    scratch = seen.scratch;
    flag_bytes = seen.flag_bytes;
    data_bytes = seen.data_bytes;
    scratch_bytes = seen.scratch_bytes;
    generation = seen.generation & 0xFF;
  }
  __device__ __forceinline__ bool Suffices(const Needs& needs) const {
    return needs.flag_bytes <= flag_bytes && needs.data_bytes <= data_bytes && needs.scratch_bytes <= scratch_bytes;
  }
};

// The first warp: finds memory for an operation that needs more than the current generation has, or that some rank
// joins. All ranks see the same words, hence take the same table or fail in the same way.
static __device__ __noinline__ const MemoryTable* AwaitMemory(const Running& run, const Needs& needs) {
  Announcements announcements(run);
  announcements.AwaitOwn();
  announcements.Await();
  if (__shfl_sync(0xFFFFFFFFu, LoadRelaxedSystem(&run.mailbox->failure), 0)) return nullptr;
  int rank;
  const uint32_t oldest = announcements.OldestGeneration(run.meets, &rank);
  const MemoryTable* table = &run.control->memory[oldest % kGenerations];
  const LaneMemory memory(table);
  if (memory.generation == oldest && memory.Suffices(needs)) return table;
  if ((threadIdx.x & 31) == 0) Fail(run, Cause::kMemory, Step::kArrival, rank, run.rank, 0);
  __syncwarp();
  return nullptr;
}

// Returns the signature that an operation announces when some ranks are inactive.
static __device__ __noinline__ uint32_t SignatureWithInactive(const Descriptor& all, RankMask out) {
  Descriptor descriptor = all;
  descriptor.flags |= DescribedInactive(out);
  return Signature(descriptor);
}

// The first warp of block 0, before it announces the operation: sets the flags and lines of this rank's other half to
// 0. No rank writes there: the operation before this one has ended here, so its flags are no longer awaited, and no
// rank begins the next operation before this rank has announced this one. Shares that other blocks have begun stay
// marked as begun.
static __device__ __noinline__ void ClearOldFlags(const Running& run, const LaneMemory& memory) {
  const int lane = threadIdx.x & 31;
  const uint32_t other = (run.epoch & 1) ^ 1;
  char* const own = memory.staging.OfAny(run.rank);
  if (own == nullptr) return;
  uint32_t* const flags = reinterpret_cast<uint32_t*>(own + other * (memory.flag_bytes + memory.data_bytes));
  for (uint64_t i = lane; i < memory.flag_bytes / 4; i += 32) flags[i] = 0;
  for (int i = lane; i < 2 * kMaxBlocks; i += 32) {
    const uint32_t begun = LoadRelaxedGpu(&run.control->started[i]);
    if (begun != run.epoch) atomicCAS(&run.control->started[i], begun, 0u);
  }
  if (lane == 0) run.control->cleared[other] = run.epoch;
  __syncwarp();
  __threadfence_system();
}

// The first warp of block 0 of a refused operation. Another block of it may have found a mismatch before this block
// started. Then the failure names this rank, and every rank needs the descriptor of its operation for the error text.
// No operation proceeds because of this announcement.
static __device__ __noinline__ void AnnounceMismatch(const Running& run, const Call& call, uint64_t failure,
                                                     RankMask out) {
  const int lane = threadIdx.x;
  const Failure found = UnpackFailure(failure);
  if (found.cause != Cause::kMismatch || found.epoch != run.epoch) return;
  if (lane >= 16) {
    const uint32_t* from = reinterpret_cast<const uint32_t*>(&call.descriptor);
    const uint32_t flags = lane - 16 == offsetof(Descriptor, flags) / 4 ? DescribedInactive(out) : 0;
    StoreRelaxedSystem(reinterpret_cast<uint32_t*>(&call.mailbox->descriptor) + lane - 16, from[lane - 16] | flags);
  }
  const RankMask alive = run.meets & ~LoadDead(*call.mailbox);
  ForEachOwnRank(lane, run.ranks, [&](int rank) {
    if (!Holds(alive, rank)) return;
    const uint64_t word = PackAnnouncement(run.epoch, run.signature, LoadRelaxedSystem(&call.control->newest));
    StoreRelaxedSystem(&call.control->mailbox[rank]->announcements[run.epoch & 1][run.rank], word);
  });
}

// How BeginFirstWarp treats ranks of other nodes when all ranks share NVLink: there are none. node/direct.cuh has the
// other implementation.
struct SingleNode {
  static constexpr bool kAny = false;
  __device__ __forceinline__ static constexpr bool GoesOn() { return false; }
};

// Releases the host's waiter for the beginning of an asynchronous operation. One thread of each block calls it.
__device__ __forceinline__ void ShowBegin(const Call& call) {
  if (call.begun && blockIdx.x == 0) StoreRelaxedSystem(call.begun, call.begin);
}

// The first warp's part of BeginOperation.
template <class Far = SingleNode>
__device__ __forceinline__ void BeginFirstWarp(Running& run, const Call& call, Operation operation, int ranks, int rank,
                                               RankMask reachable = EveryRank(), const Far& far = Far()) {
  const int lane = threadIdx.x;
  const RankMask all_ranks = AllRanks(ranks);
  const RankVotes takes_part(lane, ranks,
                             [&](int r) { return r < ranks && (call.active == nullptr || call.active[r]); });
  if (lane == 0) {
    ShowBegin(call);
    run.control = call.control;
    run.mailbox = call.mailbox;
    run.timeout_ns = call.timeout_ns;
    run.signature = call.signature;
    run.operation = operation;
    run.ranks = ranks;
    run.rank = rank;
    run.active = all_ranks;
    run.reachable = run.meets = all_ranks & reachable;
    run.outside = !CheckIn(run, call.call_id);
  }
  const RankMask members = takes_part.Ballot(), out = all_ranks & ~members;
  if (lane == 0) {
    run.members = members;
    run.active = Holds(members, rank) ? members : NoRanks();
    run.meets = run.active & reachable;
    if (Any(out)) run.signature = SignatureWithInactive(call.descriptor, out);
  }
  __syncwarp();
  const uint32_t epoch = run.epoch;
  const RankMask meets = run.meets;
  LaneMemory memory(&call.control->current);
  const uint32_t current = memory.generation;
  const RankMask before = LoadMembers(call.control->current);
  const uint32_t newest = LoadRelaxedSystem(&call.control->newest);
  const uint32_t reported = LoadRelaxedSystem(&call.control->reported);
  const uint32_t cleared = LoadRelaxedSystem(&call.control->cleared[(epoch & 1) ^ 1]);
  const uint64_t failure = __shfl_sync(0xFFFFFFFFu, LoadRelaxedSystem(&call.mailbox->failure), 0);
  bool refused = failure != 0 || run.outside;
  if (failure && blockIdx.x == 0 && !run.outside) AnnounceMismatch(run, call, failure, out);
  if (!refused) {
    const bool joins = AnyOfFirstLane((Far::kAny ? run.active : meets) & ~before);
    if (blockIdx.x == 0 && !far.GoesOn()) {
      if (lane >= 16) {
        const uint32_t* from = reinterpret_cast<const uint32_t*>(&call.descriptor);
        const uint32_t flags = lane - 16 == offsetof(Descriptor, flags) / 4 ? DescribedInactive(out) : 0;
        StoreRelaxedSystem(reinterpret_cast<uint32_t*>(&call.mailbox->descriptor) + lane - 16, from[lane - 16] | flags);
      }
      if (lane == 0) StoreRelaxedSystem(&call.mailbox->progress, PackProgress(epoch));
      if (joins) refused = !Join(run);
      if constexpr (Far::kAny) {
        if (joins && !refused) {
          if (lane == 0) run.generation = current;  // a signal without data still needs some memory to travel through
          __syncwarp();
          refused = !far.Join(run, run.active & ~run.reachable);
        }
      }
      if (!refused && Any(meets) && epoch - cleared >= kClearAfter) {
        ClearOldFlags(run, memory);
        if constexpr (Far::kAny) far.ForgetEpochs(run);
      }
      // Every rank, including this one, gets the same word.
      const uint64_t word = PackAnnouncement(epoch, run.signature, __shfl_sync(0xFFFFFFFFu, newest, 0));
      ForEachOwnRank(lane, ranks, [&](int r) {
        if (refused || !Holds(meets, r)) return;
        StoreRelaxedSystem(&call.control->mailbox[r]->announcements[epoch & 1][rank], word);
      });
    }
    if (!refused && (joins || (Any(meets) && !memory.Suffices(call.needs)))) {
      const MemoryTable* chosen = AwaitMemory(run, call.needs);
      refused = chosen == nullptr;
      if (chosen) memory = LaneMemory(chosen);
    }
  }
  if (!refused && lane < ranks) {
    const uint64_t half_bytes = memory.flag_bytes + memory.data_bytes;
    ForEachOwnRank(lane, ranks, [&](int r) {
      char* const half = memory.staging.Of(r) + (epoch & 1) * half_bytes;
      run.half[r] = half;
      run.data[r] = half + half_bytes - call.needs.data_bytes;
    });
    if (lane == 0) {
      run.line_border = LineBorder(memory.flag_bytes);
      run.scratch = memory.scratch;
      run.generation = memory.generation;
      run.current = current;
      run.reported = reported;
    }
  }
  if (lane == 0) run.refused = refused;
}
// All threads of every block call it first. Afterwards `run` is complete. If run.refused is set, the block only poisons
// and finishes. An inactive rank runs its operation like an active one, with an empty run.active. `reachable`: the
// ranks of this node; ranks of other nodes get announcements in another way (node/rail.cuh). `far`: how to reach those,
// node/direct.cuh.
template <class Far = SingleNode>
__device__ __forceinline__ void BeginOperation(Running& run, const Call& call, Operation operation, int ranks, int rank,
                                               RankMask reachable = EveryRank(), const Far& far = Far()) {
  if (threadIdx.x < 32) BeginFirstWarp(run, call, operation, ranks, rank, reachable, far);
  __syncthreads();
}

// Every byte of a failed result: NaN in bf16, f16, f32, e4m3 and e5m2, -1 in integers. Counts are zero instead.
constexpr uint8_t kPoison = 0xFF;

// Writes `value` into one share of `bytes` bytes: share `index` of `count` blocks.
static __device__ __noinline__ void FillBytes(void* to, uint64_t bytes, uint8_t value, uint32_t index, uint32_t count) {
  if (to == nullptr) return;
  char* const at = static_cast<char*>(to);
  const uint64_t first = static_cast<uint64_t>(index) * blockDim.x + threadIdx.x;
  const uint64_t step = static_cast<uint64_t>(count) * blockDim.x;
  const uint64_t ahead = (16 - reinterpret_cast<uint64_t>(at) % 16) % 16;
  const uint64_t head = ahead < bytes ? ahead : bytes;
  const uint64_t vectors = (bytes - head) / 16;
  const int word = value * 0x01010101;
  for (uint64_t i = first; i < vectors; i += step) {
    reinterpret_cast<int4*>(at + head)[i] = make_int4(word, word, word, word);
  }
  for (uint64_t i = first; i < head; i += step) at[i] = static_cast<char>(value);
  for (uint64_t i = head + vectors * 16 + first; i < bytes; i += step) at[i] = static_cast<char>(value);
}

// Copies the failure to the host, once. One thread of the last block calls it.
static __device__ __noinline__ void MirrorFailure(const Running& run, uint64_t word) {
  Control* const control = run.control;
  if (atomicExch(&control->mirrored, 1u)) return;
  const RankMask alive = run.reachable & ~LoadDead(*run.mailbox);
  for (int r = 0; r < run.ranks; ++r) {
    if (Holds(alive, r)) ClaimWordSystem(&control->mailbox[r]->failure, word);  // in case the host wrote it here
  }
  ErrorRecord* const record = control->error;
  const Failure failure = UnpackFailure(word);
  const Mailbox* own = run.mailbox;
  auto copy = [&](int rank, Descriptor* to) {
    if (rank < 0 || rank >= run.ranks || failure.cause == Cause::kDead) rank = run.rank;
    if (!Holds(alive, rank)) rank = run.rank;
    const uint32_t* from = reinterpret_cast<const uint32_t*>(&control->mailbox[rank]->descriptor);
    Descriptor seen;
    // A descriptor is stored without a fence, and its announcement may not have arrived here yet. The descriptor is
    // complete when its signature equals the announced one. In a mismatch both ranks have announced an operation.
    const uint64_t start = NowNs();
    do {
      for (int i = 0; i < 16; ++i) reinterpret_cast<uint32_t*>(&seen)[i] = LoadRelaxedSystem(from + i);
      const uint64_t announced = AnnouncedWord(*own, failure.epoch, rank);
      const bool came = AnnouncedEpoch(announced) == failure.epoch;
      if (came ? Signature(seen) == AnnouncedSignature(announced) : failure.cause != Cause::kMismatch) break;
      const uint64_t shown = LoadRelaxedSystem(&control->mailbox[rank]->progress);
      // that rank proceeded, and will never announce this epoch
      if (!came && EpochBefore(failure.epoch, ProgressEpoch(shown))) break;
    } while (NowNs() - start < kDescriptorGraceNs);
    for (int i = 0; i < 16; ++i) {
      StoreRelaxedSystem(reinterpret_cast<uint32_t*>(to) + i, reinterpret_cast<const uint32_t*>(&seen)[i]);
    }
  };
  copy(failure.rank, &record->of_rank);
  copy(failure.other, &record->of_other);
  const bool theirs = failure.cause == Cause::kTimeout && failure.other < run.ranks && Holds(alive, failure.other);
  const int told = theirs ? failure.other : run.rank;
  StoreRelaxedSystem(&record->waited_ns, LoadRelaxedSystem(&control->mailbox[told]->waited_ns));
  __threadfence_system();
  StoreRelaxedSystem(&record->failure, word);
}

// Thread 0 of the last block: leaves the state that the next operation expects.
__device__ __forceinline__ void CompleteOperation(const Running& run) {
  Control* const control = run.control;
  control->ticket = 0;
  for (uint32_t& claimed : control->claimed) claimed = 0;
  control->completed[0] = control->completed[1] = 0;
  StoreMembers(control->current, run.members);
  __threadfence();
  StoreRelaxedGpu(reinterpret_cast<uint64_t*>(&control->owner), static_cast<uint64_t>(run.epoch) << 32);
}

// All threads of the last block: waits for all announcements, poisons the results if the group has failed, ends the
// operation.
template <class Poison>
__device__ __noinline__ void EndOperation(Running& run, Poison poison) {
  Control* const control = run.control;
  bool fill = false;
  if (threadIdx.x < 32) {
    const bool all_refused = run.all_refused;
    // If a block of this rank gave up, the failure word is in the mailbox by now. The announcements arrive
    // independently of it.
    uint64_t failure = LoadRelaxedSystem(&run.mailbox->failure);
    Announcements announcements(run);
    if (!all_refused) announcements.Await();
    if (!__all_sync(0xFFFFFFFFu, announcements.Match())) failure = LoadRelaxedSystem(&run.mailbox->failure);
    failure = __shfl_sync(0xFFFFFFFFu, failure, 0);
    if (failure) {
      fill = !all_refused;
      if (threadIdx.x == 0) MirrorFailure(run, failure);
    } else {
      int rank;  // An inactive rank joins before it uses memory again, so it need not keep an old generation.
      const uint32_t next = Any(run.meets) ? announcements.OldestGeneration(run.meets, &rank)
                                           : LoadRelaxedSystem(&control->newest) & 0xFF;
      if (run.current != next) {
        const uint32_t* from = reinterpret_cast<const uint32_t*>(&control->memory[next % kGenerations]);
        uint32_t* const to = reinterpret_cast<uint32_t*>(&control->current);
        for (uint32_t i = threadIdx.x; i < sizeof(MemoryTable) / 4; i += 32) to[i] = LoadRelaxedSystem(from + i);
      }
      if (threadIdx.x == 0 && run.reported != run.generation) {
        control->reported = run.generation;
        StoreRelaxedSystem(&control->error->generation, run.generation);
      }
    }
    __syncwarp();
  }
  if (__syncthreads_or(fill)) poison(0, 1);
  __syncthreads();
  if (threadIdx.x == 0) CompleteOperation(run);
}

// How blocks count in Control::ticket: finished blocks in the lower half, refused blocks in the upper half.
struct Ticket {
  uint32_t sum;
  __device__ __forceinline__ static Ticket Take(Control* control, bool refused, bool) {
    const uint32_t part = refused ? 0x10001u : 1u;
    return {atomicAdd(&control->ticket, part) + part};
  }
  __device__ __forceinline__ bool Last() const { return (sum & 0xFFFF) == gridDim.x; }
  __device__ __forceinline__ bool AllRefused() const { return sum >> 16 == gridDim.x; }
};

// All threads of every block call it last. `poison(index, count)` writes the share of block `index` of `count` of a
// failed result. A refused block fills its own share; if only some blocks were refused, the last block fills
// everything.
template <class Tickets = Ticket, class Poison>
__device__ __forceinline__ void FinishOperation(Running& run, Poison poison) {
  if (run.refused) poison(blockIdx.x, gridDim.x);
  if (run.outside) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const Tickets ticket = Tickets::Take(run.control, run.refused, false);
    run.last = ticket.Last();
    run.all_refused = ticket.AllRefused();
    if (run.last) __threadfence();
  }
  __syncthreads();
  if (run.last) EndOperation(run, poison);
}

}  // namespace xen_moe::XEN_MOE_VARIANT
