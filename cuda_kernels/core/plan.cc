// Sizes, places and descriptors of operations, on the host. Needs no GPU.
#include <algorithm>
#include <cstdint>

#include "cuda_kernels/core/alone.h"
#include "cuda_kernels/core/params.h"
#include "cuda_kernels/dispatch/numbers_plan.h"
#include "cuda_kernels/low_latency/ll128_plan.h"
#include "cuda_kernels/node/rail_memory.h"

namespace xen_moe {
namespace {

uint64_t AlignUp(uint64_t x, uint64_t to) { return (x + to - 1) / to * to; }
uint64_t ScaleBytes(int hidden) { return static_cast<uint64_t>((hidden + kScaleBlock - 1) / kScaleBlock) * 4; }

int RingTokens(const Staging& m, const Schedule& s) { return HasRing(s, m) ? m.ring_tokens : 0; }
int RoundsOf(const Routing& r, int ring_tokens) {
  const int round = ring_tokens / kRingRounds;
  return ring_tokens ? (r.tokens + round - 1) / round : 1;
}

Descriptor DescribeRouting(Operation operation, const Routing& r, const Schedule& s, const Staging& m, WireType wire,
                           uint32_t flags, uint32_t dtype, uint32_t site) {
  Descriptor d{};
  d.operation = static_cast<uint32_t>(operation);
  d.dtype = dtype;
  d.wire = static_cast<uint32_t>(wire);
  d.layout = static_cast<uint32_t>(r.layout);
  d.flags = flags | (m.by_rank ? kDescribedByRank : 0) |
            (operation == Operation::kDispatch && SendersNumber(r, s) ? kDescribedNumbered : 0);
  d.ranks = static_cast<uint32_t>(r.ranks);
  d.ranks_per_node = static_cast<uint32_t>(r.ranks_per_node);
  d.routed.tokens = static_cast<uint32_t>(r.tokens);
  d.routed.top_k = static_cast<uint32_t>(r.top_k);
  d.routed.experts = static_cast<uint32_t>(r.experts);
  d.routed.hidden = static_cast<uint32_t>(r.hidden);
  d.routed.capacity = static_cast<uint32_t>(r.capacity);
  d.routed.alignment = static_cast<uint32_t>(r.alignment);
  d.routed.parts = static_cast<uint32_t>(s.parts);
  d.routed.ring_tokens = static_cast<uint32_t>(RingTokens(m, s));
  d.routed.metadata_slices = operation == Operation::kDispatch ? static_cast<uint32_t>(s.layout_blocks) : 0;
  d.routed.chunk_tokens = static_cast<uint32_t>(s.chunk_tokens);
  d.site = site;
  return d;
}

void Complete(Call* call, const Descriptor& descriptor, const Needs& needs) {
  call->descriptor = descriptor;
  call->signature = Signature(descriptor);
  call->needs = needs;
}

const char* UnfitRouting(const Call& call, const Routing& r, const Schedule& s, const Staging& m) {
  if (call.call_id == 0) return "call_id is 0";
  if (r.ranks < 1 || r.ranks > kMaxRanks || r.rank < 0 || r.rank >= r.ranks) return "ranks";
  if (r.tokens < 1 || r.hidden < 1 || r.capacity < 1 || r.alignment < 1) return "tokens, hidden, capacity or alignment";
  if (r.top_k < 1 || r.top_k > kMaxSlots || (r.slots != r.top_k && r.slots != 1)) return "top_k";
  if (r.experts < 1 || r.experts > kMaxExperts) return "experts";
  if (r.local_experts != (r.experts + r.ranks - 1) / r.ranks) return "local_experts";
  if (s.blocks < 1 || s.blocks > kMaxBlocks || s.push_blocks < 1 || s.push_blocks > s.blocks) return "blocks";
  if (s.layout_blocks < 1 || s.layout_blocks > s.blocks) return "layout_blocks";
  if (s.parts < 1 || s.parts > kMaxParts || s.part_elements % 256 != 0) return "parts";
  if (static_cast<int64_t>(s.parts) * s.part_elements < r.hidden) return "part_elements";
  if (s.segment_tokens < 1) return "segment_tokens";
  const int ring = RingTokens(m, s);
  if (ring < 0 || ring % kRingRounds != 0 || RoundsOf(r, ring) > kMaxRounds) return "ring_tokens";
  if (ring > 0 && (r.ranks <= kSmallGroup || s.chunk_tokens > 0 || ring >= r.tokens)) return "ring_tokens";
  // Warps count items in an int, and each warp may claim one item past the last.
  constexpr uint64_t kMostItems = 0x7FFFFFFFu - 2 * kMaxBlocks * kWarps;
  if (static_cast<uint64_t>(r.ranks + (ring > 0)) * r.tokens * s.parts > kMostItems) return "ranks * tokens * parts";
  if (static_cast<uint64_t>(r.ranks) * r.tokens * r.top_k > 0x7FFFFFFFu) return "ranks * tokens * top_k";
  return nullptr;
}

}  // namespace

// Returns how many tokens of a source have a staged row at the same time if `limits` allow fewer than all; otherwise 0.
static int PlanRing(const Routing& r, const Schedule& s, uint64_t row_bytes, const RingLimits& limits) {
  if (r.ranks <= kSmallGroup || s.chunk_tokens > 0) return 0;
  const uint64_t fit = limits.bytes / (static_cast<uint64_t>(r.ranks) * row_bytes);
  // the least tokens of a round
  const uint64_t most = (static_cast<uint64_t>(r.tokens) + kMaxRounds - 1) / kMaxRounds;
  const uint64_t round = std::max({fit / kRingRounds, static_cast<uint64_t>(limits.tokens) / kRingRounds, most});
  return round * kRingRounds < static_cast<uint64_t>(r.tokens) ? static_cast<int>(round * kRingRounds) : 0;
}

Staging PlanStaging(const Routing& r, const Schedule& s, Element element, WireType wire, bool scaled,
                    const RingLimits& limits) {
  Staging m{};
  const uint64_t pairs = static_cast<uint64_t>(r.ranks) * r.tokens;
  m.metadata_flags = 0;
  m.row_flags = AlignUp(static_cast<uint64_t>(r.ranks) * kMaxBlocks * 4, 128);
  m.flag_bytes = FlagAndLineBytes(m.row_flags + pairs * s.parts * 4, 0);
  const uint64_t value_bits = wire == WireType::kNative ? 8 * ElementBytes(element) : wire == WireType::kMxfp4 ? 4 : 8;
  m.scale_offset = AlignUp((r.hidden * value_bits + 7) / 8, 16);
  m.row_bytes = m.scale_offset + (scaled || wire != WireType::kNative ? AlignUp(ScaleBytes(r.hidden), 16) : 0);
  m.topk_idx = 0;
  m.topk_weights = AlignUp(pairs * r.top_k * 4, 128);
  m.rows = AlignUp(NumberedCounts(r, m) + NumberedCountBytes(r), 128);
  m.ring_tokens = PlanRing(r, s, m.row_bytes, limits);
  uint64_t row_bytes = pairs * m.row_bytes;
  if (m.ring_tokens > 0) {
    m.credit_flags = m.row_flags + pairs * s.parts * 4;
    const uint64_t credits = static_cast<uint64_t>(r.ranks) * RoundsOf(r, m.ring_tokens) * 4;
    m.flag_bytes = FlagAndLineBytes(m.credit_flags + credits, 0);
    // The whole limit, even if no whole number of rounds fills it: memory that suffices for long rows must suffice for
    // short rows.
    row_bytes = std::max(limits.bytes, static_cast<uint64_t>(r.ranks) * m.ring_tokens * m.row_bytes);
  }
  m.data_bytes = AlignUp(m.rows + row_bytes, 256);
  return m;
}

Staging PlanHomeStaging(const Routing& r, const Schedule& s, Element element) {
  Staging m = PlanStaging(r, s, element, WireType::kNative, false);
  m.data_bytes = AlignUp(m.rows + static_cast<uint64_t>(r.tokens) * r.top_k * m.row_bytes, 256);
  return m;
}

Staging PlanLowLatency(const Routing& r, Operation operation, Element element, bool scaled) {
  Staging m{};
  const uint64_t pairs = static_cast<uint64_t>(r.ranks) * r.tokens;
  m.scale_offset = static_cast<uint64_t>(r.hidden) * ElementBytes(element);
  m.row_bytes = m.scale_offset + (scaled ? AlignUp(ScaleBytes(r.hidden), 16) : 0);
  m.row_rounds = static_cast<int>(LineRounds(m.row_bytes));
  if (operation == Operation::kDispatch) {
    const int columns = r.layout == Layout::kRanked ? 1 : r.local_experts;
    m.count_lines = (columns + kLineCounts - 1) / kLineCounts;
    m.row_lines = static_cast<uint64_t>(r.ranks) * (m.count_lines + r.tokens);
  }
  m.flag_bytes = FlagAndLineBytes(0, (m.row_lines + pairs * m.row_rounds * kRoundLines) * kLineBytes);
  m.data_bytes = 256;
  return m;
}

const char* WhyNotLowLatency(const Routing& r, Operation operation, Element element, WireType wire, int chunk_tokens) {
  if (operation != Operation::kDispatch && operation != Operation::kCombine) return "neither dispatch nor combine";
  if (wire != WireType::kNative) return "the wire quantizes";
  if (static_cast<int64_t>(r.hidden) * ElementBytes(element) % 16 != 0) return "a row is not a multiple of 16 bytes";
  if (static_cast<int64_t>(r.ranks) * r.tokens > (r.ranks > kSmallGroup ? kMostLineRowsOfLargeGroups : kMostLineRows))
    return "ranks * tokens";
  if (chunk_tokens > 0 && r.tokens > kMaxDirectChunks * chunk_tokens) return "tokens, between nodes";
  if (PlanLowLatency(r, operation, element, true).row_rounds > kMostRounds) return "a row is too long";
  if (r.top_k > kLineSlots) return "top_k is more than a line holds";
  if (operation == Operation::kCombine) {
    return r.ranks_per_node != r.ranks && chunk_tokens == 0 ? "combine over two axes" : nullptr;
  }
  if (element == Element::kByte && ScaleBytes(r.hidden) % 16 != 0)
    return "scales of a row are not a multiple of 16 bytes";
  return PlanShared(r).bytes > kLowLatencySharedBytes ? "tokens * top_k or experts" : nullptr;
}

Needs NeedsOf(const Routing& r, const Schedule& s, const Staging& m) {
  return {m.flag_bytes, m.data_bytes, s.low_latency ? 0 : DispatchScratchBytes(r, s)};
}

void PlanExchange(ExchangeParams* p, bool ragged) {
  uint64_t largest = (ragged ? p->operand_units : PairUnits(*p)) * p->unit_bytes;
  if (p->by_table) largest = p->output_units * AlignUp(p->unit_bytes, p->chunk_bytes);
  if (p->low_latency) {
    p->flag_bytes = FlagAndLineBytes(0, static_cast<uint64_t>(p->ranks) * LineRounds(largest) * kRoundBytes);
    p->data_bytes = 256;
    return;
  }
  const uint64_t stripe = p->chunk_bytes * p->lanes;
  p->max_chunks = (largest + stripe - 1) / stripe + 1;
  const uint64_t ways = static_cast<uint64_t>(p->ranks) * p->lanes;
  p->message_flags = 0;
  p->chunk_flags = AlignUp(static_cast<uint64_t>(p->ranks) * 4, 128);
  p->credit_flags = AlignUp(p->chunk_flags + ways * p->max_chunks * 4, 128);
  p->flag_bytes = FlagAndLineBytes(p->credit_flags + ways * p->max_chunks * 4, 0);
  p->offsets = 0;
  p->ring = AlignUp(static_cast<uint64_t>(p->ranks) * 8, 256);
  p->data_bytes = AlignUp(p->ring + ways * p->ring_chunks * p->chunk_bytes, 256);
}

Needs NeedsOf(const ExchangeParams& p) { return {p.flag_bytes, p.data_bytes, 0}; }

void Describe(DispatchParams* p, bool scaled, uint32_t dtype, uint32_t site) {
  const uint32_t flags = (p->ue8m0 ? kDescribedUe8m0 : 0) | (scaled ? kDescribedScaled : 0) |
                         (p->schedule.low_latency ? kDescribedLowLatency : 0);
  const Operation operation = p->known_positions ? Operation::kRedispatch : Operation::kDispatch;
  Complete(&p->call, DescribeRouting(operation, p->routing, p->schedule, p->staging, p->wire, flags, dtype, site),
           RunsAlone(*p, scaled) ? kAloneNeeds : NeedsOf(p->routing, p->schedule, p->staging));
}

void Describe(CombineParams* p, bool weighted, uint32_t dtype, uint32_t site) {
  const uint32_t flags = (p->ue8m0 ? kDescribedUe8m0 : 0) | (weighted ? kDescribedWeighted : 0) |
                         (p->schedule.low_latency ? kDescribedLowLatency : 0) | (p->by_home ? kDescribedByHome : 0);
  Complete(&p->call,
           DescribeRouting(Operation::kCombine, p->routing, p->schedule, p->staging, p->wire, flags, dtype, site),
           RunsAlone(*p) ? kAloneNeeds : Needs{p->staging.flag_bytes, p->staging.data_bytes, 0});
}

void Describe(ExchangeParams* p, bool ragged, uint32_t dtype, uint32_t site) {
  Descriptor d{};
  d.operation = static_cast<uint32_t>(Operation::kExchange);
  d.dtype = dtype;
  d.flags = (ragged ? kDescribedRagged : 0) | (p->by_table ? kDescribedMove : 0) | (p->gather ? kDescribedGather : 0) |
            (p->low_latency ? kDescribedLowLatency : 0);
  d.ranks = d.ranks_per_node = static_cast<uint32_t>(p->ranks);
  d.exchange.operand_units = static_cast<uint32_t>(p->operand_units);
  d.exchange.output_units = static_cast<uint32_t>(p->output_units);
  d.exchange.unit_bytes_low = static_cast<uint32_t>(p->unit_bytes);
  d.exchange.unit_bytes_high = static_cast<uint32_t>(p->unit_bytes >> 32);
  d.exchange.lanes = static_cast<uint32_t>(p->lanes);
  d.exchange.ring_chunks = static_cast<uint32_t>(p->ring_chunks);
  d.exchange.chunk_bytes = static_cast<uint32_t>(p->chunk_bytes);
  d.site = site;
  Complete(&p->call, d, NeedsOf(*p));
}

const char* Unfit(const DispatchParams& p) {
  if (const char* e = UnfitRouting(p.call, p.routing, p.schedule, p.staging)) return e;
  if (p.schedule.low_latency) {
    const Operation operation = p.known_positions ? Operation::kRedispatch : Operation::kDispatch;
    return WhyNotLowLatency(p.routing, operation, p.element, p.wire, p.schedule.chunk_tokens);
  }
  if (p.schedule.solo_layout && SoloLayoutBytes(p.routing, p.schedule) > SoloLayoutLimit()) return "solo_layout";
  return nullptr;
}
const char* WhyNotByHome(const Routing& r, WireType wire, bool low_latency, int chunk_tokens) {
  if (r.ranks > kSmallGroup) return "there are more ranks than a combine by home takes";
  if (r.ranks_per_node != r.ranks || chunk_tokens > 0) return "a combine by home is within one node";
  if (r.layout == Layout::kRanked) return "rows of the ranked layout stand for several slots";
  if (r.hidden % 8 != 0) return "hidden is not a multiple of 8";
  if (wire != WireType::kNative) return "the wire quantizes";
  return low_latency ? "the low-latency kernels have no combine by home" : nullptr;
}
const char* Unfit(const CombineParams& p) {
  if (const char* e = UnfitRouting(p.call, p.routing, p.schedule, p.staging)) return e;
  if (p.by_home) return WhyNotByHome(p.routing, p.wire, p.schedule.low_latency, p.schedule.chunk_tokens);
  if (!p.schedule.low_latency) return nullptr;
  return WhyNotLowLatency(p.routing, Operation::kCombine, p.element, p.wire, p.schedule.chunk_tokens);
}
const char* Unfit(const ExchangeParams& p) {
  if (p.call.call_id == 0) return "call_id is 0";
  if (p.ranks < 1 || p.ranks > kMaxRanks || p.rank < 0 || p.rank >= p.ranks) return "ranks";
  if (p.lanes < 1 || ExchangeBlocks(p) > kMaxBlocks) return "lanes";
  if (p.low_latency) {
    const uint64_t bytes = p.operand_units * p.unit_bytes;
    if (!p.gather || bytes < 1 || bytes % 16 != 0 || LineRounds(bytes) > kMostGatherRounds) return "low_latency";
    return p.output_units == p.ranks * p.operand_units ? nullptr : "output_units";
  }
  if (p.gather && p.output_units != p.ranks * p.operand_units) return "output_units";
  if (p.gather && p.lanes % kBlockLanes != 0) return "lanes";
  if (p.chunk_bytes < 16 || p.chunk_bytes % 16 != 0 || p.ring_chunks < 1 || p.unit_bytes < 1) return "chunk_bytes";
  if (p.by_table && (p.operand_units < 1 || p.output_units * p.ranks > 0x7FFFFFFFu)) return "units of a table";
  return nullptr;
}

uint64_t DispatchScratchBytes(const Routing& routing, const Schedule& schedule) {
  const LayoutScratch scratch = MakeScratch(nullptr, routing, schedule);
  return reinterpret_cast<uint64_t>(scratch.totals + scratch.columns);
}
uint64_t SoloLayoutBytes(const Routing& routing, const Schedule& schedule) {
  const LayoutScratch scratch = MakeScratch(nullptr, routing, schedule);
  return reinterpret_cast<uint64_t>(scratch.totals + (2 + kWarps) * static_cast<int64_t>(scratch.columns));
}
uint64_t SoloLayoutLimit() { return kLayoutSharedBytes; }

}  // namespace xen_moe
