// One plain struct per kernel: everything that it reads and writes. No JAX, Python or FFI types here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda_kernels/core/workspace.h"

namespace xen_moe {

enum class Layout : int { kGrouped = 0, kRanked = 1, kPadded = 2 };
enum class Element : int { kBf16 = 0, kF16 = 1, kF32 = 2, kByte = 3 };  // kByte: 1-byte values that are only copied
enum class WireType : int { kNative = 0, kFp8 = 1, kInt8 = 2 };

inline int ElementBytes(Element e) { return e == Element::kF32 ? 4 : e == Element::kByte ? 1 : 2; }

// What every operation needs to run beside others and to fail well. The host fills it; the first member of each Params.
struct Call {
  Control* control;
  Mailbox* mailbox;     // this rank's own
  uint64_t timeout_ns;  // 0: waits for ever, but leaves when the group has failed
  uint32_t call_id;     // of the call site on this device, unique in the process; never 0
  uint32_t signature;   // Signature(descriptor)
  const bool* active;   // [ranks]: who takes part; null: all
  uint32_t* begun;      // set to `begin` when the first block begins; null: nobody looks at it
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
  int ranks_per_node;  // == ranks when there is one axis
  Layout layout;
};

// Where things lie in a half of the staging area: flags in bytes from its start, data from the start of its data, lines
// (low latency) counted from the first one. Of groups of more than kSmallGroup ranks, rows may lie in rings, which the
// low-latency kernels do not have.
struct Staging {
  uint64_t metadata_flags;  // [R][kMaxBlocks]
  uint64_t row_flags;       // [R][T][parts]
  uint64_t flag_bytes;
  uint64_t topk_idx;      // [R][T][K] int32
  uint64_t topk_weights;  // [R][T][K] float32
  uint64_t rows;          // [R][T] wire rows, or [R][ring_tokens]
  uint64_t row_bytes;     // of one wire row: values, then scales, each padded to 16 bytes
  uint64_t scale_offset;  // of the scales in a wire row
  uint64_t data_bytes;    // data start at half_bytes - data_bytes
  union {
    int count_lines;  // of a source's message: its rows per local expert; then a line per token
    int ring_tokens;  // of each source, kRingRounds rounds: token t lies at t % ring_tokens. 0: all T have a row
  };
  int row_rounds;  // rounds of a row (ll128.cuh)
  union {
    uint64_t row_lines;     // the first of [R][T][row_rounds] rounds, behind [R] messages
    uint64_t credit_flags;  // [R][rounds]: rank r has taken that round out of its rings
  };
};

// How the work is cut. Any number of resident blocks makes progress; how many do what decides the speed alone.
struct Schedule {
  int blocks;          // thread blocks, one per SM
  int push_blocks;     // the first blocks push rows to the peers before they do anything else
  int layout_blocks;   // slices of the metadata, sent by the last blocks; equal on all ranks
  int parts;           // a row is moved in this many parts (small batches)
  int part_elements;   // multiple of 256
  int segment_tokens;  // tokens that one warp counts
  bool solo_layout;    // every block computes all positions for itself, in shared memory
  bool low_latency;    // the kernels of low_latency_*.cuh: the first layout_blocks blocks (dispatch) send the routing,
                       // the next push_blocks the rows, the others receive; if none is left, all do
  bool bulk;           // rows are placed by bulk copies, where the GPU has them
  int chunk_tokens;    // tokens that cross to another node together; 0: all ranks share NVLink. rail_plan.h
};

// Whether staged rows lie in rings.
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
};

// Rows of `unit_bytes` bytes from this rank to every other: all_to_all, and ragged_all_to_all when the arrays are
// given.
struct ExchangeParams {
  Call call;
  int ranks, rank;
  uint8_t poison;  // every byte of a failed result: 0xFF is NaN in every floating dtype that has one but fnuz (0x80)
  uint64_t message_flags, chunk_flags, credit_flags, flag_bytes;  // flags, from the start of a half
  uint64_t offsets, ring, data_bytes;                             // data, which start at half_bytes - data_bytes
  uint64_t chunk_bytes;                                           // multiple of 16
  int ring_chunks;                                                // chunks per (source, lane) in the ring
  int lanes;                                                      // blocks per peer
  uint64_t max_chunks;                                            // per (source, lane)
  uint64_t unit_bytes;
  uint64_t operand_units, output_units;
  const char* operand;
  char* output;
  // null for all_to_all: then every pair moves operand_units / ranks units. Element `i` belongs to group rank `i`.
  const int* input_offsets;
  const int* send_sizes;
  const int* output_offsets;
  const int* recv_sizes;
};

// How much staged rows may take in groups of more than kSmallGroup ranks: `bytes` of a half, or `tokens` of every
// source where that is more. An operation of more tokens goes through them in rounds (rounds.cuh). All ranks must
// agree.
struct RingLimits {
  uint64_t bytes = 128ull << 20;
  int tokens = 256;
};
// Sizes and places, from the shapes: plan.cc. `scaled`: x comes with scales.
Staging PlanStaging(const Routing& routing, const Schedule& schedule, Element element, WireType wire, bool scaled,
                    const RingLimits& limits = RingLimits());
// The same for the low-latency kernels: schedule.low_latency. `operation`: dispatch or combine.
Staging PlanLowLatency(const Routing& routing, Operation operation, Element element, bool scaled);
// Null, or why the low-latency kernels do not take the operation; the others take every one. `chunk_tokens`: of the
// schedule.
const char* WhyNotLowLatency(const Routing& routing, Operation operation, Element element, WireType wire,
                             int chunk_tokens);
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
inline int ExchangeBlocks(const ExchangeParams& params) { return params.ranks * params.lanes; }

// Bytes of a rank's private scratch memory that a dispatch needs.
uint64_t DispatchScratchBytes(const Routing& routing, const Schedule& schedule);
// Bytes of shared memory that Schedule::solo_layout takes, and how many there are.
uint64_t SoloLayoutBytes(const Routing& routing, const Schedule& schedule);
uint64_t SoloLayoutLimit();

}  // namespace xen_moe
