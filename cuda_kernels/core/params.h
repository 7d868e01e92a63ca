// One plain struct per kernel: everything that the kernel reads and writes. No JAX, Python or FFI types here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda_kernels/core/workspace.h"

namespace xen_moe {

enum class Layout : int { kGrouped = 0, kRanked = 1, kPadded = 2 };
// kByte: 1-byte values that are copied unchanged
enum class Element : int { kBf16 = 0, kF16 = 1, kF32 = 2, kByte = 3 };
enum class WireType : int { kNative = 0, kFp8 = 1, kInt8 = 2, kMxfp4 = 3 };

inline int ElementBytes(Element e) { return e == Element::kF32 ? 4 : e == Element::kByte ? 1 : 2; }

// The part of the parameters that lets an operation run beside other operations and report failures. The host fills it;
// it is the first member of each Params.
struct Call {
  Control* control;
  Mailbox* mailbox;     // this rank's own
  uint64_t timeout_ns;  // 0: waits without a limit, but ends when the group has failed
  uint32_t call_id;     // identifies the call site on this device, unique in the process; never 0
  uint32_t signature;   // Signature(descriptor)
  const bool* active;   // [ranks]: which ranks take part; null: all
  uint32_t* begun;      // set to `begin` when the first block begins; null: not wanted
  uint32_t begin;
  Needs needs;
  Descriptor descriptor;  // Describe(...)
};

// Shapes that dispatch, redispatch and combine share; see docs/design/internals.md for the letters.
struct Routing {
  int ranks;          // R
  int rank;           // this rank
  int tokens;         // T
  int top_k;          // K
  int slots;          // K, or 1 in the ranked layout
  int experts;        // E
  int local_experts;  // L
  int hidden;         // H
  int capacity;       // rows of the output; padded: L * R * T
  int alignment;
  int ranks_per_node;  // equals `ranks` when all ranks share one node
  Layout layout;
};

// Places in a half of the staging area: flags in bytes from its start, data in bytes from the start of its data, LL128
// lines counted from the first line. In groups of more than kSmallGroup ranks, rows may lie in rings; the low-latency
// kernels have no rings.
struct Staging {
  uint64_t metadata_flags;  // [R][kMaxBlocks]
  uint64_t row_flags;       // [R][T][parts]
  uint64_t flag_bytes;
  uint64_t topk_idx;      // [R][T][K] int32
  uint64_t topk_weights;  // [R][T][K] float32
  uint64_t rows;          // [R][T] wire rows, or [R][ring_tokens]; of a combine by home [T][K]
  uint64_t row_bytes;     // bytes of one wire row: values, then scales, each padded to 16 bytes
  uint64_t scale_offset;  // where the scales begin in a wire row
  uint64_t data_bytes;    // data start at half_bytes - data_bytes
  union {
    int count_lines;  // lines with a source's row counts per local expert; a line per token follows
    // tokens of each source's ring, kRingRounds rounds: token t lies at t % ring_tokens. 0: all T tokens have a row
    int ring_tokens;
  };
  int row_rounds;  // rounds of a row (ll128.cuh)
  bool by_rank;    // chunks between nodes are kept by rank, for ranks may be inactive (node/rail_plan.h)
  union {
    uint64_t row_lines;     // the first of [R][T][row_rounds] rounds, behind the messages of R ranks
    uint64_t credit_flags;  // [R][rounds]: rank r has taken that round out of its rings
  };
};

// How the work is divided. Every number of resident blocks makes progress; the number only decides the speed.
struct Schedule {
  int blocks;          // thread blocks, one per SM
  int push_blocks;     // the first blocks push rows to the peers before any other work
  int layout_blocks;   // slices of the metadata, sent by the last blocks; equal on all ranks
  int parts;           // a row is moved in this many parts (more than 1 for small batches)
  int part_elements;   // multiple of 256
  int segment_tokens;  // tokens that one warp counts
  bool solo_layout;    // every block computes all positions for itself, in shared memory; equal on all ranks
  // run the kernels of low_latency/: the first layout_blocks blocks (dispatch) send the routing, the next push_blocks
  // the rows, the remaining ones receive; if none remains, all blocks do all three
  bool low_latency;
  bool bulk;         // rows are placed by bulk copies, where the GPU has them
  int chunk_tokens;  // tokens that cross to another node in one chunk; 0: all ranks share NVLink. node/rail_plan.h
};

// Returns whether staged rows lie in rings.
inline bool HasRing(const Schedule& schedule, const Staging& staging) {
  return !schedule.low_latency && staging.ring_tokens > 0;
}

struct DispatchParams {
  Call call;
  Routing routing;
  Staging staging;
  Schedule schedule;
  Element element;
  WireType wire;
  bool ue8m0;
  bool known_positions;       // redispatch
  const void* x;              // [T, H]
  const float* scales;        // [T, ceil(H/128)] or null
  const int* topk_idx;        // [T, K]
  const float* topk_weights;  // [T, K]; null for redispatch
  void* rows;                 // [C, H]
  float* row_scales;          // [C, ceil(H/128)] or null
  int* positions;             // [R, T, slots]: written, or read by redispatch
  int* recv_counts;           // [R, L]: written, or read by redispatch
  float* weights;             // [C] or [C, K]
  int* local_idx;             // [C, K], ranked only
  int* clean_topk_idx;        // [T, K] or null: topk_idx with -1 for every entry outside [0, E)
};

struct CombineParams {
  Call call;
  Routing routing;
  Staging staging;
  Schedule schedule;
  Element element;
  WireType wire;
  bool ue8m0;
  const void* y;         // [C, H]
  const int* topk_idx;   // [T, K]
  const int* positions;  // [R, T, slots]
  const float* weights;  // [C], or null: unweighted
  void* out;             // [T, H]
  // A combine by home (combine/home.cuh), whose sums are those of the homes, wherever the rows are.
  bool by_home;
  const int* home;            // [T, K], the rank as whose row a slot is added; -1: the slot is not used
  const float* topk_weights;  // [T, K], or null: unweighted
};

// Lanes of a thread block of an all_gather through rings. The emulator has fewer, since each of its threads needs a
// stack.
#ifndef XEN_MOE_BLOCK_LANES
#define XEN_MOE_BLOCK_LANES 16
#endif
constexpr int kBlockLanes = XEN_MOE_BLOCK_LANES;
// Rows of `unit_bytes` bytes from this rank to every rank: all_to_all, ragged_all_to_all when the arrays are given, or
// all_gather, in which every rank gets the whole operand.
struct ExchangeParams {
  Call call;
  int ranks, rank;
  bool gather;       // all_gather
  bool low_latency;  // all_gather by low_latency/gather.cu: through LL128 lines instead of rings, in `lanes` blocks
  // every byte of a failed result: 0xFF is NaN in every floating dtype that has NaN, except fnuz types (0x80)
  uint8_t poison;
  uint64_t message_flags, chunk_flags, credit_flags, flag_bytes;  // flags, from the start of a half
  uint64_t offsets, ring, data_bytes;                             // data, which start at half_bytes - data_bytes
  uint64_t chunk_bytes;                                           // multiple of 16
  int ring_chunks;                                                // chunks per (source, lane) in the ring
  int lanes;       // blocks per peer; gather: ways to each peer, kBlockLanes for each block; low_latency: all blocks
  int round = -1;  // of an all_gather through rings: the only round to run, without this rank's own rows; -1: all
  uint64_t max_chunks;  // per (source, lane)
  uint64_t unit_bytes;
  uint64_t operand_units, output_units;
  const char* operand;
  char* output;
  // null but for ragged_all_to_all: then every pair of ranks moves PairUnits(params). Element `i` belongs to group rank
  // `i`.
  const int* input_offsets;
  const int* send_sizes;
  const int* output_offsets;
  const int* recv_sizes;
  // move_weights: the unit of the operands, rank * operand_units + its number, that each of the `output_units` units of
  // every rank gets, [R, output_units]; -1: the unit gets zeros, -2: bytes `lost`, -3: it is not written. Else null.
  const int* sources;
  bool by_table;  // move_weights: every launch gives `sources`
  uint8_t lost;
};

// Memory that staged rows may take in groups of more than kSmallGroup ranks: `bytes` of a half, or `tokens` of
// every source where that is more. An operation of more tokens sends them in rounds (rounds.cuh). All ranks must agree.
struct RingLimits {
  uint64_t bytes = 128ull << 20;
  int tokens = 256;
};
// Sizes and places, from the shapes (plan.cc). `scaled`: x comes with scales.
Staging PlanStaging(const Routing& routing, const Schedule& schedule, Element element, WireType wire, bool scaled,
                    const RingLimits& limits = RingLimits());
// PlanStaging for a combine by home: [T][K] rows.
Staging PlanHomeStaging(const Routing& routing, const Schedule& schedule, Element element);
// PlanStaging for the low-latency kernels (schedule.low_latency). `operation`: dispatch or combine.
Staging PlanLowLatency(const Routing& routing, Operation operation, Element element, bool scaled);
// Returns null, or why the low-latency kernels do not support the operation; the other kernels support every operation.
// `chunk_tokens`: as in the schedule.
const char* WhyNotLowLatency(const Routing& routing, Operation operation, Element element, WireType wire,
                             int chunk_tokens);
// Returns null, or why no kernel runs a combine by home of these shapes.
const char* WhyNotByHome(const Routing& routing, WireType wire, bool low_latency, int chunk_tokens);
Needs NeedsOf(const Routing& routing, const Schedule& schedule, const Staging& staging);
// Fills message_flags ... data_bytes, offsets, ring and max_chunks from the other fields.
void PlanExchange(ExchangeParams* params, bool ragged);
Needs NeedsOf(const ExchangeParams& params);

// Completes params->call: descriptor, signature and needs. `dtype`, `site`: the host's, see Descriptor.
void Describe(DispatchParams* params, bool scaled, uint32_t dtype, uint32_t site);
void Describe(CombineParams* params, bool weighted, uint32_t dtype, uint32_t site);
void Describe(ExchangeParams* params, bool ragged, uint32_t dtype, uint32_t site);

// Null, or what is wrong with sizes that the kernels rely on. Launchers refuse such params (cudaErrorInvalidValue).
const char* Unfit(const DispatchParams& params);
const char* Unfit(const CombineParams& params);
const char* Unfit(const ExchangeParams& params);
// Thread blocks that an exchange takes.
inline int ExchangeBlocks(const ExchangeParams& params) {
  if (params.low_latency) return params.lanes;
  const int per_round = params.gather ? params.lanes / kBlockLanes : params.lanes;
  return (params.round >= 0 ? 1 : params.ranks) * per_round;
}
// Units that every pair of ranks moves in an all_to_all or an all_gather.
XEN_MOE_ANYWHERE inline uint64_t PairUnits(const ExchangeParams& params) {
  return params.gather ? params.operand_units : params.operand_units / params.ranks;
}

// Bytes of a rank's private scratch memory that a dispatch needs.
uint64_t DispatchScratchBytes(const Routing& routing, const Schedule& schedule);
// Bytes of shared memory that Schedule::solo_layout takes, and how many there are.
uint64_t SoloLayoutBytes(const Routing& routing, const Schedule& schedule);
uint64_t SoloLayoutLimit();

}  // namespace xen_moe
