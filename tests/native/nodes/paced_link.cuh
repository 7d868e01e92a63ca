// transport.cuh for virtual nodes of one host with a slow link between them: puts go into a queue in device memory, and
// a pacer, a kernel that runs beside the operations, carries them out by pointer at no more than a given number of
// bytes a second. For measuring how well the kernels across nodes hide the slow link, where there is no network card.
//
// The model is a card for each rank. Warps post puts and go on; the card takes them in the order in which they were
// posted, one after the other, reads the source when its turn comes, and raises a put's signal when the last of its
// bytes would have left at the given rate, or later where the copy itself took longer. Time that the card was idle is
// not made up for. Signals of puts behind each other may come in any order, as on a network that reorders: a block may
// be late with its copy. It does not model the latency of a network, headers and limits of messages, several puts that
// come into one card at once (the incoming side has no limit), and the multiprocessors of the GPU that the pacer takes,
// which a card does not.
//
// Memory order: a post follows the fence of Transport and is released by its sequence number; a put's stores, a fence
// at system scope by every thread of the pacer's block, then the signal.
#pragma once

#include "cuda_kernels/node/peer_transport.cuh"

namespace native {

using namespace xen_moe;

constexpr uint32_t kPosts = 8192, kMostPosted = 4096;  // room, and how full it gets: every warp may add one at once
constexpr int kPacerThreads = kThreads;

struct Post {
  uint64_t to, from, bytes;
  uint64_t begin, until;  // ns of the GPU's timer: when the card reads it, and has sent it
  uint32_t generation, signal;
  int target;
  uint32_t sequence;   // by who posts, written last: the post's number plus one
  uint32_t scheduled;  // by the card, likewise
};
// One for each rank, in device memory. Zero before the first use.
struct alignas(128) PostQueue {
  uint32_t posted;              // by warps
  alignas(128) uint32_t taken;  // by blocks that copy
  uint32_t done;                // puts whose source may be written again
  alignas(128) uint64_t bytes;  // all that went
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
  __device__ __forceinline__ void Notify(int target, int about, uint64_t word) const {
    peer.Notify(target, about, word);
  }

  static constexpr uint32_t kNoSignal = 0xFFFFFFFFu;
};

// The card: gives every post the time at which it is sent, in the order of the posts, 32 at a time. One warp. From
// post `number` on, until `*stop` and nothing is left.
__device__ inline void RunCard(PostQueue* queue, uint32_t number, double bytes_per_ns, const volatile int* stop) {
  constexpr uint32_t kAll = 0xFFFFFFFFu;
  const int lane = static_cast<int>(threadIdx.x);
  uint64_t free_at = 0, sent = 0;  // the latter: of this lane's posts
  for (;;) {
    Post& post = queue->post[(number + lane) % kPosts];
    const uint32_t waits = ~__ballot_sync(kAll, LoadAcquireGpu(&post.sequence) == number + lane + 1);
    const int come = waits ? __ffs(static_cast<int>(waits)) - 1 : 32;
    if (come == 0) {
      const bool left = lane == 0 && *stop && LoadRelaxedGpu(&queue->posted) <= number;
      if (__any_sync(kAll, left)) break;
      __nanosleep(50);
      continue;
    }
    const uint64_t bytes = lane < come ? post.bytes : 0;
    const uint64_t takes = bytes_per_ns > 0 ? static_cast<uint64_t>(bytes / bytes_per_ns) : 0;
    uint64_t time = takes;  // of the posts up to this one
    for (int d = 1; d < 32; d *= 2) {
      const uint64_t before = __shfl_up_sync(kAll, time, d);
      if (lane >= d) time += before;
    }
    const uint64_t now = __shfl_sync(kAll, NowNs(), 0);
    if (free_at < now) free_at = now;
    if (lane < come) {
      post.begin = free_at + time - takes, post.until = free_at + time;
      __threadfence();
      StoreRelaxedGpu(&post.scheduled, number + lane + 1);
    }
    free_at += __shfl_sync(kAll, time, 31), sent += bytes;
    number += come;
  }
  atomicAdd(reinterpret_cast<unsigned long long*>(&queue->bytes), sent);
}

// Block 0 is the card; the remaining blocks copy, post after post, side by side. From post `first` on.
__global__ void __launch_bounds__(kPacerThreads, 1)
    PacerKernel(PostQueue* queue, const PeerTable* table, int rank, uint32_t first, double bytes_per_ns,
                const volatile int* stop) {
  if (blockIdx.x == 0) {
    if (threadIdx.x < 32) RunCard(queue, first, bytes_per_ns, stop);
    return;
  }
  __shared__ uint32_t number;
  __shared__ bool leave;
  for (;;) {
    if (threadIdx.x == 0) {
      number = atomicAdd(&queue->taken, 1u);
      const Post& post = queue->post[number % kPosts];
      leave = false;
      while (!leave && LoadAcquireGpu(&post.scheduled) != number + 1) {
        leave = *stop && LoadRelaxedGpu(&queue->posted) <= number;
        __nanosleep(50);
      }
      while (!leave && NowNs() < post.begin) __nanosleep(20);  // it does not read before its turn
    }
    __syncthreads();
    if (leave) return;
    const Post& post = queue->post[number % kPosts];
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
      while (NowNs() < post.until) __nanosleep(20);
      if (post.signal != PacedLink::kNoSignal) {
        uint64_t* const counter = table->counters[post.target] + post.signal;
        asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(counter), "l"(1ull) : "memory");
      }
      atomicAdd(&queue->done, 1u);
    }
    __syncthreads();
  }
}

// The link alone: the puts of an operation, leads and then chunks, all leads of one size and all chunks, and nothing
// else. Warps post them in the order in which the operations send theirs, each waits for those that come in its place,
// and the kernel ends with the last. Its time beyond the bytes over the rate is the pacer's own.
__global__ void __launch_bounds__(kThreads, 1)
    LinkOnlyKernel(const __grid_constant__ RailPlan plan, PacedLink link, uint64_t lead_bytes, uint64_t chunk_bytes,
                   uint64_t value) {
  const int turns = plan.nodes - 1, leads = turns * plan.leads, items = leads + turns * plan.chunks;
  const int warps = static_cast<int>(gridDim.x) * kWarps;
  auto signal = [&](int node, int item) {
    const int message = item < leads ? kMaxChunks + item / turns : (item - leads) / turns;
    return static_cast<uint32_t>(ChunkSignals(kSmallGroup) + node * 2 * kRailMessages + message);
  };
  const int first = static_cast<int>(blockIdx.x) + static_cast<int>(threadIdx.x / 32 * gridDim.x);
  for (int item = first; item < items; item += warps) {
    const int node = (plan.node + 1 + item % turns) % plan.nodes, rank = node * plan.per_node + plan.index;
    auto put = [&](uint64_t receive, uint64_t send, int count, int n, uint64_t room, uint64_t bytes) {
      auto place = [&](int of) { return (static_cast<uint64_t>(of) * count + n) * room; };
      link.PutSignal(1, rank, receive + place(plan.node), send + place(node), bytes, signal(plan.node, item));
    };
    if (item < leads) {
      put(plan.lead_receive, plan.lead_send, plan.leads, item / turns, plan.lead_bytes, lead_bytes);
    } else {
      put(plan.receive, plan.send, plan.chunks, (item - leads) / turns, plan.chunk_bytes, chunk_bytes);
    }
  }
  for (int item = first; item < items; item += warps) {
    const int node = (plan.node + plan.nodes - 1 - item % turns) % plan.nodes;
    while (link.Count(signal(node, item)) < value) __nanosleep(200);
  }
}

}  // namespace native
