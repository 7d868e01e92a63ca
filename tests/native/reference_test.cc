// Tests without a GPU: the words of cuda_kernels/core/workspace.h, the places of cuda_kernels/core/plan.cc, and the
// reference that the harness compares with.
#include "tests/native/reference.h"

#include <cstdio>
#include <cstdlib>
#include <set>

#include "cuda_kernels/low_latency/ll128_plan.h"

using namespace native;
using namespace xen_moe;

#define EXPECT(condition)                                                       \
  do {                                                                          \
    if (!(condition)) {                                                         \
      std::printf("%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                             \
    }                                                                           \
  } while (0)

static void Words() {
  for (uint32_t epoch : {1u, 2u, 0x7FFFFFFFu, 0xFFFFFFFEu, 0xFFFFFFFFu}) {
    EXPECT(NextEpoch(epoch) != 0 && (NextEpoch(epoch) & 1) != (epoch & 1));
    EXPECT(EpochBefore(epoch, NextEpoch(epoch)) && !EpochBefore(NextEpoch(epoch), epoch));
    for (int cause = 1; cause <= 7; ++cause) {
      const Failure f{static_cast<Cause>(cause), Operation::kExchange, Step::kOwner, 15, 14, epoch};
      const uint64_t word = PackFailure(f);
      const Failure g = UnpackFailure(word);
      EXPECT(word != 0 && g.cause == f.cause && g.operation == f.operation && g.step == f.step && g.rank == 15 &&
             g.other == 14 && g.epoch == epoch);
    }
    const uint64_t word = PackAnnouncement(epoch, 0xABCDEF, 0x1FF);
    EXPECT(AnnouncedEpoch(word) == epoch && AnnouncedSignature(word) == 0xABCDEF && AnnouncedGeneration(word) == 0xFF);
    EXPECT(!ProgressWaits(PackProgress(epoch)) && ProgressEpoch(PackProgress(epoch)) == epoch);
    const uint64_t waits = PackWaiting(epoch, Step::kCredit, 13);
    EXPECT(ProgressWaits(waits) && ProgressEpoch(waits) == epoch && ProgressStep(waits) == Step::kCredit &&
           ProgressRank(waits) == 13);
  }
  EXPECT(OlderGeneration(3, 4) && !OlderGeneration(4, 3) && !OlderGeneration(4, 4) && OlderGeneration(255, 0));
  EXPECT(NextEpoch(0) == 1 && NextEpoch(0xFFFFFFFFu) == 2);
}

// Every field counts: a signature that leaves one out would pair operations that do not fit.
static void Signatures() {
  std::set<uint32_t> seen{Signature(Descriptor{})};
  for (size_t word = 0; word < sizeof(Descriptor) / 4; ++word) {
    for (uint32_t value : {1u, 2u, 4096u}) {
      Descriptor d{};
      std::memcpy(reinterpret_cast<char*>(&d) + 4 * word, &value, 4);
      EXPECT(seen.insert(Signature(d)).second && Signature(d) <= 0xFFFFFF);
    }
  }
}

static void Plans() {
  std::mt19937 rng(5);
  for (int i = 0; i < 300; ++i) {
    const Problem p = RandomProblem(rng, 1 + static_cast<int>(rng() % 16), 32);
    if (p.operation == Operation::kExchange) {
      ExchangeParams e{};
      e.ranks = p.ranks, e.chunk_bytes = p.chunk_bytes, e.ring_chunks = p.ring_chunks, e.lanes = p.lanes;
      e.gather = p.gather, e.low_latency = p.low_latency, e.round = p.round;
      e.unit_bytes = p.hidden, e.operand_units = (p.gather ? 1 : p.ranks) * p.tokens, e.output_units = p.capacity;
      e.call.call_id = 1;
      PlanExchange(&e, p.ragged);
      Describe(&e, p.ragged, 0, 0);
      if (p.low_latency) {
        const uint64_t lines = e.flag_bytes - LineBorder(e.flag_bytes), bytes = e.operand_units * e.unit_bytes;
        EXPECT(p.ranks * LineRounds(bytes) * kRoundBytes <= lines && LastLines(bytes) >= 1 && Unfit(e) == nullptr);
        e.unit_bytes += 1;
        EXPECT((e.operand_units * e.unit_bytes % 16 != 0) == (Unfit(e) != nullptr));
        continue;
      }
      const uint64_t ways = static_cast<uint64_t>(p.ranks) * p.lanes;
      EXPECT(e.message_flags + 4 * p.ranks <= e.chunk_flags &&
             e.chunk_flags + 4 * ways * e.max_chunks <= e.credit_flags &&
             e.credit_flags + 4 * ways * e.max_chunks <= e.flag_bytes);
      EXPECT(e.offsets + 8 * p.ranks <= e.ring && e.ring + ways * e.ring_chunks * e.chunk_bytes <= e.data_bytes);
      EXPECT(Unfit(e) == nullptr);
      e.call.call_id = 0;
      EXPECT(Unfit(e) != nullptr);
      continue;
    }
    CombineParams c{};
    Routing& r = c.routing;
    r.ranks = r.ranks_per_node = p.ranks, r.tokens = p.tokens, r.top_k = p.top_k, r.slots = p.slots();
    r.experts = p.experts, r.local_experts = p.local_experts(), r.hidden = p.hidden, r.capacity = p.capacity;
    r.alignment = p.alignment, r.layout = p.layout;
    c.schedule.blocks = p.blocks, c.schedule.push_blocks = p.push_blocks, c.schedule.layout_blocks = p.slices;
    c.schedule.parts = p.parts, c.schedule.part_elements = ((p.hidden + p.parts - 1) / p.parts + 255) / 256 * 256;
    c.schedule.segment_tokens = p.segment_tokens;
    c.staging = PlanStaging(r, c.schedule, p.element, WireType::kNative, p.scaled);
    c.call.call_id = 1;
    Describe(&c, true, 0, 0);
    const Staging& m = c.staging;
    const uint64_t pairs = static_cast<uint64_t>(p.ranks) * p.tokens;
    EXPECT(m.metadata_flags + 4ull * p.ranks * kMaxBlocks <= m.row_flags &&
           m.row_flags + 4 * pairs * p.parts <= m.flag_bytes);
    EXPECT(m.topk_idx + 4 * pairs * p.top_k <= m.topk_weights && m.topk_weights + 4 * pairs * p.top_k <= m.rows &&
           m.rows + pairs * m.row_bytes <= m.data_bytes &&
           m.scale_offset >= static_cast<uint64_t>(p.hidden) * p.element_bytes());
    EXPECT(Unfit(c) == nullptr);
    EXPECT(m.row_flags + 4 * pairs * p.parts <= LineBorder(m.flag_bytes));
    // Lines lie behind any operation's flags, and inside; also in a half that is larger than necessary.
    for (Operation operation : {Operation::kDispatch, Operation::kCombine}) {
      const Staging l = PlanLowLatency(r, operation, p.element, p.scaled);
      const uint64_t lines = l.row_lines + pairs * l.row_rounds * kRoundLines;
      for (uint64_t flag_bytes : {l.flag_bytes, l.flag_bytes + 256, 3 * l.flag_bytes}) {
        EXPECT(LineBorder(flag_bytes) % kLineBytes == 0 && LineBorder(flag_bytes) + lines * kLineBytes <= flag_bytes);
        if (flag_bytes >= m.flag_bytes) EXPECT(m.row_flags + 4 * pairs * p.parts <= LineBorder(flag_bytes));
      }
      const char* why = WhyNotLowLatency(r, operation, p.element, WireType::kNative, 0);
      const bool whole_scales =
          operation == Operation::kCombine || p.element != Element::kByte || p.scale_blocks() * 4 % 16 == 0;
      EXPECT((why == nullptr) == (p.hidden * p.element_bytes() % 16 == 0 && whole_scales));
      EXPECT(static_cast<uint64_t>(l.row_rounds) * kRoundData >= l.row_bytes && (why || l.row_bytes % 16 == 0));
      EXPECT(operation == Operation::kCombine ||
             l.count_lines * kLineCounts >= (p.layout == Layout::kRanked ? 1 : r.local_experts));
      EXPECT(WhyNotLowLatency(r, operation, p.element, WireType::kFp8, 0) != nullptr);
    }
    CombineParams bad = c;
    bad.routing.local_experts += 1;
    EXPECT(Unfit(bad) != nullptr);
    bad = c, bad.routing.top_k = bad.routing.slots = 1, bad.schedule.low_latency = false;
    bad.routing.tokens = (0x7FFFFFFF - kMaxBlocks * kWarps) / (r.ranks * p.parts);  // a counter would turn negative
    EXPECT(Unfit(bad) != nullptr);
    bad.routing.tokens = 0x7FFF0000 / (r.ranks * p.parts);
    EXPECT(Unfit(bad) == nullptr);
    bad = c, bad.routing.tokens = 1 << 30, bad.routing.top_k = bad.routing.slots = 4;
    EXPECT(Unfit(bad) != nullptr);
  }
}

// Rings of groups of many ranks: their contents; only routing and flags grow with ranks times tokens; memory that
// suffices for one operation suffices for a smaller one.
static void Rings() {
  const RingLimits limits;
  auto plan = [&](int ranks, int tokens, int hidden, WireType wire, CombineParams* c) {
    *c = CombineParams{};
    Routing& r = c->routing;
    r.ranks = r.ranks_per_node = ranks, r.tokens = tokens, r.top_k = r.slots = 8, r.hidden = hidden;
    r.local_experts = 4, r.experts = 4 * ranks, r.capacity = 8 * tokens, r.alignment = 1;
    c->schedule.blocks = 64, c->schedule.push_blocks = 32, c->schedule.layout_blocks = c->schedule.parts = 1;
    c->schedule.part_elements = (hidden + 255) / 256 * 256, c->schedule.segment_tokens = 32;
    c->staging = PlanStaging(r, c->schedule, Element::kBf16, wire, false);
    c->call.call_id = 1;
    Describe(c, true, 0, 0);
    EXPECT(Unfit(*c) == nullptr);
    return c->staging;
  };
  CombineParams c;
  for (const int ranks : {2, 16, 17, 18, 32, 72, 128, 256}) {
    for (const int tokens : {1, 4, 100, 255, 256, 257, 1000, 4096, 8192, 65536, 262143}) {
      for (const int hidden : {8, 2048, 5120, 7168}) {
        for (const WireType wire : {WireType::kMxfp4, WireType::kFp8, WireType::kNative}) {
          if (static_cast<int64_t>(ranks) * tokens * 8 > 0x7FFFFFFF) continue;
          const Staging m = plan(ranks, tokens, hidden, wire, &c);
          const uint64_t pairs = static_cast<uint64_t>(ranks) * tokens, all = pairs * m.row_bytes;
          EXPECT((m.ring_tokens == 0) == (ranks <= kSmallGroup || all <= limits.bytes || tokens <= limits.tokens ||
                                          pairs / ranks <= limits.bytes / (ranks * m.row_bytes)));
          for (const int fewer : {tokens - 1, tokens / 2}) {  // an xm.Buffer serves smaller calls too
            if (fewer < 1) continue;
            const Staging less = plan(ranks, fewer, hidden, wire, &c);
            EXPECT(less.data_bytes <= m.data_bytes && less.flag_bytes <= m.flag_bytes);
          }
          const Staging shorter = plan(ranks, tokens, (hidden + 1) / 2, wire, &c);
          EXPECT(shorter.data_bytes <= m.data_bytes && shorter.flag_bytes <= m.flag_bytes);
          plan(ranks, tokens, hidden, wire, &c);
          if (m.ring_tokens == 0) {
            EXPECT(m.data_bytes >= m.rows + all);
            continue;
          }
          const int round = m.ring_tokens / kRingRounds, rounds = (tokens + round - 1) / round;
          EXPECT(m.ring_tokens % kRingRounds == 0 && m.ring_tokens >= limits.tokens && m.ring_tokens < tokens);
          EXPECT(rounds > kRingRounds && rounds <= kMaxRounds);
          EXPECT(m.rows + static_cast<uint64_t>(ranks) * m.ring_tokens * m.row_bytes <= m.data_bytes);
          EXPECT(m.row_flags + 4 * pairs <= m.credit_flags &&
                 m.credit_flags + 4ull * ranks * rounds <= LineBorder(m.flag_bytes));
          if (tokens <= kMaxRounds * limits.tokens / kRingRounds) {
            const uint64_t least = static_cast<uint64_t>(ranks) * limits.tokens * m.row_bytes;
            EXPECT(m.data_bytes <= m.rows + std::max(limits.bytes, least) + 256);
          }
          const uint32_t signature = c.call.signature;
          CombineParams other = c;
          other.staging.ring_tokens -= kRingRounds;
          Describe(&other, true, 0, 0);
          EXPECT(other.call.signature != signature);  // ranks with other limits do not go together
          other = c, other.staging.ring_tokens = tokens + kRingRounds;
          EXPECT(Unfit(other) != nullptr);
          other = c, other.staging.ring_tokens += 1;
          EXPECT(Unfit(other) != nullptr);
        }
      }
    }
  }
  EXPECT(plan(2, 4, 7168, WireType::kFp8, &c).row_bytes == 7392 &&
         plan(2, 4, 7168, WireType::kMxfp4, &c).row_bytes == 3808);
  // The table of docs/design/nodes.md, in bytes of a rank.
  auto bytes = [&](int ranks, WireType wire) {
    plan(ranks, 4096, 7168, wire, &c);
    return 2 * (c.call.needs.flag_bytes + c.call.needs.data_bytes);
  };
  for (const int ranks : {8, 16, 18, 32, 72, 256}) {
    std::printf("%d ranks, 4096 tokens of 7168: %.2f GB in bf16, %.2f in fp8\n", ranks,
                bytes(ranks, WireType::kNative) * 1e-9, bytes(ranks, WireType::kFp8) * 1e-9);
  }
  EXPECT(bytes(72, WireType::kNative) < 600'000'000 && bytes(16, WireType::kNative) > 1'800'000'000);
}

// The reference against properties that hold for every routing.
static void References() {
  std::mt19937 rng(9);
  for (int i = 0; i < 400; ++i) {
    const Problem p = RandomProblem(rng, 1 + static_cast<int>(rng() % 5), 16);
    const std::vector<RankCase> all = Reference(p);
    EXPECT(all.size() == static_cast<size_t>(p.ranks));
    std::mt19937 again(p.seed);
    if (p.operation == Operation::kExchange) continue;
    const RoutingCase routing = MakeRouting(p, again);
    for (int d = 0; d < p.ranks; ++d) {
      std::set<int> used;
      int64_t placed = 0, counted = 0;
      for (int position : routing.positions[d]) {
        EXPECT(position >= -2 && position < p.capacity);
        if (position >= 0) EXPECT(used.insert(position).second);
        placed += position != -1;
      }
      for (int count : routing.recv_counts[d]) counted += count;
      EXPECT(placed == counted);
      for (const Output& output : all[d].outputs) EXPECT(output.expected.size() == output.mask.size());
    }
  }
  EXPECT(ToBf16(1.0f) == 0x3F80 && ToBf16(1.00390625f) == 0x3F80 && ToBf16(1.01171875f) == 0x3F82);  // ties to even
}

int main() {
  Words();
  Signatures();
  Plans();
  Rings();
  References();
  std::printf("words, signatures, plans and references: passed\n");
  return 0;
}
