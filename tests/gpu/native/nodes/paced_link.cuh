// transport.cuh for virtual nodes of one host with a slow link between them: puts go into a queue in device memory, and
// a pacer, a kernel that runs beside the operations, carries them out by pointer at so many bytes a second and no more.
// For measuring how well the kernels across nodes hide the slow link, where there is no network card.
//
// What it models: a card for each rank. Warps post puts and go on; the card takes them in the order in which they were
// posted, one after the other, reads the source when its turn comes, and raises a put's signal when the last of its
// bytes would have left at the given rate, or later where the copy itself took longer. Time that the card was idle is
// not made up for. Signals of puts behind each other may come in any order, as on a network that reorders: a block may
// be late with its copy. What it does not: latency of a network, headers and limits of messages, several puts that come
// into one card at once (the incoming side has no limit), and the multiprocessors of the GPU that the pacer takes,
// which a card does not.
//
// Memory order: a post follows the fence of Transport and is released by its sequence number; a put's stores, a fence
// at system scope by every thread of the pacer's block, then the signal.
#pragma once

#include "cuda_kernels/peer_transport.cuh"

namespace native {

using namespace xen_moe;

constexpr uint32_t kPosts = 8192, kMostPosted = 4096;  // room, and how full it gets: every warp may add one at once
constexpr int kPacerThreads = kThreads;

struct Post {
  uint64_t to, from, bytes;
  uint32_t generation, signal;
  int target;
  uint32_t sequence;  // written last: the post's number plus one
};
// One for each rank, in device memory. Zero before the first use.
struct alignas(128) PostQueue {
  uint32_t posted;              // by warps
  alignas(128) uint32_t taken;  // by blocks of the pacer
  uint32_t turn;                // whose turn it is on the card
  uint32_t done;                // puts whose source may be written again
  uint64_t free_at;             // ns of the GPU's timer: when the card has sent what it was given so far
  uint64_t bytes, busy_ns;      // all that went, and how long the card took for it
  Post post[kPosts];
};

struct PacedLink {
  PeerLink peer;
  PostQueue* queue;

  static constexpr bool kReserves = true;
  __device__ __forceinline__ bool Reserve(int) const {
    return LoadRelaxedGpu(&queue->posted) - LoadRelaxedGpu(&queue->done) < kMostPosted;
  }
  __device__ __forceinline__ void Put(uint32_t generation, int target, uint64_t to, uint64_t from,
                                      uint64_t bytes) const {
    PutSignal(generation, target, to, from, bytes, kNoSignal);
  }
  __device__ __forceinline__ void PutSignal(uint32_t generation, int target, uint64_t to, uint64_t from, uint64_t bytes,
                                            uint32_t signal) const {
    if ((threadIdx.x & 31) != 0) return;
    const uint32_t number = atomicAdd(&queue->posted, 1u);
    Post& post = queue->post[number % kPosts];
    post.to = to, post.from = from, post.bytes = bytes;
    post.generation = generation, post.signal = signal, post.target = target;
    __threadfence();
    StoreRelaxedGpu(&post.sequence, number + 1);
  }
  __device__ __forceinline__ uint64_t Count(uint32_t signal) const { return peer.Count(signal); }
  __device__ __forceinline__ int Pending() const {
    return LoadRelaxedGpu(&queue->done) == LoadRelaxedGpu(&queue->posted) ? -1 : peer.rank;
  }
  __device__ __forceinline__ void Fail(int target, uint64_t word) const { peer.Fail(target, word); }
  __device__ __forceinline__ void Tell(int target, int about, uint64_t word) const { peer.Tell(target, about, word); }

  static constexpr uint32_t kNoSignal = 0xFFFFFFFFu;
};

// Blocks take posts in turn, so that one's copy runs beside another's. Leaves when `*stop` and nothing is left.
__global__ void __launch_bounds__(kPacerThreads, 1)
    PacerKernel(PostQueue* queue, const PeerTable* table, int rank, double bytes_per_ns, const volatile int* stop) {
  __shared__ uint32_t number;
  __shared__ bool leave;
  __shared__ uint64_t until;
  for (;;) {
    if (threadIdx.x == 0) number = atomicAdd(&queue->taken, 1u);
    __syncthreads();
    const Post& post = queue->post[number % kPosts];
    if (threadIdx.x == 0) {
      leave = false;
      while (LoadAcquireGpu(&post.sequence) != number + 1) {
        if (*stop && LoadRelaxedGpu(&queue->posted) <= number) {
          leave = true;
          break;
        }
        __nanosleep(100);
      }
      if (!leave) {  // the card's time, in the order of the posts
        while (LoadAcquireGpu(&queue->turn) != number) __nanosleep(20);
        const uint64_t now = NowNs(), from = queue->free_at > now ? queue->free_at : now;
        const uint64_t takes = bytes_per_ns > 0 ? static_cast<uint64_t>(post.bytes / bytes_per_ns) : 0;
        until = queue->free_at = from + takes;
        queue->bytes += post.bytes, queue->busy_ns += takes;
        __threadfence();
        StoreRelaxedGpu(&queue->turn, number + 1);
        while (NowNs() < from) __nanosleep(20);  // it does not read before its turn
      }
    }
    __syncthreads();
    if (leave) return;
    char* const* const staging = table->staging[post.generation % kGenerations];
    const int4* const source = reinterpret_cast<const int4*>(staging[rank] + post.from);
    int4* const there = reinterpret_cast<int4*>(staging[post.target] + post.to);
    constexpr int kInFlight = 16;
    const uint64_t count = post.bytes / 16;
    for (uint64_t base = threadIdx.x; base < count; base += kPacerThreads * kInFlight) {
      int4 v[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (base + i * kPacerThreads < count) v[i] = __ldcs(source + base + i * kPacerThreads);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (base + i * kPacerThreads < count) there[base + i * kPacerThreads] = v[i];
      }
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
      while (NowNs() < until) __nanosleep(20);
      if (post.signal != PacedLink::kNoSignal) {
        uint64_t* const counter = table->counters[post.target] + post.signal;
        asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(counter), "l"(1ull) : "memory");
      }
      atomicAdd(&queue->done, 1u);
    }
    __syncthreads();
  }
}

// The link alone: the puts of an operation's chunks, all of them full, and nothing else. Warps post them in the order
// in which the operations send theirs, each waits for those that come in its place, and the kernel ends with the last.
// What it takes beyond the bytes over the rate is the pacer's own.
__global__ void __launch_bounds__(kThreads, 1)
    LinkOnlyKernel(const __grid_constant__ RailPlan plan, PacedLink link, uint64_t bytes, uint64_t value) {
  const int turns = plan.nodes - 1, items = turns * plan.chunks, warps = static_cast<int>(gridDim.x) * kWarps;
  auto signal = [&](int node, int chunk) {
    return static_cast<uint32_t>(ChunkSignals(kNarrowRanks) + node * 2 * kMaxChunks + chunk);
  };
  auto place = [&](int node, int chunk) {
    return (static_cast<uint64_t>(node) * plan.chunks + chunk) * plan.chunk_bytes;
  };
  const int first = static_cast<int>(blockIdx.x) + static_cast<int>(threadIdx.x / 32 * gridDim.x);
  for (int item = first; item < items; item += warps) {
    const int chunk = item / turns, node = (plan.node + 1 + item % turns) % plan.nodes;
    link.PutSignal(1, node * plan.per_node + plan.index, plan.land + place(plan.node, chunk),
                   plan.send + place(node, chunk), bytes, signal(plan.node, chunk));
  }
  for (int item = first; item < items; item += warps) {
    const int chunk = item / turns, node = (plan.node + plan.nodes - 1 - item % turns) % plan.nodes;
    while (link.Count(signal(node, chunk)) < value) __nanosleep(200);
  }
}

}  // namespace native
