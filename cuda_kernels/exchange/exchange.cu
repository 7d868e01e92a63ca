// all_to_all, ragged_all_to_all and move_weights, through rings (ring.cuh). In the first two, every rank sends
// contiguous bytes to every other rank. In move_weights, a table names the unit that each unit of an output gets; the
// message to a rank is the sequence of the units that it gets.
//
// A crew is half a block. The receiver of a ragged message also waits for its Message, which the sender's crew of lane
// 0 stores before its first chunk.
#include "cuda_kernels/exchange/ring.cuh"

namespace xen_moe::XEN_MOE_VARIANT {
namespace {

using Half = Crew<kThreads, 1, 4>;

// Where a message goes, and its length.
struct Message {
  int offset;  // units into the receiver's output
  int units;
};

// Returns the message from this rank to `target`, and sets `first` to its first unit in the operand. Units outside this
// rank's operand, or outside the target's output, which is as large as this rank's, are left out.
__device__ __forceinline__ Message Outgoing(const ExchangeParams& p, int target, uint64_t* first) {
  if (!p.send_sizes) {
    const int units = static_cast<int>(p.operand_units / p.ranks);
    *first = static_cast<uint64_t>(target) * units;
    return {p.rank * units, units};
  }
  const int64_t begin = p.input_offsets[target], to = p.output_offsets[target];
  const int64_t left_out = max(int64_t{0}, max(-begin, -to));
  const int64_t room = min(static_cast<int64_t>(p.operand_units) - begin, static_cast<int64_t>(p.output_units) - to);
  const int64_t units = min(static_cast<int64_t>(p.send_sizes[target]), room) - left_out;
  *first = static_cast<uint64_t>(begin + left_out);
  return {static_cast<int>(to + left_out), units > 0 ? static_cast<int>(units) : 0};
}
// Returns whether a message lies inside this rank's output.
__device__ __forceinline__ bool Fits(const ExchangeParams& p, const Message& m) {
  return m.offset >= 0 && static_cast<int64_t>(m.offset) + m.units <= static_cast<int64_t>(p.output_units);
}

// Returns the flag that `target` has for the Message of `source`.
__device__ __forceinline__ uint32_t* MessageFlag(const ExchangeParams& p, const Running& run, int source, int target) {
  return reinterpret_cast<uint32_t*>(run.half[target] + p.message_flags) + source;
}

// The chunks of one lane for the units that `target` gets from `source`, one unit after another. Each unit begins a new
// chunk. The caller asks for chunks in ascending order and gets their places in the operand (kSending) or in the
// output.
template <bool kSending>
struct UnitChunks {
  const ExchangeParams& p;
  const int* sources;  // the row of the table for `target`
  uint64_t per_unit, count;
  int source, lane, unit = -1;  // unit: the latest unit of the target that was reached
  int64_t number = -1;          // the number of `unit` among the units from `source`
  __device__ __forceinline__ UnitChunks(const ExchangeParams& params, int from, int target, int carrier)
      : p(params), sources(params.sources + target * params.output_units), source(from), lane(carrier) {
    per_unit = (p.unit_bytes + p.chunk_bytes - 1) / p.chunk_bytes;
    uint64_t units = 0;
    for (int i = 0; i < static_cast<int>(p.output_units); ++i) units += Comes(i);
    const uint64_t all = units * per_unit, first = static_cast<uint64_t>(lane);
    count = min(all > first ? (all - first + p.lanes - 1) / p.lanes : 0, p.max_chunks);
  }
  // Returns whether unit `i` of the target comes from `source`.
  __device__ __forceinline__ bool Comes(int i) const {
    return sources[i] >= 0 && sources[i] / static_cast<int>(p.operand_units) == source;
  }
  __device__ __forceinline__ Chunk operator()(uint64_t n) {
    const uint64_t piece = n * p.lanes + lane;
    while (number < static_cast<int64_t>(piece / per_unit)) {
      ++unit;
      number += Comes(unit);
    }
    const uint64_t begin = piece % per_unit * p.chunk_bytes;
    const uint64_t row = kSending ? sources[unit] % static_cast<int>(p.operand_units) : unit;
    return {row * p.unit_bytes + begin, min(p.chunk_bytes, p.unit_bytes - begin)};
  }
};

// Sends one lane to `target`. A crew calls it. Returns false if the group has failed.
__device__ __forceinline__ bool Send(const ExchangeParams& p, const Running& run, int target, int lane) {
  if (p.sources) return SendChunks<Half>(p, run, target, lane, UnitChunks<true>(p, p.rank, target, lane));
  uint64_t first;
  const Message message = Outgoing(p, target, &first);
  if (p.send_sizes && Half::Leads() && lane == 0) {
    reinterpret_cast<Message*>(run.data[target] + p.offsets)[p.rank] = message;
    FenceSystem();
    StoreRelaxedSystem(MessageFlag(p, run, p.rank, target), run.epoch);
  }
  const uint64_t bytes = static_cast<uint64_t>(message.units) * p.unit_bytes;
  return SendChunks<Half>(p, run, target, lane, ContiguousChunks(p, first * p.unit_bytes, bytes, lane));
}

// Receives one lane from `source`. A crew calls it. Returns false if the group has failed.
__device__ __forceinline__ bool Receive(const ExchangeParams& p, const Running& run, int source, int lane) {
  __shared__ Message message;
  const uint32_t epoch = run.epoch;
  if (p.sources) return ReceiveChunks<Half>(p, run, source, lane, true, UnitChunks<false>(p, source, p.rank, lane));
  const bool arrived = Half::LeaderWaits([&] {
    if (!p.send_sizes) {
      const int units = static_cast<int>(p.operand_units / p.ranks);
      message = {source * units, units};
      return true;
    }
    if (!WaitFlag(MessageFlag(p, run, source, p.rank), run, epoch, Step::kMetadata, source)) return false;
    const uint32_t* from = reinterpret_cast<const uint32_t*>(run.data[p.rank] + p.offsets) + 2 * source;
    message = {static_cast<int>(LoadRelaxedSystem(from)), static_cast<int>(LoadRelaxedSystem(from + 1))};
    return true;
  });
  if (!arrived) return false;
  const uint64_t bytes = static_cast<uint64_t>(max(0, message.units)) * p.unit_bytes;
  const uint64_t to = static_cast<uint64_t>(message.offset) * p.unit_bytes;
  return ReceiveChunks<Half>(p, run, source, lane, Fits(p, message), ContiguousChunks(p, to, bytes, lane));
}

// Copies one lane of the units that this rank gets from itself, and fills its share of the units that come from no rank
// (-1 and -2 in the table). Both crews of a block call it and take chunks in turn.
__device__ __forceinline__ void CopyOwnUnits(const ExchangeParams& p, int lane) {
  UnitChunks<true> from(p, p.rank, p.rank, lane);
  UnitChunks<false> to(p, p.rank, p.rank, lane);
  for (uint64_t n = Half::Number(); n < from.count; n += 2) {
    const Chunk chunk = from(n);
    CopyBytes<Half>(p.output + to(n).at, p.operand + chunk.at, chunk.bytes);
  }
  for (uint64_t unit = 0; unit < p.output_units; ++unit) {
    const int source = p.sources[p.rank * p.output_units + unit];
    if (source != -1 && source != -2) continue;
    FillBytes(p.output + unit * p.unit_bytes, p.unit_bytes, source == -1 ? 0 : p.lost, lane, p.lanes);
  }
}

// Copies one lane of this rank's message to itself. The receiving crew calls it.
__device__ __forceinline__ void CopyOwn(const ExchangeParams& p, int lane) {
  uint64_t first;
  const Message message = Outgoing(p, p.rank, &first);
  if (!Fits(p, message)) return;
  const uint64_t bytes = static_cast<uint64_t>(message.units) * p.unit_bytes;
  for (uint64_t begin = lane * p.chunk_bytes; begin < bytes; begin += p.lanes * p.chunk_bytes) {
    CopyBytes<Half>(p.output + static_cast<uint64_t>(message.offset) * p.unit_bytes + begin,
                    p.operand + first * p.unit_bytes + begin, min(p.chunk_bytes, bytes - begin));
  }
}

__global__ void __launch_bounds__(Half::kBlockThreads, 1) ExchangeKernel(const __grid_constant__ ExchangeParams p) {
  __shared__ Running run;
  BeginOperation(run, p.call, Operation::kExchange, p.ranks, p.rank);
  if (!run.refused) {
    // Only move_weights has inactive ranks. Its table names no unit of them, and nothing is sent to them.
    TakePairs<Half>(
        p, run,
        [&](int lane) {
          if (p.sources) {
            CopyOwnUnits(p, lane);
          } else if (!Half::Sends()) {
            CopyOwn(p, lane);
          }
        },
        [&](int target, int lane) { return !Holds(run.active, target) || Send(p, run, target, lane); },
        [&](int source, int lane) { return !Holds(run.active, source) || Receive(p, run, source, lane); });
  }
  FinishOperation(run, [&](uint32_t index, uint32_t count) {
    FillBytes(p.output, p.output_units * p.unit_bytes, p.poison, index, count);
  });
}

}  // namespace

int LaunchRingExchange(const ExchangeParams& p, cudaStream_t stream) {
  if (Unfit(p) || p.ranks > kRanks) return cudaErrorInvalidValue;
  return Launch(ExchangeKernel, ExchangeBlocks(p), Half::kBlockThreads, 0, stream, p);
}
int PreloadRingExchange() { return LoadKernel(ExchangeKernel); }

}  // namespace xen_moe::XEN_MOE_VARIANT
