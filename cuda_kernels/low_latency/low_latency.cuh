// The two ends of a low-latency operation: as operation.cuh, with as few round trips to memory as possible.
//
// Begin: the block reads all words of Control at once, before it knows which of them it needs: the tables of all
// generations, then the claim of the channel and {owner, epoch, generation, members} in one load. A table that
// Control::current names was written before any operation may use it and does not change while it is in use, so the
// early load is as good as a late one; the 16 bytes with the owner say which table is the current one. Every unusual
// case, inactive ranks among them, takes the code of operation.cuh. End: the announcements and the failure word are
// read while the block's slower warps finish, and read again before it takes its ticket if they had not arrived. A
// block that gave up marks that in its ticket, so the last block learns of it without another load. A successful
// operation executes no fence: the kernel's end makes its rows visible, and a ticket is an atomic operation whose sum
// shows whether all blocks have finished and leaves nothing to clear.
#pragma once

#include "cuda_kernels/core/claims.cuh"
#include "cuda_kernels/core/launch.cuh"
#include "cuda_kernels/core/operation.cuh"
#include "cuda_kernels/low_latency/ll128.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

// Upper bound for the failure path: how long the last block of a failed operation waits for rows to become visible,
// normally microseconds. Reached only if a block of an earlier operation overwrote a word of Control::visible; never
// observed.
constexpr uint64_t kVisibleNs = 100000000;

// {owner, epoch, generation, members} in one load of one aligned sector, which no store splits. The load is relaxed: an
// operation returns `owner` after the atomic operations of all its blocks on Control.
__device__ __forceinline__ uint4 LoadVectorGpu(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

static __device__ __noinline__ void BeginSlowly(Running& run, const Call& call, Operation operation, int ranks,
                                                int rank) {
  BeginFirstWarp(run, call, operation, ranks, rank);
}

// One word of each memory table. Not an array: a run-time index would move it to memory.
template <class T>
struct OfTables {
  T a, b, c, d;
  template <class F>
  __device__ __forceinline__ explicit OfTables(F load) : a(load(0)), b(load(1)), c(load(2)), d(load(3)) {}
  __device__ __forceinline__ T At(uint32_t generation) const {
    const T even = generation & 2 ? c : a, odd = generation & 2 ? d : b;
    return generation & 1 ? odd : even;
  }
};
static_assert(kGenerations == 4, "OfTables");

// The first warp calls it: StartShare for operations with inactive ranks, so that nothing is sent twice (claims.cuh).
static __device__ __noinline__ void StartOnce(Running& run, int share) {
  if (threadIdx.x == 0 && !run.refused) {
    run.repeats = atomicExch(&run.control->started[share], run.epoch) == run.epoch;
  }
}
// The first warp calls it; a __syncthreads must follow. Afterwards the state is that after BeginOperation.
__device__ __forceinline__ void BeginLowLatency(Running& run, const Call& call, Operation operation, int ranks,
                                                int rank) {
  const int lane = threadIdx.x & 31;
  if constexpr (kLargeGroups) {  // a lane may have several ranks
    if (lane == 0) run.repeats = false;
    return BeginSlowly(run, call, operation, ranks, rank);
  }
  Control* const control = call.control;
  const volatile MemoryTable* const tables = control->memory;
  const OfTables<char*> staging([&](int i) { return tables[i].staging[lane % kRanks]; });
  const OfTables<uint64_t> flag_bytes([&](int i) { return tables[i].flag_bytes; });
  const OfTables<uint64_t> data_bytes([&](int i) { return tables[i].data_bytes; });
  const OfTables<uint32_t> generation([&](int i) { return tables[i].generation; });
  Mailbox* const peer = lane < ranks ? LoadRelaxedSystem(&control->mailbox[lane]) : nullptr;
  const RankMask all_ranks = AllRanks(ranks);
  const bool takes_part = lane >= ranks || call.active == nullptr || call.active[lane];
  if (lane == 0) run.repeats = run.settled = false;
  const uint32_t newest = LoadRelaxedSystem(&control->newest);
  const uint32_t reported = LoadRelaxedSystem(&control->reported);
  const uint32_t cleared = LoadRelaxedSystem(&control->cleared[lane & 1]);
  const uint64_t failure = LoadRelaxedSystem(&call.mailbox->failure);
  if (lane == 0) ShowBegin(call), ClaimWordGpu(&control->owner, call.call_id);
  const uint4 head = LoadVectorGpu(reinterpret_cast<const uint4*>(&control->owner));
  // Broadcasts one lane's value: the lanes of a warp need not have loaded at the same time.
  const uint32_t owner = __shfl_sync(0xFFFFFFFFu, head.x, 0);
  const uint32_t epoch = NextEpoch(__shfl_sync(0xFFFFFFFFu, head.y, 0));
  const uint32_t current = __shfl_sync(0xFFFFFFFFu, head.z, 0);
  const uint32_t before = __shfl_sync(0xFFFFFFFFu, head.w, 0);
  char* const at = staging.At(current);
  const uint64_t flags = flag_bytes.At(current), data = data_bytes.At(current);
  const bool good = owner == call.call_id && failure == 0 && takes_part && before == FirstWord(all_ranks) &&
                    epoch - cleared < kClearAfter && generation.At(current) == current &&
                    call.needs.flag_bytes <= flags && call.needs.data_bytes <= data;
  if (!__all_sync(0xFFFFFFFFu, good)) return BeginSlowly(run, call, operation, ranks, rank);
  if (blockIdx.x == 0) {
    const uint64_t word = PackAnnouncement(epoch, call.signature, __shfl_sync(0xFFFFFFFFu, newest, 0));
    if (lane < ranks) {
      StoreRelaxedSystem(&peer->announcements[epoch & 1][rank], word);
    } else if (lane >= 16) {
      const uint32_t* from = reinterpret_cast<const uint32_t*>(&call.descriptor);
      StoreRelaxedSystem(reinterpret_cast<uint32_t*>(&call.mailbox->descriptor) + lane - 16, from[lane - 16]);
    }
    if (lane == 0) StoreRelaxedSystem(&call.mailbox->progress, PackProgress(epoch));
  }
  if (lane < ranks) {
    const uint64_t half_bytes = flags + data;
    run.half[lane] = at + (epoch & 1) * half_bytes;
    run.data[lane] = run.half[lane] + half_bytes - call.needs.data_bytes;
  }
  if (lane == 0) {
    run.line_border = LineBorder(flags);
    run.control = control;
    run.mailbox = call.mailbox;
    run.timeout_ns = call.timeout_ns;
    run.epoch = epoch;
    run.signature = call.signature;
    run.operation = operation;
    run.ranks = ranks;
    run.rank = rank;
    run.members = run.active = run.reachable = run.meets = all_ranks;
    run.scratch = nullptr;
    run.generation = run.current = current & 0xFF;
    run.reported = reported;
    run.refused = run.outside = false;
    run.settled = true;
  }
}

// Returns a warp's place among the warps that share the work: the first warp finds the epoch and comes last.
__device__ __forceinline__ int LateFirstWarp() { return static_cast<int>(threadIdx.x / 32 + kWarps - 1) % kWarps; }

// Control::ticket of a low-latency operation. The parts of all its blocks sum to zero in the low bits, and those of
// fewer blocks never do; the higher bits count refused blocks and blocks that gave up. So the word is zero again after
// a successful operation.
struct LowLatencyTicket {
  static constexpr int kRefusedBit = 10, kGaveUpBit = 21;
  static constexpr uint32_t kCount = (1u << (kGaveUpBit - kRefusedBit)) - 1;
  static_assert(kMaxBlocks < 1 << kRefusedBit, "the low bits are zero only if all have come");
  uint32_t sum;

  __device__ __forceinline__ static LowLatencyTicket Take(Control* control, bool refused, bool gave_up) {
    const uint32_t part = (blockIdx.x == 0 ? 1u - gridDim.x : 1u) + (static_cast<uint32_t>(refused) << kRefusedBit) +
                          (static_cast<uint32_t>(gave_up) << kGaveUpBit);
    return {atomicAdd(&control->ticket, part) + part};
  }
  __device__ __forceinline__ bool Last() const { return (sum & ((1u << kRefusedBit) - 1)) == 0; }
  __device__ __forceinline__ uint32_t Refused() const { return sum >> kRefusedBit & kCount; }  // of the last block
  __device__ __forceinline__ bool AllRefused() const { return Refused() == gridDim.x; }
};

// Waits until the other blocks' rows are visible, so that no late row overwrites poison. All threads of the last block
// call it.
// Refused blocks have written no rows.
static __device__ __noinline__ void AwaitVisible(const Running& run) {
  const uint32_t refused = LowLatencyTicket{LoadRelaxedGpu(&run.control->ticket)}.Refused();
  const uint64_t start = NowNs();
  for (bool late = false; !late;) {
    uint32_t visible = refused;
    for (uint32_t base = 0; base < gridDim.x; base += blockDim.x) {
      const uint32_t block = base + threadIdx.x;
      visible += __syncthreads_count(block < gridDim.x && LoadRelaxedGpu(&run.control->visible[block]) == run.epoch);
    }
    if (visible >= gridDim.x) break;
    late = __syncthreads_or(threadIdx.x == 0 && NowNs() - start > kVisibleNs);
  }
  FenceGpu();
}

template <class Poison>
__device__ __noinline__ void FinishRefused(Running& run, Poison poison) {
  FinishOperation<LowLatencyTicket>(run, poison);
}
// All threads of every block call it last, with whether the thread has completed its work. A block takes its ticket
// before its rows are visible: another warp makes them visible meanwhile and records that in Control::visible. Only the
// last block of a failed operation reads that record.
template <class Poison>
__device__ __forceinline__ void FinishLowLatency(Running& run, bool good, Poison poison_share) {
  if constexpr (kLargeGroups) return FinishOperation(run, poison_share);
  auto poison = [&](uint32_t index, uint32_t count) {
    if (count == 1 && gridDim.x > 1) AwaitVisible(run);
    poison_share(index, count);
  };
  if (run.refused || run.outside) return FinishRefused(run, poison);
  __shared__ bool last, plain;
  const int lane = threadIdx.x & 31;
  uint64_t word = 0, failure = 0;
  auto look = [&] {
    if (lane < run.ranks) word = LoadRelaxedSystem(&run.mailbox->announcements[run.epoch & 1][lane]);
    failure = LoadRelaxedSystem(&run.mailbox->failure);
  };
  if (threadIdx.x < 32) look();
  const bool gave_up = !__syncthreads_and(good);
  if (threadIdx.x == 32) {
    FenceGpu();
    StoreRelaxedGpu(&run.control->visible[blockIdx.x], run.epoch);
  }
  if (threadIdx.x < 32) {
    if (!__all_sync(0xFFFFFFFFu, !Holds(run.active, lane) || AnnouncedEpoch(word) == run.epoch)) look();
    LowLatencyTicket ticket{};
    if (lane == 0) {
      if (gave_up) FenceGpu();  // the last block must see the cause
      ticket = LowLatencyTicket::Take(run.control, false, gave_up);
    }
    const bool fits =
        !Holds(run.active, lane) || (AnnouncedEpoch(word) == run.epoch && AnnouncedSignature(word) == run.signature &&
                                     AnnouncedGeneration(word) == run.current);
    const bool all_fit = __all_sync(0xFFFFFFFFu, fits && failure == 0);
    if (lane == 0) {
      last = ticket.Last();
      plain = ticket.sum == 0 && all_fit && Any(run.active) && run.reported == run.generation;
      if (last && plain) {
        if (!run.settled) {
          StoreMembers(run.control->current, run.members);
          FenceGpu();
        }
        StoreRelaxedGpu(reinterpret_cast<uint64_t*>(&run.control->owner), static_cast<uint64_t>(run.epoch) << 32);
      } else if (last) {
        run.last = true;
        run.all_refused = false;
        __threadfence();
      }
    }
  }
  __syncthreads();
  if (last && !plain) EndOperation(run, poison);
}

}  // namespace xen_moe::XEN_MOE_VARIANT
