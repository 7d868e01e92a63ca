// The messages between nodes and their places in memory. Plain data: the host plans with it too.
//
// Ranks are numbered node by node, `per_node` to a node. A rail is the set of ranks with the same place in their nodes:
// what rank `i` of a node sends to another node goes to rank `i` there, which forwards it by pointer, and nothing else
// crosses between nodes. If that rank is inactive, rank `i` bypasses the rail and sends to each rank of the node itself
// (rail.cuh). A chunk is what one rank sends to another for one block of tokens, in one put: a header, then a record
// for each token that has data there, in token order. Every chunk is sent, an empty one as a header alone. In a
// dispatch the routing of several chunks is sent ahead of all rows, in a put of its own, a lead: a header, which tokens
// of each chunk come, and a record with the routing of each, in token order. Each chunk and lead has its own counter,
// which grows by one in every operation that has such a chunk or lead.
//
// A rank that ends an operation knows, by a chunk or from the rank of its node that received one, that every active
// rank of every node has begun it. Therefore two halves suffice between nodes as within a node (workspace.h), whichever
// ranks exchange data in the next operation.
#pragma once

#include "cuda_kernels/core/params.h"
#include "cuda_kernels/node/rail_memory.h"

namespace xen_moe {

constexpr int kChunkTokens = 32;  // of a chunk at most: one bit each

struct alignas(16) ChunkHeader {
  uint64_t announcement;  // PackAnnouncement of its sender's operation
  uint32_t tokens;        // which tokens of the block have a record
  uint32_t reserved;
};
static_assert(sizeof(ChunkHeader) == 16, "records behind it are aligned to 16 bytes");
// Precedes the routing of kLeadChunks chunks.
struct alignas(16) LeadHeader {
  ChunkHeader header;            // without tokens
  uint32_t tokens[kLeadChunks];  // of each chunk
};
static_assert(sizeof(LeadHeader) % 16 == 0, "records behind it are aligned to 16 bytes");

struct RailPlan {
  int nodes, per_node;
  int node, index;  // of this rank: its node, and its place there
  int chunk_tokens, chunks;
  bool masked;  // ranks may be inactive: chunks are kept by rank, not by node
  // few tokens: chunks go from rank to rank (direct.cuh), and the following fields are by rank, not by node
  bool direct;
  uint64_t counts_bytes;    // direct dispatch: row counts, after the header of a first chunk
  uint64_t routing_bytes;   // dispatch: a token's K experts and K weights
  uint64_t routing_offset;  // direct dispatch: the routing in a record, after the wire row
  uint64_t record_bytes;
  uint64_t chunk_bytes;    // room for a full chunk
  uint64_t routing_flags;  // from the start of a half, [R][chunks]: the routing of a lead, or a mask, has arrived
  int leads;               // leads of a dispatch along the rails
  uint64_t lead_bytes;     // room for a full lead
  uint64_t lead_send, lead_receive;  // data, as `send` and `receive`: [nodes][leads] or [R][leads]
  uint64_t masks;                    // combine, data: [R][chunks] bit masks of tokens
  uint64_t send, receive;  // data: [nodes][chunks] chunks, to and from other nodes; masked or direct: [R][chunks]
};

// The part of an operation that a kernel for few tokens does. An asynchronous operation is three kernels on one stream:
// the first sends and ends, in the second a warp waits for what other ranks have put, the third receives and ends the
// operation. So no multiprocessor is occupied while rows are on their way (direct.cuh).
enum class Part : int { kWhole = 0, kSend = 1, kReceive = 2 };

struct RailParams {
  RailPlan plan;
  uint64_t* expected;  // [RailSignals], private to this rank: what each counter has reached. Zero after a reset
  bool in_flight;      // few tokens: launched in parts
  Part part;           // set by the launcher of each kernel
};

// PlanRail for few tokens, which go from rank to rank: `staging` as PlanLowLatency made it.
inline void PlanDirect(const Routing& r, Operation operation, RailPlan* plan, Staging* staging) {
  auto up = [](uint64_t x, uint64_t to) { return (x + to - 1) / to * to; };
  const bool combine = operation == Operation::kCombine;
  const int columns = r.layout == Layout::kRanked ? 1 : r.local_experts;
  plan->direct = true;
  plan->counts_bytes = combine ? 0 : up(static_cast<uint64_t>(columns) * 4, 16);
  const int most = r.tokens < plan->chunk_tokens ? r.tokens : plan->chunk_tokens;  // tokens of a chunk
  plan->chunk_bytes = sizeof(ChunkHeader) + plan->counts_bytes + most * plan->record_bytes;
  const uint64_t all = static_cast<uint64_t>(r.ranks) * plan->chunks * plan->chunk_bytes;
  plan->send = up(staging->data_bytes, 128);
  plan->receive = up(plan->send + all, 128);
  staging->data_bytes = up(plan->receive + all, 256);
}

// Completes `staging`, as PlanStaging or PlanLowLatency made it, for an operation over several nodes. `masked`: the
// operation has an `active` mask.
inline RailPlan PlanRail(const Routing& r, Operation operation, int chunk_tokens, const Schedule& s, bool masked,
                         Staging* staging) {
  auto up = [](uint64_t x, uint64_t to) { return (x + to - 1) / to * to; };
  RailPlan plan{};
  plan.per_node = r.ranks_per_node, plan.nodes = r.ranks / r.ranks_per_node;
  plan.node = r.rank / r.ranks_per_node, plan.index = r.rank % r.ranks_per_node;
  plan.chunk_tokens = chunk_tokens, plan.chunks = (r.tokens + chunk_tokens - 1) / chunk_tokens;
  plan.routing_offset = staging->row_bytes;
  plan.routing_bytes = operation == Operation::kCombine ? 0 : up(static_cast<uint64_t>(r.top_k) * 8, 16);
  plan.record_bytes = staging->row_bytes;
  if (s.low_latency) {
    plan.record_bytes += plan.routing_bytes;
    PlanDirect(r, operation, &plan, staging);
    return plan;
  }
  plan.chunk_bytes = sizeof(ChunkHeader) + plan.chunk_tokens * plan.record_bytes;
  const uint64_t flags = static_cast<uint64_t>(r.ranks) * plan.chunks * 4;
  plan.routing_flags = up(staging->row_flags + static_cast<uint64_t>(r.ranks) * r.tokens * s.parts * 4, 128);
  staging->flag_bytes = FlagAndLineBytes(plan.routing_flags + flags, 0);
  plan.masks = staging->data_bytes;
  plan.masked = staging->by_rank = masked;
  const uint64_t places = masked ? r.ranks : plan.nodes, all = places * plan.chunks * plan.chunk_bytes;
  if (operation != Operation::kCombine) plan.leads = (plan.chunks + kLeadChunks - 1) / kLeadChunks;
  plan.lead_bytes = sizeof(LeadHeader) + kLeadChunks * plan.chunk_tokens * plan.routing_bytes;
  plan.send = up(plan.masks + flags, 128);
  plan.receive = up(plan.send + all, 128);
  plan.lead_send = up(plan.receive + all, 128);
  plan.lead_receive = up(plan.lead_send + places * plan.leads * plan.lead_bytes, 128);
  staging->data_bytes = up(plan.lead_receive + places * plan.leads * plan.lead_bytes, 256);
  return plan;
}

// Returns null, or why the kernels across nodes do not support the operation.
inline const char* UnfitRail(const Call& call, const Routing& r, const Schedule& s, const RailPlan& plan) {
  if (call.active != nullptr && !plan.masked && !plan.direct) return "an active mask, without room for it";
  if (s.low_latency != plan.direct) return "low latency";
  if (plan.direct && plan.chunks > kMaxDirectChunks) return "too many tokens for low latency across nodes";
  if (r.ranks_per_node < 1 || r.ranks % r.ranks_per_node != 0 || plan.nodes < 2 || plan.nodes > kMaxNodes) {
    return "ranks_per_node";
  }
  if (plan.chunk_tokens < 1 || plan.chunk_tokens > kChunkTokens || plan.chunks > kMaxChunks) return "chunk_tokens";
  return nullptr;
}

}  // namespace xen_moe
