// The routing of a low-latency dispatch of few tokens (IsFew): those who receive the rows number them.
//
// A message has no counts: its lines are the tokens', sent as soon as topk_idx has been read, with no number in a
// slot's word. Every receiving block waits for the lines of all tokens of all sources, keeps their slots in shared
// memory and counts them. A row's number is how many rows its source sends to the same expert before it, which a warp
// counts when it places the row. The messages have the places and the format of low_latency_routing.cuh; its lines of
// counts stay unused.
#pragma once

#include "low_latency_routing.cuh"

namespace XEN_MOE_KERNELS {

// How a dispatch is numbered: what the kernel of low_latency_dispatch.cu is made of.
struct NumberedBySender {
  static constexpr int kRounds = kPlaceRounds;
  static constexpr bool kFew = false;
  __device__ __forceinline__ static SharedPlan Shared(const Routing& r) { return PlanShared(r); }
  // All warps but the first, before the operation's number is known.
  __device__ __forceinline__ static void Prepare(const Plan& plan) {
    if (static_cast<int>(blockIdx.x) < plan.cut.routing) NumberRows(plan);
  }
  // All threads of a block that is to send a share, and has not prepared for it.
  __device__ __forceinline__ static void PrepareLate(const Plan& plan) {
    if (threadIdx.x >= 32) NumberRows(plan);
    __syncthreads();
  }
  // All threads of the block. `begin()` runs when the operation's number is needed; false: nothing is to be sent.
  template <class Begin>
  __device__ __forceinline__ static void Send(const Plan& plan, const Piece& piece, int share, Begin begin) {
    if (begin()) SendRouting(plan, piece, share);
  }
  // All threads of the block: what Sum needs. False: the group has failed.
  template <class Adopt>
  __device__ __forceinline__ static bool Receive(const Plan& plan, const Piece& piece, Adopt adopt) {
    return ReceiveCounts(plan, piece, adopt);
  }
  // The warp that runs StartGroups next: the rows of each group.
  __device__ __forceinline__ static void Sum(const Plan&) {}
  __device__ __forceinline__ static bool Resolve(const Plan& plan, const Piece& piece, int source, int token,
                                                 bool write, int* position) {
    return ResolveRows(plan, piece, source, token, write, position);
  }
};

struct NumberedByReceiver {
  static constexpr int kRounds = kFewPlaceRounds;
  static constexpr bool kFew = true;
  static constexpr uint32_t kAnySlot = 0xFFFF;  // ranked: in a token's last place, if it has a row here

  __device__ __forceinline__ static SharedPlan Shared(const Routing& r) { return PlanFewShared(r); }
  __device__ __forceinline__ static void Prepare(const Plan& plan) {
    if (plan.receiver >= 0) ClearCounts(plan, static_cast<int>(threadIdx.x) - 32, kThreads - 32);
  }
  __device__ __forceinline__ static void PrepareLate(const Plan&) {}

  template <class Begin>
  __device__ __forceinline__ static void Send(const Plan& plan, const Piece& piece, int share, Begin begin) {
    const DispatchParams& p = plan.p;
    const Routing& r = p.routing;
    const int slot = (threadIdx.x & 7) * 2, items = (r.tokens + kRoundLines - 1) / kRoundLines * r.ranks;
#pragma unroll 1
    for (int item = share + LateFirstWarp() * plan.cut.routing; item < items; item += plan.cut.routing * kWarps) {
      const int group = item / r.ranks, first = group * kRoundLines, token = first + piece.line;
      int to = r.rank + 1 + item - group * r.ranks;
      if (to >= r.ranks) to -= r.ranks;
      const int at = token * r.top_k + slot;
      const bool one = token < r.tokens && slot < r.top_k, two = token < r.tokens && slot + 1 < r.top_k;
      const int expert = one ? p.topk_idx[at] : -1, next = two ? p.topk_idx[at + 1] : -1;
      const float weight = one ? p.topk_weights[at] : 0.0f, next_weight = two ? p.topk_weights[at + 1] : 0.0f;
      if (!begin()) return;
      if (!Holds(plan.run.active, to)) continue;
      uint4 v = make_uint4(0, 0, 0, 0);
      v.x = Word(r, to, expert);
      if (v.x) v.y = __float_as_uint(weight);
      if (!piece.flags) v.z = Word(r, to, next);
      if (v.z) v.w = __float_as_uint(next_weight);
      StoreRound(plan.run.half[to] + plan.MessageAt(r.rank, p.staging.count_lines + first), piece, v,
                 min(kRoundLines, r.tokens - first), plan.run.epoch);
    }
    if (p.clean_topk_idx) {
      if (!begin()) return;
#pragma unroll 1
      for (int i = share * kThreads + threadIdx.x; i < r.tokens * r.top_k; i += plan.cut.routing * kThreads) {
        const int expert = p.topk_idx[i];
        const bool real = expert >= 0 && expert < r.experts;
        p.clean_topk_idx[i] = real && Holds(plan.run.active, plan.cut.by_local_experts(expert)) ? expert : -1;
      }
    }
  }

  __device__ __forceinline__ static void Sum(const Plan& plan) { SumCounts(plan, threadIdx.x, 32); }

  template <class Adopt>
  __device__ __forceinline__ static bool Receive(const Plan& plan, const Piece& piece, Adopt adopt) {
    const Routing& r = plan.p.routing;
    const int warp = threadIdx.x / 32, q = threadIdx.x & 7, lines = r.ranks * r.tokens;
    const bool ranked = r.layout == Layout::kRanked;
    int* const counts = plan.In<int>(plan.at.counts);
    for (bool patient = false;; patient = true) {  // at first it does not wait long
      bool idle = false, good = true;
#pragma unroll 1
      for (int first = warp * kRoundLines; good && first < max(lines, (warp + 1) * kRoundLines);
           first += kWarps * kRoundLines) {
        const int line = first + piece.line, source = static_cast<int>(plan.cut.by_tokens(line)),
                  token = line - source * r.tokens;
        const bool active = line < lines && Holds(plan.run.active, source);
        const char* const from = plan.run.half[r.rank] + plan.MessageAt(source, plan.p.staging.count_lines + token);
        uint4 v;
        auto missing = [&] {
          v = LoadOfLine(from, q, active);
          if (static_cast<int>(threadIdx.x) < plan.Shares()) {
            idle = LoadRelaxedGpu(&plan.run.control->started[threadIdx.x]) != plan.run.epoch;
          }
          return __ballot_sync(0xFFFFFFFFu, active && piece.flags && v.w != plan.run.epoch);
        };
        auto source_of = [&](uint32_t mask) {
          return static_cast<int>(plan.cut.by_tokens(first + (__ffs(mask) - 1) / 8));
        };
        good = AwaitLines(missing, source_of, [&] { return !patient; }, plan.run, Step::kMetadata);
        const uint32_t one = Checked(r, active ? v.x : 0), two = Checked(r, active && !piece.flags ? v.z : 0);
        const uint32_t any = __ballot_sync(0xFFFFFFFFu, (one | two) != 0) >> (piece.line * 8) & 0xFF;
        const uint32_t last = ranked && piece.flags && any ? kAnySlot : two;
        if (line < lines) {
          plan.In<uint32_t>(plan.at.experts)[line * 8 + q] = one | last << 16;
          plan.In<float2>(plan.at.weights)[line * 8 + q] = make_float2(__uint_as_float(v.y), __uint_as_float(v.w));
          if (ranked) {
            if (piece.flags && any) atomicAdd(&counts[source], 1);
          } else {
            if (one) atomicAdd(&counts[source * plan.at.local + one - 1], 1);
            if (two) atomicAdd(&counts[source * plan.at.local + two - 1], 1);
          }
        }
      }
      Phase(3);
      if (!__syncthreads_or(patient ? !good : idle || !good)) break;
      if (patient) return false;
      adopt();
      __syncthreads();
      ClearCounts(plan, threadIdx.x, kThreads);  // they are counted anew
      __syncthreads();
    }
    return true;
  }

  __device__ __forceinline__ static bool Resolve(const Plan& plan, const Piece&, int source, int token, bool write,
                                                 int* position) {
    const Routing& r = plan.p.routing;
    const int lane = threadIdx.x & 31, at = (source * r.tokens + token) * kFewSlots + lane;
    const bool ranked = r.layout == Layout::kRanked;
    uint32_t word = lane < r.top_k ? plan.In<uint16_t>(plan.at.experts)[at] : 0;
    const float weight = lane < r.top_k ? plan.In<float>(plan.at.weights)[at] : 0.0f;
    // Of the source's slots, eight a lane at a time: those before this one that go to the same expert.
    const uint4* const slots = plan.In<uint4>(plan.at.experts) + source * r.tokens * (kFewSlots / 8);
    uint32_t number = 0;
#pragma unroll 1
    for (uint32_t m = __ballot_sync(0xFFFFFFFFu, word != 0); m; m &= m - 1) {
      const int slot = __ffs(m) - 1, end = token * kFewSlots + (ranked ? 0 : slot);
      const uint32_t wanted = ranked ? kAnySlot : __shfl_sync(0xFFFFFFFFu, word, slot);
      uint32_t before = 0;
#pragma unroll 1
      for (int first = lane * 8; first < end; first += 32 * 8) {
        const uint4 seen = slots[first / 8];
        const uint32_t pairs[4] = {seen.x, seen.y, seen.z, seen.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          before += first + 2 * i < end && (pairs[i] & 0xFFFF) == wanted;
          before += first + 2 * i + 1 < end && pairs[i] >> 16 == wanted;
        }
      }
      before = __reduce_add_sync(0xFFFFFFFFu, before);
      if (ranked || lane == slot) number = before;
      if (ranked) break;
    }
    if (word) word |= number << 16;
    *position = ResolveSlots(plan, source, token, word, weight, write);
    return true;
  }

 private:
  // A slot's word for rank `to`: local expert + 1; 0: not there.
  __device__ __forceinline__ static uint32_t Word(const Routing& r, int to, int expert) {
    const int local = expert - to * r.local_experts;
    return expert >= 0 && expert < r.experts && local >= 0 && local < r.local_experts ? local + 1 : 0;
  }
  // What a peer sent is no address yet.
  __device__ __forceinline__ static uint32_t Checked(const Routing& r, uint32_t word) {
    return word <= static_cast<uint32_t>(r.local_experts) ? word : 0;
  }
  __device__ __forceinline__ static void ClearCounts(const Plan& plan, int thread, int threads) {
#pragma unroll 1
    for (int i = thread; i < plan.p.routing.ranks * plan.at.local; i += threads) plan.In<int>(plan.at.counts)[i] = 0;
  }
};

}  // namespace XEN_MOE_KERNELS
