// Which operations of a group of one rank have kernels of their own (dispatch/alone.cuh, combine/alone.cuh).
//
// They wait for nothing, and no rank waits for them. So they leave the channel, its epoch and the staging memory alone,
// and may run beside any other operation. Plain data: the host plans with it too.
#pragma once

#include "cuda_kernels/dispatch/layout_plan.h"

namespace xen_moe {

// What they need of a generation: nothing, but a workspace makes its mailbox and the other memory that never moves when
// an operation needs any memory.
constexpr Needs kAloneNeeds{256, 256, 0};
// Most slots of such a dispatch: each of its blocks counts all of them.
constexpr int kAloneSlots = 1 << 16;

inline uint32_t AloneSharedBytes(const Routing& r) {
  return 4u * (3 + kWarps) * static_cast<uint32_t>(r.local_experts);
}
inline int AloneBlocks(const Routing& r) { return (r.tokens * r.top_k + kThreads - 1) / kThreads; }

// Rows of 16 bytes alone, which are tokens' numbers: a thread copies the row of its slot.
inline bool RunsAlone(const DispatchParams& p, bool scaled) {
  const Routing& r = p.routing;
  return r.ranks == 1 && !p.known_positions && !p.schedule.low_latency && !scaled && p.wire == WireType::kNative &&
         r.layout != Layout::kRanked && r.hidden == 4 && p.element == Element::kF32 &&
         static_cast<int64_t>(r.tokens) * r.top_k <= kAloneSlots && AloneBlocks(r) <= p.schedule.blocks &&
         AloneSharedBytes(r) <= kLayoutSharedBytes;
}
inline bool RunsAlone(const CombineParams& p) {
  const Routing& r = p.routing;
  return r.ranks == 1 && !p.by_home && !p.schedule.low_latency && p.wire == WireType::kNative && r.hidden % 8 == 0 &&
         static_cast<int64_t>(r.tokens) * (r.hidden / 8) < 0x7FFFFFFF;
}

}  // namespace xen_moe
