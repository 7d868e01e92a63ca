// The routing of a low-latency dispatch of few tokens (IsFew): the receivers number the rows.
//
// A message has no counts: its lines are those of the tokens, sent as soon as topk_idx has been read, without a number
// in a slot's word. Every receiving block waits for the lines of all tokens of all sources and keeps a key for every
// slot: local expert + 1, then its place among all slots, so that the order of keys is the order of rows. A row's
// position is the number of keys below its own; a warp counts them when it places the row. The messages have the places
// and the format of routing.cuh; the lines of counts stay unused.
#pragma once

#include "cuda_kernels/low_latency/routing.cuh"

namespace xen_moe::XEN_MOE_VARIANT {

// How a dispatch is numbered: the parts that the kernel of low_latency/dispatch.cu calls.
struct NumberedBySender {
  static constexpr int kRounds = kPlaceRounds;
  static constexpr bool kFew = false;
  __device__ __forceinline__ static SharedPlan Shared(const Routing& r) { return PlanShared(r); }
  // All warps but the first, before the epoch is known.
  __device__ __forceinline__ static void Prepare(const Plan& plan) {
    if (static_cast<int>(blockIdx.x) < plan.schedule.routing) NumberRows(plan);
  }
  // All threads of a block that must send a share and has not prepared for it.
  __device__ __forceinline__ static void PrepareLate(const Plan& plan) {
    if (threadIdx.x >= 32) NumberRows(plan);
    __syncthreads();
  }
  // All threads of the block. `begin()` runs when the epoch is needed; it returns false if nothing is to be sent.
  template <class Begin>
  __device__ __forceinline__ static void Send(const Plan& plan, const Piece& piece, int share, Begin begin) {
    if (begin()) SendRouting(plan, piece, share);
  }
  // All threads of the block: receives what Resolve needs. Returns false if the group has failed.
  template <class Adopt>
  __device__ __forceinline__ static bool Receive(const Plan& plan, const Piece& piece, Adopt adopt) {
    if (!ReceiveCounts(plan, piece, adopt)) return false;
    const int* const rows = plan.In<int>(plan.at.groups);
    StartGroups(plan.p.routing, plan.at.local, plan.In<int>(plan.at.starts), [&](int l) { return rows[l]; });
    return true;
  }
  __device__ __forceinline__ static bool Resolve(const Plan& plan, const Piece& piece, int source, int token,
                                                 bool write, int* position) {
    return ResolveRows(plan, piece, source, token, write, position);
  }
  // All threads of the block: the work that is left when its rows have been placed.
  __device__ __forceinline__ static void Complete(const Plan& plan) {
    LayoutScratch scratch{};
    scratch.columns = plan.at.local;
    scratch.totals = plan.In<int>(plan.at.groups);
    ZeroPadding(plan.p, scratch, plan.In<int>(plan.at.starts), plan.receiver, plan.schedule.receivers);
    ClearUnusedRows(plan.p, scratch, plan.receiver, plan.schedule.receivers);
  }
};

struct NumberedByReceiver {
  static constexpr int kRounds = kFewPlaceRounds;
  static constexpr bool kFew = true;
  static constexpr int kPlaceBits = 16;  // of a key

  __device__ __forceinline__ static SharedPlan Shared(const Routing& r) { return PlanFewShared(r); }
  __device__ __forceinline__ static void Prepare(const Plan& plan) {
    if (Reports(plan)) ClearCounts(plan, static_cast<int>(threadIdx.x) - 32, kThreads - 32);
  }
  __device__ __forceinline__ static void PrepareLate(const Plan&) {}

  template <class Begin>
  __device__ __forceinline__ static void Send(const Plan& plan, const Piece& piece, int share, Begin begin) {
    const DispatchParams& p = plan.p;
    const Routing& r = p.routing;
    const int slot = (threadIdx.x & 7) * 2, items = (r.tokens + kRoundLines - 1) / kRoundLines * r.ranks;
#pragma unroll 1
    for (int item = share + LateFirstWarp() * plan.schedule.routing; item < items;
         item += plan.schedule.routing * kWarps) {
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
      for (int i = share * kThreads + threadIdx.x; i < r.tokens * r.top_k; i += plan.schedule.routing * kThreads) {
        const int expert = p.topk_idx[i];
        const bool real = expert >= 0 && expert < r.experts;
        p.clean_topk_idx[i] = real && Holds(plan.run.active, plan.schedule.by_local_experts(expert)) ? expert : -1;
      }
    }
  }

  template <class Adopt>
  __device__ __forceinline__ static bool Receive(const Plan& plan, const Piece& piece, Adopt adopt) {
    const Routing& r = plan.p.routing;
    const int warp = threadIdx.x / 32, q = threadIdx.x & 7, lines = r.ranks * r.tokens;
    int* const counts = plan.In<int>(plan.at.counts);
    for (bool patient = false;; patient = true) {  // the first wait is short
      bool idle = false, good = true;
#pragma unroll 1
      for (int first = warp * kRoundLines; good && first < max(lines, (warp + 1) * kRoundLines);
           first += kWarps * kRoundLines) {
        const int line = first + piece.line, source = static_cast<int>(plan.schedule.by_tokens(line)),
                  token = line - source * r.tokens;
        const bool active = line < lines && Holds(plan.run.active, source);
        const char* const from = plan.run.half[r.rank] + plan.MessageAt(source, plan.p.staging.count_lines + token);
        uint4 v;
        auto missing = [&] {
          v = LoadLinePart(from, q, active);
          if (static_cast<int>(threadIdx.x) < plan.Shares()) {
            idle = LoadRelaxedGpu(&plan.run.control->started[threadIdx.x]) != plan.run.epoch;
          }
          return __ballot_sync(0xFFFFFFFFu, active && piece.flags && v.w != plan.run.epoch);
        };
        auto source_of = [&](uint32_t mask) {
          return static_cast<int>(plan.schedule.by_tokens(first + (__ffs(mask) - 1) / 8));
        };
        good = AwaitLines(missing, source_of, [&] { return !patient; }, plan.run, Step::kMetadata);
        const uint32_t one = Checked(r, active ? v.x : 0), two = Checked(r, active && !piece.flags ? v.z : 0);
        if (line < lines) {
          const uint32_t place = line * kFewSlots + q * 2;
          plan.In<uint2>(plan.at.experts)[place / 2] =
              make_uint2(one ? one << kPlaceBits | place : 0, two ? two << kPlaceBits | (place + 1) : 0);
          plan.In<float2>(plan.at.weights)[place / 2] = make_float2(__uint_as_float(v.y), __uint_as_float(v.w));
          if (Reports(plan)) {
            if (one) atomicAdd(&counts[source * r.local_experts + one - 1], 1);
            if (two) atomicAdd(&counts[source * r.local_experts + two - 1], 1);
          }
        }
      }
      if (!__syncthreads_or(patient ? !good : idle || !good)) break;
      if (patient) return false;
      adopt();
      __syncthreads();
      if (Reports(plan)) ClearCounts(plan, threadIdx.x, kThreads);  // they are counted anew
      __syncthreads();
    }
    return true;
  }

  __device__ __forceinline__ static bool Resolve(const Plan& plan, const Piece&, int source, int token, bool write,
                                                 int* position) {
    const Routing& r = plan.p.routing;
    const int lane = threadIdx.x & 31, at = (source * r.tokens + token) * kFewSlots + lane;
    const int entries = r.ranks * r.tokens * kFewSlots;
    const bool padded = r.layout == Layout::kPadded;
    const uint32_t key = lane < r.top_k ? plan.In<uint32_t>(plan.at.experts)[at] : 0, word = key >> kPlaceBits;
    const float weight = lane < r.top_k ? plan.In<float>(plan.at.weights)[at] : 0.0f;
    int own = -1;
#pragma unroll 1
    for (uint32_t m = __ballot_sync(0xFFFFFFFFu, key != 0); m; m &= m - 1) {
      const int slot = __ffs(m) - 1;
      const uint32_t least = padded ? __shfl_sync(0xFFFFFFFFu, word, slot) << kPlaceBits : 1u << kPlaceBits;
      const uint32_t below = __shfl_sync(0xFFFFFFFFu, key, slot) - least;
      int before = 0;
#pragma unroll 1
      for (int i = lane * 4; i < entries; i += 32 * 4) {
        const uint4 keys = plan.In<uint4>(plan.at.experts)[i / 4];
        before +=
            (keys.x - least < below) + (keys.y - least < below) + (keys.z - least < below) + (keys.w - least < below);
      }
      before = __reduce_add_sync(0xFFFFFFFFu, before);
      if (lane == slot) own = before;
    }
    if (own >= 0 && padded) {
      const int rows = r.ranks * r.tokens;
      own = own < rows ? AddSaturated((static_cast<int>(word) - 1) * rows, own) : r.capacity;
    }
    if (own >= r.capacity) own = -2;
    WriteSlots(plan, source, token, own, weight, write);
    *position = own;
    return true;
  }
  __device__ __forceinline__ static void Complete(const Plan& plan) {
    if (!Reports(plan)) return;
#pragma unroll 1
    for (int i = threadIdx.x; i < plan.p.routing.ranks * plan.p.routing.local_experts; i += kThreads) {
      plan.p.recv_counts[i] = plan.In<int>(plan.at.counts)[i];
    }
  }

 private:
  // Returns whether this block writes the counts into the result: the last block does, which has the fewest rows to
  // place.
  __device__ __forceinline__ static bool Reports(const Plan& plan) {
    return plan.receiver == plan.schedule.receivers - 1;
  }
  // Returns a slot's word for rank `to`: local expert + 1, or 0 if the slot is not for that rank.
  __device__ __forceinline__ static uint32_t Word(const Routing& r, int to, int expert) {
    const int local = expert - to * r.local_experts;
    return expert >= 0 && expert < r.experts && local >= 0 && local < r.local_experts ? local + 1 : 0;
  }
  // Checks a word from a peer before it becomes an address.
  __device__ __forceinline__ static uint32_t Checked(const Routing& r, uint32_t word) {
    return word <= static_cast<uint32_t>(r.local_experts) ? word : 0;
  }
  __device__ __forceinline__ static void ClearCounts(const Plan& plan, int thread, int threads) {
#pragma unroll 1
    for (int i = thread; i < plan.p.routing.ranks * plan.at.local; i += threads) plan.In<int>(plan.at.counts)[i] = 0;
  }
};

}  // namespace xen_moe::XEN_MOE_VARIANT
