// Which operations of a group of one rank have kernels of their own (dispatch/alone.cuh, combine/alone.cuh).
//
// These operations wait for no rank, and no rank waits for them. So their kernels use neither the channel's epoch nor
// its staging memory, and may run beside any other operation. Plain data: the host plans with it too.
#pragma once

#include "cuda_kernels/dispatch/layout_plan.h"

namespace xen_moe {

// The memory of a generation that these operations ask for. They use none of it. But a workspace makes its mailbox, and
// the other memory that never moves, only for an operation that asks for memory. They ask for no flags, and an
// xm.Buffer remains whole for the first operation that uses it.
constexpr Needs kAloneNeeds{0, 256, 0};
// Most slots, tokens * top_k, of such a dispatch: each of its thread blocks counts all slots.
constexpr int kAloneSlots = 1 << 16;

// Bytes of dynamic shared memory of a block of such a dispatch, and the number of its blocks: one thread for each slot.
inline uint32_t AloneSharedBytes(const Routing& r) {
  return 4u * (3 + kWarps) * static_cast<uint32_t>(r.local_experts);
}
inline int AloneBlocks(const Routing& r) { return (r.tokens * r.top_k + kThreads - 1) / kThreads; }

// Returns whether the operation runs by the kernel of its own. A dispatch does only where a row has 16 bytes, as in a
// dispatch of tokens' numbers: a thread copies the row of its slot. `scaled`: x comes with scales.
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
