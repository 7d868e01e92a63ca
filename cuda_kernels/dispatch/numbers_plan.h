// Which dispatches have their rows numbered by the senders (numbers.cuh), and the memory for it. Plain data: the host
// plans with it too.
#pragma once

#include "cuda_kernels/dispatch/layout_plan.h"

namespace xen_moe {

// Most slots, tokens * top_k, of a rank that numbers its own rows: each of its blocks counts all slots in front of its
// share. A word has 12 bits for the expert and 19 for the number.
constexpr int kNumberedSlots = 1 << 16;
constexpr int kExpertBits = 12;
static_assert(kMaxExperts <= 1 << kExpertBits && kNumberedSlots <= 1 << (31 - kExpertBits), "a word has room for both");

// Returns whether the senders of a dispatch number their rows. Otherwise the receivers do (layout.cuh). It must be the
// same on all ranks.
XEN_MOE_ANYWHERE inline bool SendersNumber(const Routing& r, const Schedule& s) {
  return r.ranks <= kSmallGroup && r.layout != Layout::kRanked && s.chunk_tokens == 0 && !s.solo_layout &&
         !s.low_latency && static_cast<int64_t>(r.tokens) * r.top_k <= kNumberedSlots &&
         4 * (r.ranks + 2) * r.local_experts <= kLayoutSharedBytes;  // bases, totals and starts
}

// Bytes of a half that hold the counts of all sources, [R][L] int32, and where they lie in its data: behind the router
// weights, in front of the rows. They do not depend on the schedule, so that the memory of a dispatch suffices for the
// other operations and for fewer tokens of the same shapes, whether senders or receivers number their rows
// (xm.buffer_size_hint).
XEN_MOE_ANYWHERE inline uint64_t NumberedCountBytes(const Routing& r) {
  return r.ranks <= kSmallGroup ? static_cast<uint64_t>(r.ranks) * r.local_experts * 4 : 0;
}
XEN_MOE_ANYWHERE inline uint64_t NumberedCounts(const Routing& r, const Staging& staging) {
  return staging.topk_weights + static_cast<uint64_t>(r.ranks) * r.tokens * r.top_k * 4;
}

}  // namespace xen_moe
