// Dispatch of small batches: no barrier between blocks, no fence, no flag beside the data.
//
// What moves: to every rank, this one too, a message of lines: how many rows each of its experts gets from here, then
// per token a line that says for every slot which expert of that rank wants it, its number among this rank's rows of
// that expert, and its weight. To every other rank that owns one of its experts, a token's row in lines, behind the
// messages. Who does it: the first `layout_blocks` blocks number all rows, each for itself in shared memory, and send
// shares of the messages; the next `push_blocks` send shares of the rows, and need to know nothing but topk_idx; the
// others receive: each adds up the counts of all sources for itself, and its warps place parts of rows as their lines
// come in. Who waits for whom: senders wait for nobody. A receiver waits for lines alone; before its first long wait,
// and once all counts have come, it does what no block of this GPU has started (claims.cuh), so every wait ends with
// any number of resident blocks. Memory order: lines.cuh; nothing else is shared between GPUs. What peers sent is
// checked before it becomes an address. Ranks that are out are sent nothing, and nothing is awaited from them.
#include "dispatch.cuh"
#include "low_latency.cuh"
#include "phases.cuh"

namespace xen_moe {
namespace {

// What a block knows of the operation. `shared`: its dynamic shared memory.
struct Plan {
  const DispatchParams& p;
  const Running& run;
  char* shared;
  SharedPlan at;
  int routing_shares, push_shares, receivers, receiver;  // receiver: this block's number among them, or negative

  __device__ __forceinline__ Plan(const DispatchParams& params, const Running& running, char* dynamic)
      : p(params), run(running), shared(dynamic), at(PlanShared(params.routing)) {
    const int blocks = static_cast<int>(gridDim.x);
    routing_shares = p.schedule.layout_blocks;
    push_shares = p.schedule.push_blocks;
    const int senders = routing_shares + push_shares;
    receivers = blocks > senders ? blocks - senders : blocks;
    receiver = static_cast<int>(blockIdx.x) - (blocks - receivers);
  }
  __device__ __forceinline__ int Shares() const { return routing_shares + push_shares; }
  template <class T>
  __device__ __forceinline__ T* In(uint32_t offset) const {
    return reinterpret_cast<T*>(shared + offset);
  }
  // In the lines of rank `on`: the message of `source`, and its token's row.
  __device__ __forceinline__ char* Message(int on, int source) const {
    const uint64_t lines = static_cast<uint64_t>(source) * (p.staging.count_lines + p.routing.tokens);
    return run.half[on] + run.line_border + lines * kLineBytes;
  }
  __device__ __forceinline__ char* Row(int on, int source, int token) const {
    const uint64_t row = static_cast<uint64_t>(source) * p.routing.tokens + token;
    return run.half[on] + run.line_border +
           (p.staging.row_lines + row * p.staging.row_rounds * kRoundLines) * kLineBytes;
  }
};

// The piece at byte `at` of a token's wire row: values, then scales. Zeros past its end.
__device__ __forceinline__ uint4 LoadPiece(const DispatchParams& p, int token, const Piece& piece, int at) {
  const int values = static_cast<int>(p.staging.scale_offset);
  uint4 v = make_uint4(0, 0, 0, 0);
  if (at < values) {
    const char* from = static_cast<const char*>(p.x) + static_cast<int64_t>(token) * values + at;
    if (piece.flags) {
      const uint2 half = __ldcs(reinterpret_cast<const uint2*>(from));
      v.x = half.x, v.y = half.y;
    } else {
      v = __ldcs(reinterpret_cast<const uint4*>(from));
    }
  } else if (at < static_cast<int>(p.staging.row_bytes)) {
    const int blocks = (p.routing.hidden + kScaleBlock - 1) / kScaleBlock, first = (at - values) / 4;
    const uint32_t* scales = reinterpret_cast<const uint32_t*>(p.scales) + static_cast<int64_t>(token) * blocks;
    if (first < blocks) v.x = __ldcs(scales + first);
    if (first + 1 < blocks) v.y = __ldcs(scales + first + 1);
    if (!piece.flags && first + 2 < blocks) v.z = __ldcs(scales + first + 2);
    if (!piece.flags && first + 3 < blocks) v.w = __ldcs(scales + first + 3);
  }
  return v;
}
__device__ __forceinline__ void StorePiece(const DispatchParams& p, int64_t row, const Piece& piece, int at, uint4 v) {
  const int values = static_cast<int>(p.staging.scale_offset);
  if (at < values) {
    char* to = static_cast<char*>(p.rows) + row * values + at;
    if (piece.flags) {
      *reinterpret_cast<uint2*>(to) = make_uint2(v.x, v.y);
    } else {
      *reinterpret_cast<uint4*>(to) = v;
    }
  } else if (at < static_cast<int>(p.staging.row_bytes) && p.row_scales) {
    const int blocks = (p.routing.hidden + kScaleBlock - 1) / kScaleBlock, first = (at - values) / 4;
    uint32_t* scales = reinterpret_cast<uint32_t*>(p.row_scales) + row * blocks;
    if (first < blocks) scales[first] = v.x;
    if (first + 1 < blocks) scales[first + 1] = v.y;
    if (!piece.flags && first + 2 < blocks) scales[first + 2] = v.z;
    if (!piece.flags && first + 3 < blocks) scales[first + 3] = v.w;
  }
}

// Pushing: warps take (token, round) items of a share, kAhead at a time.
constexpr int kAhead = 4;
struct Batch {
  uint4 v[kAhead];
  int expert[kAhead];  // lane k: of slot k

  __device__ __forceinline__ void Load(const DispatchParams& p, const Piece& piece, int item, int end) {
    const int lane = threadIdx.x & 31, rounds = p.staging.row_rounds;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int now = item + i * kWarps;
      if (now >= end) break;
      const int token = now / rounds;
      v[i] = LoadPiece(p, token, piece, (now - token * rounds) * kRoundData + piece.offset);
      expert[i] = lane < p.routing.top_k ? p.topk_idx[static_cast<int64_t>(token) * p.routing.top_k + lane] : -1;
    }
  }
  __device__ __forceinline__ void Store(const Plan& plan, const Piece& piece, int item, int end) const {
    const DispatchParams& p = plan.p;
    const Routing& r = p.routing;
    const int rounds = p.staging.row_rounds, first = r.rank + 1 < r.ranks ? r.rank + 1 : 0;
    const uint32_t others = plan.run.active & ~(1u << r.rank);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int now = item + i * kWarps;
      if (now >= end) break;
      const int token = now / rounds, round = now - token * rounds;
      const bool real = expert[i] >= 0 && expert[i] < r.experts;
      const uint32_t ranks = __reduce_or_sync(0xFFFFFFFFu, real ? 1u << (expert[i] / r.local_experts) : 0u) & others;
      const int lines = Piece::Lines(round * kRoundData, static_cast<int>(p.staging.row_bytes));
      uint32_t rotated = (ranks >> first) | (ranks << (r.ranks - first) & ((1u << r.ranks) - 1));
      for (; rotated; rotated &= rotated - 1) {
        int rank = __ffs(rotated) - 1 + first;
        if (rank >= r.ranks) rank -= r.ranks;
        char* to = plan.Row(rank, r.rank, token) + round * (kRoundLines * kLineBytes);
        StoreRound(to, piece, v[i], lines, plan.run.epoch);
      }
    }
  }
};
__device__ __forceinline__ void ShareOf(const DispatchParams& p, int share, int shares, int* begin, int* end) {
  const int64_t items = p.routing.ranks > 1 ? static_cast<int64_t>(p.routing.tokens) * p.staging.row_rounds : 0;
  *begin = static_cast<int>(items * share / shares);
  *end = static_cast<int>(items * (share + 1) / shares);
}
__device__ __forceinline__ void PushShare(const Plan& plan, const Piece& piece, int share) {
  int begin, end;
  ShareOf(plan.p, share, plan.push_shares, &begin, &end);
  for (int item = begin + static_cast<int>(threadIdx.x / 32); item < end; item += kAhead * kWarps) {
    Batch batch;
    batch.Load(plan.p, piece, item, end);
    batch.Store(plan, piece, item, end);
  }
}

// Routing. Loads what the numbering needs into shared memory; a __syncthreads must follow.
__device__ __forceinline__ void LoadRouting(const Plan& plan) {
  const Routing& r = plan.p.routing;
  const int slots = r.tokens * r.top_k;
  int16_t* experts = plan.In<int16_t>(plan.at.experts);
  float* weights = plan.In<float>(plan.at.weights);
  for (int i = threadIdx.x; i < slots; i += kThreads) {
    const int expert = plan.p.topk_idx[i];
    const float weight = plan.p.topk_weights[i];
    experts[i] = expert >= 0 && expert < r.experts ? static_cast<int16_t>(expert) : int16_t{-1};
    weights[i] = weight;
  }
  uint32_t* before = plan.In<uint32_t>(plan.at.before);
  for (int i = threadIdx.x; i < (kWarps * plan.at.columns + 1) / 2; i += kThreads) before[i] = 0;
}

// Column of entry `i`, or -1. Ranked: entries are (token, rank), of the ranks that own any of the token's experts.
__device__ __forceinline__ int ColumnOfEntry(const Plan& plan, int i) {
  const Routing& r = plan.p.routing;
  const int16_t* experts = plan.In<int16_t>(plan.at.experts);
  if (r.layout != Layout::kRanked) {
    const int expert = experts[i];
    return expert >= 0 && (plan.run.active >> (expert / r.local_experts) & 1) ? expert : -1;
  }
  const int token = i / r.ranks, rank = i - token * r.ranks;
  bool here = false;
  for (int k = 0; k < r.top_k; ++k) {
    const int local = experts[token * r.top_k + k] - rank * r.local_experts;
    here |= local >= 0 && local < r.local_experts;
  }
  return here && (plan.run.active >> rank & 1) ? rank : -1;
}

__device__ __forceinline__ int EntriesOfWarp(const Plan& plan) {
  return ((plan.at.entries + kWarps - 1) / kWarps + 31) / 32 * 32;
}
// All threads of the block, between two __syncthreads: rows of each column, and each row's number among them.
__device__ __forceinline__ void Number(const Plan& plan) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, columns = plan.at.columns;
  uint16_t* numbers = plan.In<uint16_t>(plan.at.numbers);
  uint16_t* before = plan.In<uint16_t>(plan.at.before);
  uint16_t* mine = before + warp * columns;
  const int each = EntriesOfWarp(plan), end = min(plan.at.entries, (warp + 1) * each);
  for (int first = warp * each; first < end; first += 32) {
    const int entry = first + lane;
    const int column = entry < end ? ColumnOfEntry(plan, entry) : -1;
    const uint32_t same = __match_any_sync(0xFFFFFFFFu, column);
    const int ahead = __popc(same & ((1u << lane) - 1));
    const int seen = column >= 0 ? mine[column] : 0;
    __syncwarp();
    if (column >= 0 && ahead == 0) mine[column] = static_cast<uint16_t>(seen + __popc(same));
    __syncwarp();
    if (column >= 0) numbers[entry] = static_cast<uint16_t>(seen + ahead);
  }
  __syncthreads();
  for (int column = threadIdx.x; column < columns; column += kThreads) {
    int sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const int rows = before[w * columns + column];
      before[w * columns + column] = static_cast<uint16_t>(sum);
      sum += rows;
    }
    plan.In<int>(plan.at.totals)[column] = sum;
  }
}
__device__ __forceinline__ uint32_t NumberOf(const Plan& plan, int entry, int column) {
  const uint16_t* before = plan.In<uint16_t>(plan.at.before);
  return plan.In<uint16_t>(plan.at.numbers)[entry] +
         static_cast<uint32_t>(before[entry / EntriesOfWarp(plan) * plan.at.columns + column]);
}

// A slot's word for rank `to`: number << 16 | local expert + 1; 0: not there.
__device__ __forceinline__ uint32_t SlotWord(const Plan& plan, int to, int token, int slot) {
  const Routing& r = plan.p.routing;
  if (slot >= r.top_k) return 0;
  const int entry = token * r.top_k + slot;
  const int expert = plan.In<int16_t>(plan.at.experts)[entry], local = expert - to * r.local_experts;
  if (expert < 0 || local < 0 || local >= r.local_experts) return 0;
  const bool ranked = r.layout == Layout::kRanked;
  const uint32_t number = ranked ? NumberOf(plan, token * r.ranks + to, to) : NumberOf(plan, entry, expert);
  return number << 16 | static_cast<uint32_t>(local + 1);
}

// Share `share` of all messages; the block has numbered.
__device__ __forceinline__ void SendRouting(const Plan& plan, const Piece& piece, int share) {
  const Routing& r = plan.p.routing;
  const int warp = threadIdx.x / 32, q = threadIdx.x & 7;
  const int lines = plan.p.staging.count_lines + r.tokens, groups = (lines + kRoundLines - 1) / kRoundLines;
  const int warps = plan.routing_shares * kWarps;
  for (int item = share * kWarps + warp; item < groups * r.ranks; item += warps) {
    int to = r.rank + 1 + item / groups;
    if (to >= r.ranks) to -= r.ranks;
    if (!(plan.run.active >> to & 1)) continue;
    const int first = item % groups * kRoundLines, line = first + piece.line;
    const int token = line - plan.p.staging.count_lines;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (line < lines && token < 0) {
      const int local = plan.at.local, at = line * kLineCounts + q * 4;
      const int* totals = plan.In<int>(plan.at.totals) + to * local;
      if (at < local) v.x = totals[at];
      if (at + 1 < local) v.y = totals[at + 1];
      if (!piece.flags && at + 2 < local) v.z = totals[at + 2];
      if (!piece.flags && at + 3 < local) v.w = totals[at + 3];
    } else if (line < lines) {
      const float* weights = plan.In<float>(plan.at.weights) + token * r.top_k;
      const int slot = q * 2;
      v.x = SlotWord(plan, to, token, slot);
      if (v.x) v.y = __float_as_uint(weights[slot]);
      if (!piece.flags) v.z = SlotWord(plan, to, token, slot + 1);
      if (v.z) v.w = __float_as_uint(weights[slot + 1]);
    }
    StoreRound(plan.Message(to, r.rank) + static_cast<uint64_t>(first) * kLineBytes, piece, v,
               min(kRoundLines, lines - first), plan.run.epoch);
  }
  if (plan.p.clean_topk_idx) {
    const int16_t* experts = plan.In<int16_t>(plan.at.experts);
    for (int i = share * kThreads + threadIdx.x; i < r.tokens * r.top_k; i += plan.routing_shares * kThreads) {
      const int expert = experts[i];
      const bool moves = expert >= 0 && (plan.run.active >> (expert / r.local_experts) & 1);
      plan.p.clean_topk_idx[i] = moves ? expert : -1;
    }
  }
}

// All threads of the block: whatever of this operation nobody has started. It makes a plan of its own: the caller's
// would have to lie in memory for it.
__device__ __noinline__ void AdoptShares(const DispatchParams& p, const Running& run, char* dynamic, bool numbered) {
  const Plan plan(p, run, dynamic);
  const Piece piece;
  for (int next = 0;;) {
    const int share = AdoptShare(plan.run.control, plan.Shares(), plan.run.epoch, &next);
    if (share < 0) return;
    if (share >= plan.routing_shares) {
      PushShare(plan, piece, share - plan.routing_shares);
      continue;
    }
    if (!numbered) {
      LoadRouting(plan);
      __syncthreads();
      Number(plan);
      __syncthreads();
      numbered = true;
    }
    SendRouting(plan, piece, share);
  }
}

// Receiving. All threads of the block: counts of all sources; then the groups' starts. False: the group has failed.
__device__ __forceinline__ bool ReceiveCounts(const Plan& plan, const Piece& piece, bool numbered) {
  const Routing& r = plan.p.routing;
  const int warp = threadIdx.x / 32, q = threadIdx.x & 7, local = plan.at.local;
  const int per_source = plan.p.staging.count_lines, lines = r.ranks * per_source;
  int* counts = plan.In<int>(plan.at.counts);
  bool idle = false, arrived = true;
  auto load = [&](int first, uint4* v) {  // the lanes whose lines have not come
    const int line = first + piece.line, source = line / per_source;
    bool missing = false;
    if (line < lines && (plan.run.active >> source & 1)) {
      const char* at = plan.Message(r.rank, source) + (line - source * per_source) * kLineBytes;
      *v = LoadVectorSystem(reinterpret_cast<const uint4*>(at) + q);
      missing = piece.flags && v->w != plan.run.epoch;
    }
    if (static_cast<int>(threadIdx.x) < plan.Shares()) {
      idle = LoadRelaxedGpu(&plan.run.control->started[threadIdx.x]) != plan.run.epoch;
    }
    return __ballot_sync(0xFFFFFFFFu, missing);
  };
  auto keep = [&](int first, const uint4& v) {
    const int line = first + piece.line, source = line / per_source;
    if (line >= lines) return;
    const int at = (line - source * per_source) * kLineCounts + q * 4;
    const bool active = plan.run.active >> source & 1;
    const int most = r.tokens * r.top_k;
    auto put = [&](int i, uint32_t count) {
      if (at + i >= local) return;
      counts[source * local + at + i] = active ? static_cast<int>(min(count, static_cast<uint32_t>(most))) : 0;
    };
    put(0, v.x), put(1, v.y);
    if (!piece.flags) put(2, v.z), put(3, v.w);
  };
  auto source_of = [&](int first, uint32_t mask) { return (first + (__ffs(mask) - 1) / 8) / per_source; };
  // At first without the block: then it looks for work that others wait for.
  for (int first = warp * kRoundLines; first < max(lines, (warp + 1) * kRoundLines); first += kWarps * kRoundLines) {
    uint4 v = make_uint4(0, 0, 0, 0);
    uint32_t mask = load(first, &v);
#pragma unroll 1
    for (int poll = 0; mask && poll < 64; ++poll) mask = load(first, &v);
    arrived &= mask == 0;
    keep(first, v);
  }
  Phase(3);
  if (__syncthreads_or(idle || !arrived)) {
    AdoptShares(plan.p, plan.run, plan.shared, numbered);
    bool good = true;
    for (int first = warp * kRoundLines; first < lines && good; first += kWarps * kRoundLines) {
      uint4 v = make_uint4(0, 0, 0, 0);
      good = AwaitLines([&] { return load(first, &v); }, [&](uint32_t mask) { return source_of(first, mask); },
                        [] { return false; }, plan.run, Step::kMetadata);
      if (good) keep(first, v);
    }
    if (!__syncthreads_and(good)) return false;
  }
  // Rows of the sources before, and of all.
  const bool writes = plan.receiver == 0;
  for (int l = threadIdx.x; l < local; l += kThreads) {
    int sum = 0;
    for (int source = 0; source < r.ranks; ++source) {
      const int rows = counts[source * local + l];
      counts[source * local + l] = sum;
      sum = AddSaturated(sum, rows);
      if (writes) plan.p.recv_counts[source * r.local_experts + l] = rows;
    }
    plan.In<int>(plan.at.groups)[l] = sum;
  }
  if (writes && local < r.local_experts) {
    const int rest = r.local_experts - local;
    for (int i = threadIdx.x; i < r.ranks * rest; i += kThreads) {
      plan.p.recv_counts[i / rest * r.local_experts + local + i % rest] = 0;
    }
  }
  __syncthreads();
  return true;
}

// Lane k's position of slot k of a (source, token) whose slot word is `word`: -1, -2 or a row.
__device__ __forceinline__ int Position(const Plan& plan, int source, uint32_t word) {
  const Routing& r = plan.p.routing;
  if (word == 0) return -1;
  const int local = static_cast<int>(word & 0xFFFF) - 1;
  const int column = r.layout == Layout::kRanked ? 0 : local;
  if (local < 0 || local >= r.local_experts) return -1;
  const int in_group =
      AddSaturated(plan.In<int>(plan.at.counts)[source * plan.at.local + column], static_cast<int>(word >> 16));
  if (r.layout == Layout::kPadded && in_group >= r.ranks * r.tokens) return -2;
  const int position = AddSaturated(plan.In<int>(plan.at.starts)[column], in_group);
  return position < r.capacity ? position : -2;
}

// Positions and weights of a (source, token): part 0's warp writes them. All lanes.
__device__ __forceinline__ void WriteRouting(const Plan& plan, int64_t pair, uint32_t word, float weight, int position,
                                             int first_row) {
  const DispatchParams& p = plan.p;
  const Routing& r = p.routing;
  const int lane = threadIdx.x & 31;
  if (r.layout == Layout::kRanked) {
    if (lane == 0) p.positions[pair] = position;
    if (first_row >= 0 && lane < r.top_k) {
      const int64_t at = static_cast<int64_t>(first_row) * r.top_k + lane;
      p.local_idx[at] = static_cast<int>(word & 0xFFFF) - 1;
      p.weights[at] = word ? weight : 0.0f;
    }
  } else if (lane < r.top_k) {
    p.positions[pair * r.slots + lane] = position;
    if (position >= 0) p.weights[position] = weight;
  }
}

constexpr int kPlaceRounds = 8;  // whose loads are in flight together

__device__ __forceinline__ bool PlaceRows(const Plan& plan, const Piece& piece) {
  const DispatchParams& p = plan.p;
  const Routing& r = p.routing;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const int pairs = r.ranks * r.tokens, warps = plan.receivers * kWarps, all_rounds = p.staging.row_rounds;
  const int most = max(1, min(all_rounds, warps / pairs)), rounds = (all_rounds + most - 1) / most;
  const int parts = (all_rounds + rounds - 1) / rounds;
  const int row_bytes = static_cast<int>(p.staging.row_bytes);
  for (int64_t item = plan.receiver + static_cast<int64_t>(warp) * plan.receivers;
       item < static_cast<int64_t>(pairs) * parts; item += warps) {
    // Own tokens first, then token by token, the sources interleaved: the order in which rows arrive.
    int pair = static_cast<int>(item / parts), source = r.rank, token = pair;
    const int part = static_cast<int>(item % parts);
    if (pair >= r.tokens) {
      pair -= r.tokens;
      token = pair / (r.ranks - 1);
      source = r.rank + 1 + pair % (r.ranks - 1);
      if (source >= r.ranks) source -= r.ranks;
    }
    const bool active = plan.run.active >> source & 1, own = source == r.rank;
    const int first = part * rounds, end = min(all_rounds, first + rounds);
    const char* const row = plan.Row(r.rank, source, token);
    uint4 v[kPlaceRounds];
    auto load_one = [&](int round) {
      return own ? LoadPiece(p, token, piece, round * kRoundData + piece.offset)
                 : LoadRound(row + round * (kRoundLines * kLineBytes));
    };
    auto load = [&](int base) {
#pragma unroll
      for (int i = 0; i < kPlaceRounds; ++i) {
        if (base + i < end) v[i] = load_one(base + i);
      }
    };
    if (active) load(first);  // a first look, beside the token's own line
    uint4 slots = make_uint4(0, 0, 0, 0);
    if (active) {
      const char* line = plan.Message(r.rank, source) + (p.staging.count_lines + token) * kLineBytes;
      const bool good = AwaitLines(
          [&] {
            slots = LoadVectorSystem(reinterpret_cast<const uint4*>(line) + (lane & 7));
            return __ballot_sync(0xFFFFFFFFu, piece.flags && slots.w != plan.run.epoch);
          },
          [&](uint32_t) { return source; }, [] { return false; }, plan.run, Step::kMetadata);
      if (!good) return false;
    }
    const uint32_t low = __shfl_sync(0xFFFFFFFFu, slots.x, lane / 2),
                   low_weight = __shfl_sync(0xFFFFFFFFu, slots.y, lane / 2);
    const uint32_t high = __shfl_sync(0xFFFFFFFFu, slots.z, lane / 2),
                   high_weight = __shfl_sync(0xFFFFFFFFu, slots.w, lane / 2);
    const uint32_t word = lane >= r.top_k ? 0 : lane & 1 ? high : low;
    const float weight = __uint_as_float(lane & 1 ? high_weight : low_weight);
    int position = Position(plan, source, word);
    if (r.layout == Layout::kRanked) {  // one row, whichever slots want it
      const uint32_t here = __ballot_sync(0xFFFFFFFFu, position != -1);
      const int of_row = __shfl_sync(0xFFFFFFFFu, position, here ? __ffs(here) - 1 : 0);
      position = lane == 0 ? of_row : -1;
    }
    const uint32_t placed = __ballot_sync(0xFFFFFFFFu, position >= 0);
    const int first_row = __shfl_sync(0xFFFFFFFFu, position, placed ? __ffs(placed) - 1 : 0);
    if (part == 0) {
      WriteRouting(plan, static_cast<int64_t>(source) * r.tokens + token, word, weight, position,
                   placed ? first_row : -1);
    }
    if (placed == 0) continue;
    for (int base = first; base < end; base += kPlaceRounds) {
      if (base != first) load(base);
      const int last = min(end, base + kPlaceRounds) - 1;
      while (!own) {
        uint32_t mask = 0;
#pragma unroll
        for (int i = 0; i < kPlaceRounds; ++i) {
          if (base + i < end) {
            const int lines = Piece::Lines((base + i) * kRoundData, row_bytes);
            mask |= __ballot_sync(0xFFFFFFFFu, Missing(piece, v[i], lines, plan.run.epoch));
          }
        }
        if (mask == 0) break;
        const int lines = Piece::Lines(last * kRoundData, row_bytes);  // it comes last, as a rule
        const bool good = AwaitLines(
            [&] { return __ballot_sync(0xFFFFFFFFu, Missing(piece, load_one(last), lines, plan.run.epoch)); },
            [&](uint32_t) { return source; }, [] { return false; }, plan.run, Step::kRows);
        if (!good) return false;
        load(base);
      }
#pragma unroll
      for (int i = 0; i < kPlaceRounds; ++i) {
        if (base + i >= end) break;
        const int at = (base + i) * kRoundData + piece.offset;
        for (uint32_t m = placed; m; m &= m - 1) {
          StorePiece(p, __shfl_sync(0xFFFFFFFFu, position, __ffs(m) - 1), piece, at, v[i]);
        }
      }
    }
  }
  return true;
}

__global__ void __launch_bounds__(kThreads, 1) LowLatencyDispatchKernel(const __grid_constant__ DispatchParams p) {
  __shared__ Running run;
  extern __shared__ __align__(16) char dynamic[];
  Plan plan(p, run, dynamic);
  const Piece piece;
  const int block = static_cast<int>(blockIdx.x);
  const int push = block - plan.routing_shares;  // this block's first share of the rows, if it is one
  const bool pushes = push >= 0 && push < plan.push_shares, routes = block < plan.routing_shares;
  // What does not depend on the operation's number is loaded before it is known.
  Batch batch;
  int begin = 0, end = 0;
  if (pushes) {
    ShareOf(p, push, plan.push_shares, &begin, &end);
    begin += static_cast<int>(threadIdx.x / 32);
    if (begin < end) batch.Load(p, piece, begin, end);
  }
  if (routes) LoadRouting(plan);
  Phase(0);
  if (threadIdx.x < 32) BeginLowLatency(run, p.call, Operation::kDispatch, p.routing.ranks, p.routing.rank);
  __syncthreads();
  Phase(1);
  bool good = true;
  if (!run.refused) {
    const uint32_t epoch = run.epoch;
    for (int share = block; share < plan.Shares(); share += static_cast<int>(gridDim.x)) {
      StartShare(run.control, share, epoch);
      if (share < plan.routing_shares) {
        Number(plan);
        __syncthreads();
        SendRouting(plan, piece, share);
      } else if (share == block) {
        if (begin < end) batch.Store(plan, piece, begin, end);
        for (int item = begin + kAhead * kWarps; item < end; item += kAhead * kWarps) {
          batch.Load(p, piece, item, end);
          batch.Store(plan, piece, item, end);
        }
      } else {
        PushShare(plan, piece, share - plan.routing_shares);
      }
    }
    Phase(2);
    if (plan.receiver >= 0) {
      good = ReceiveCounts(plan, piece, routes);
      if (good) {
        LayoutScratch scratch{};
        scratch.columns = plan.at.local;
        scratch.totals = plan.In<int>(plan.at.groups);
        int* starts = plan.In<int>(plan.at.starts);
        ComputeStarts(p, scratch, starts);
        Phase(4);
        good = PlaceRows(plan, piece);
        ZeroPadding(p, scratch, starts, plan.receiver, plan.receivers);
        ClearUnusedRows(p, scratch, plan.receiver, plan.receivers);
      }
      good = __syncthreads_and(good);
    }
  }
  Phase(5);
  FinishLowLatency(run, !good, [&](uint32_t index, uint32_t count) { PoisonDispatch(p, index, count); });
  Phase(6);
}

}  // namespace

int LaunchLowLatencyDispatch(const DispatchParams& p, cudaStream_t stream) {
  if (Unfit(p)) return cudaErrorInvalidValue;
  LowLatencyDispatchKernel<<<p.schedule.blocks, kThreads, PlanShared(p.routing).bytes, stream>>>(p);
  return cudaGetLastError();
}
int PreloadLowLatencyDispatch() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, LowLatencyDispatchKernel);
}

}  // namespace xen_moe

#ifdef XEN_MOE_PHASES
namespace xen_moe {
int ReadDispatchPhases(uint64_t* to) { return ReadPhases(to); }
}  // namespace xen_moe
#endif
