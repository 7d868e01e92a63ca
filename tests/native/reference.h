// Expected results of the operations, computed on the host in the plainest way. Needs no GPU and shares no code with
// the kernels but the names of params.h. The rules are those of docs/design/internals.md.
#pragma once

#include <algorithm>
#include <bitset>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "cuda_kernels/core/params.h"
#include "tests/native/wire_reference.h"

namespace native {

using xen_moe::Element;
using xen_moe::Layout;
using xen_moe::Operation;

constexpr uint8_t kFill = 0xEE;  // contents of outputs and of the space between them before an operation
constexpr uint8_t kLost = 0x7F;  // bytes of a unit that gets weights from no rank

// One operation of a group of ranks, with its inputs for every rank.
struct Problem {
  Operation operation = Operation::kDispatch;
  Layout layout = Layout::kGrouped;
  Element element = Element::kF32;
  bool scaled = false, weighted = true, ragged = false, gather = false;
  bool by_table = false;  // an exchange that moves weights: tokens units of a rank to capacity units of every rank
  int ranks = 2, ranks_per_node = 0, tokens = 4, top_k = 2, experts = 4, hidden = 64, capacity = 0, alignment = 1;
  int blocks = 4, push_blocks = 2, slices = 1, parts = 1, segment_tokens = 4;
  bool solo = false;
  bool low_latency = false;  // if the kernels take it
  bool bulk = false;         // rows placed by bulk copies
  bool by_home = false;      // a combine of rows that are not at home
  int chunk_tokens = 0;      // tokens that cross to another node together; 0: one node
  int ring_tokens = 0;       // tokens of a source that have a staged row at once, if so many ranks have rings; 0: all
  int lanes = 2, ring_chunks = 2, chunk_bytes = 256;
  int round = -1;  // of an all_gather: this round alone
  uint32_t seed = 1;
  uint32_t site = 0;  // Descriptor::site
  xen_moe::WireType wire = xen_moe::WireType::kNative;
  bool ue8m0 = false;
  std::bitset<xen_moe::kMaxRanks> members = ~std::bitset<xen_moe::kMaxRanks>();  // the ranks that take part
  bool told = false;  // it is given that mask though all take part

  int per_node() const { return ranks_per_node ? ranks_per_node : ranks; }  // 0: one node
  bool moves(int source, int target) const { return members[source] && members[target]; }
  int slots() const { return layout == Layout::kRanked ? 1 : top_k; }
  int local_experts() const { return (experts + ranks - 1) / ranks; }
  int element_bytes() const { return xen_moe::ElementBytes(element); }
  int scale_blocks() const { return (hidden + xen_moe::kScaleBlock - 1) / xen_moe::kScaleBlock; }
};

using Bytes = std::vector<uint8_t>;
template <class T>
Bytes ToBytes(const std::vector<T>& values) {
  Bytes out(values.size() * sizeof(T));
  if (!out.empty()) std::memcpy(out.data(), values.data(), out.size());
  return out;
}

// An output of one rank: the expected bytes, and the places where they are specified (mask 0xFF).
struct Output {
  Bytes expected, mask;
  uint8_t poison = 0xFF;
};
// Inputs and outputs of one rank, in the order that `Arrays` of world.h lists.
struct RankCase {
  std::vector<Bytes> inputs;
  std::vector<Output> outputs;
};

inline float FromBf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float out;
  std::memcpy(&out, &wide, 4);
  return out;
}
inline uint16_t ToBf16(float value) {  // to nearest even; the value is never NaN
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits += 0x7FFF + (bits >> 16 & 1);
  return static_cast<uint16_t>(bits >> 16);
}

// Rows of `hidden` elements as floats that the element type holds exactly.
inline std::vector<float> RandomRows(std::mt19937& rng, int64_t count, Element element) {
  std::vector<float> out(static_cast<size_t>(count));
  for (float& v : out) {
    v = static_cast<float>(static_cast<int>(rng() % 4001) - 2000) / 256.0f;
    if (element == Element::kBf16) v = FromBf16(ToBf16(v));
    if (element == Element::kByte) v = static_cast<float>(rng() % 251);
  }
  return out;
}
inline Bytes Encode(const std::vector<float>& values, Element element) {
  if (element == Element::kF32) return ToBytes(values);
  if (element == Element::kByte) return Bytes(values.begin(), values.end());
  std::vector<uint16_t> bits;
  for (float v : values) bits.push_back(ToBf16(v));
  return ToBytes(bits);
}
inline float Rounded(float value, Element element) {
  return element == Element::kBf16 ? FromBf16(ToBf16(value)) : value;
}

// A dispatch leaves out slots that do not move; redispatch and combine take the handle of a dispatch among all ranks.
struct RoutingCase {
  std::vector<std::vector<int>> topk_idx;        // [rank][T, K]
  std::vector<std::vector<float>> topk_weights;  // [rank][T, K]
  std::vector<std::vector<int>> positions;       // [rank][R, T, slots]
  std::vector<std::vector<int>> recv_counts;     // [rank][R, L]
};

inline RoutingCase MakeRouting(const Problem& p, std::mt19937& rng) {
  RoutingCase out;
  for (int r = 0; r < p.ranks; ++r) {
    std::vector<int> idx;
    std::vector<float> weights;
    for (int i = 0; i < p.tokens; ++i) {
      std::vector<int> experts(p.experts);
      for (int e = 0; e < p.experts; ++e) experts[e] = e;
      for (int k = 0; k < p.top_k; ++k) {
        int expert = -1 - static_cast<int>(rng() % 3) * 1000;  // an unused slot
        if (k < p.experts && rng() % 8 != 0) {
          std::swap(experts[k], experts[k + rng() % (p.experts - k)]);
          expert = experts[k];
        } else if (rng() % 2) {
          expert = p.experts + static_cast<int>(rng() % 100000);
        }
        idx.push_back(expert);
        weights.push_back(static_cast<float>(rng() % 64) / 16.0f);
      }
    }
    out.topk_idx.push_back(idx);
    out.topk_weights.push_back(weights);
  }
  const int L = p.local_experts(), T = p.tokens, S = p.slots();
  for (int d = 0; d < p.ranks; ++d) {
    std::vector<int> positions(static_cast<size_t>(p.ranks) * T * S, -1), counts(static_cast<size_t>(p.ranks) * L, 0);
    auto local = [&](int s, int t, int k) {
      const int e = out.topk_idx[s][t * p.top_k + k];
      const bool here = e >= 0 && e < p.experts && e / L == d;
      return here && (p.operation != Operation::kDispatch || p.moves(s, d)) ? e % L : -1;
    };
    auto at = [&](int s, int t, int k) -> int& { return positions[(static_cast<size_t>(s) * T + t) * S + k]; };
    if (p.layout == Layout::kRanked) {
      int next = 0;
      for (int s = 0; s < p.ranks; ++s) {
        for (int t = 0; t < T; ++t) {
          bool here = false;
          for (int k = 0; k < p.top_k; ++k) here |= local(s, t, k) >= 0;
          if (!here) continue;
          at(s, t, 0) = next < p.capacity ? next : -2;
          ++next, ++counts[s * L];
        }
      }
    } else {
      int64_t start = 0;
      for (int l = 0; l < L; ++l) {
        int in_group = 0;
        if (p.layout == Layout::kPadded) start = static_cast<int64_t>(l) * p.ranks * T;
        for (int s = 0; s < p.ranks; ++s) {
          for (int t = 0; t < T; ++t) {
            for (int k = 0; k < p.top_k; ++k) {
              if (local(s, t, k) != l) continue;
              const int64_t row = start + in_group++;
              at(s, t, k) = row < p.capacity ? static_cast<int>(row) : -2;
              ++counts[s * L + l];
            }
          }
        }
        start += (in_group + p.alignment - 1) / p.alignment * p.alignment;
      }
    }
    out.positions.push_back(positions);
    out.recv_counts.push_back(counts);
  }
  return out;
}

// Dispatch and redispatch. Inputs: x, scales, topk_idx, topk_weights (dispatch) or positions, recv_counts (redispatch).
// Outputs: rows, row_scales, then for dispatch positions, recv_counts, weights, local_idx, clean topk_idx.
inline std::vector<RankCase> ReferenceDispatch(const Problem& p, std::mt19937& rng) {
  const RoutingCase routing = MakeRouting(p, rng);
  const int T = p.tokens, S = p.slots(), L = p.local_experts(), H = p.hidden, B = p.scale_blocks();
  const size_t row_bytes = static_cast<size_t>(H) * p.element_bytes();
  std::vector<std::vector<float>> x, scales;
  std::vector<Bytes> encoded, arrived;
  for (int r = 0; r < p.ranks; ++r) {
    x.push_back(RandomRows(rng, static_cast<int64_t>(T) * H, p.element));
    scales.push_back(RandomRows(rng, static_cast<int64_t>(T) * B, Element::kF32));
    encoded.push_back(Encode(x[r], p.element));
    for (int t = 0; t < T; ++t) ThroughWire(x[r].data() + static_cast<size_t>(t) * H, H, p.wire, p.ue8m0);
    arrived.push_back(Encode(x[r], p.element));
  }
  std::vector<RankCase> out;
  for (int d = 0; d < p.ranks; ++d) {
    const int weight_columns = p.layout == Layout::kRanked ? p.top_k : 1;
    Output rows{Bytes(p.capacity * row_bytes), Bytes(p.capacity * row_bytes), 0xFF};
    std::vector<float> row_scales(static_cast<size_t>(p.capacity) * B), weights(p.capacity * weight_columns);
    Bytes scale_mask(row_scales.size() * 4), weight_mask(weights.size() * 4);
    std::vector<int> local_idx(static_cast<size_t>(p.capacity) * p.top_k, -1);
    auto define = [&](int64_t row) {
      std::memset(rows.mask.data() + row * row_bytes, 0xFF, row_bytes);
      std::memset(scale_mask.data() + row * B * 4, 0xFF, B * 4);
      std::memset(weight_mask.data() + row * weight_columns * 4, 0xFF, weight_columns * 4);
    };
    for (int s = 0; s < p.ranks; ++s) {
      for (int t = 0; t < T; ++t) {
        for (int k = 0; k < S; ++k) {
          const int row = routing.positions[d][(static_cast<size_t>(s) * T + t) * S + k];
          if (row < 0) continue;
          define(row);
          if (!p.moves(s, d)) continue;  // a redispatch: zero
          std::memcpy(rows.expected.data() + row * row_bytes, arrived[s].data() + t * row_bytes, row_bytes);
          std::memcpy(row_scales.data() + static_cast<size_t>(row) * B, scales[s].data() + static_cast<size_t>(t) * B,
                      B * 4);
          if (p.layout != Layout::kRanked) {
            weights[row] = routing.topk_weights[s][t * p.top_k + k];
            continue;
          }
          for (int j = 0; j < p.top_k; ++j) {
            const int e = routing.topk_idx[s][t * p.top_k + j];
            const bool here = e >= 0 && e < p.experts && e / L == d;
            local_idx[row * p.top_k + j] = here ? e % L : -1;
            weights[row * p.top_k + j] = here ? routing.topk_weights[s][t * p.top_k + j] : 0.0f;
          }
        }
      }
    }
    if (p.layout == Layout::kRanked) std::fill(weight_mask.begin(), weight_mask.end(), uint8_t{0xFF});
    if (p.layout == Layout::kGrouped) {  // padding rows are zero
      int64_t start = 0;
      for (int l = 0; l < L; ++l) {
        int64_t real = 0;
        for (int s = 0; s < p.ranks; ++s) real += routing.recv_counts[d][s * L + l];
        const int64_t end = start + (real + p.alignment - 1) / p.alignment * p.alignment;
        for (int64_t row = start + real; row < end && row < p.capacity; ++row) define(row);
        start = end;
      }
    }
    RankCase c;
    c.inputs = {encoded[d], p.scaled ? ToBytes(scales[d]) : Bytes(), ToBytes(routing.topk_idx[d])};
    c.outputs.push_back(rows);
    c.outputs.push_back(p.scaled ? Output{ToBytes(row_scales), scale_mask, 0xFF} : Output{});
    auto whole = [](const Bytes& bytes, uint8_t poison) { return Output{bytes, Bytes(bytes.size(), 0xFF), poison}; };
    if (p.operation == Operation::kRedispatch) {
      c.inputs.push_back(ToBytes(routing.positions[d]));
      c.inputs.push_back(ToBytes(routing.recv_counts[d]));
    } else {
      c.inputs.push_back(ToBytes(routing.topk_weights[d]));
      std::vector<int> clean = routing.topk_idx[d];
      for (int& e : clean) e = e >= 0 && e < p.experts && p.moves(d, e / L) ? e : -1;
      c.outputs.push_back(whole(ToBytes(routing.positions[d]), 0xFF));
      c.outputs.push_back(whole(ToBytes(routing.recv_counts[d]), 0));
      c.outputs.push_back(Output{ToBytes(weights), weight_mask, 0xFF});
      c.outputs.push_back(p.layout == Layout::kRanked ? whole(ToBytes(local_idx), 0xFF) : Output{});
      c.outputs.push_back(whole(ToBytes(clean), 0xFF));
    }
    out.push_back(c);
  }
  return out;
}

// Inputs: y, topk_idx, positions, weights. Output: out.
inline std::vector<RankCase> ReferenceCombine(const Problem& p, std::mt19937& rng) {
  const RoutingCase routing = MakeRouting(p, rng);
  const int T = p.tokens, S = p.slots(), L = p.local_experts(), H = p.hidden;
  const bool weighted = p.weighted && p.layout != Layout::kRanked;
  std::vector<std::vector<float>> y, weights;
  for (int r = 0; r < p.ranks; ++r) {
    y.push_back(RandomRows(rng, static_cast<int64_t>(p.capacity) * H, p.element));
    weights.push_back(RandomRows(rng, p.capacity, Element::kF32));
    for (float& w : weights.back()) w /= 3;  // so that no sum is exact: its order shows
  }
  std::vector<RankCase> out;
  for (int r = 0; r < p.ranks; ++r) {
    std::vector<float> total(static_cast<size_t>(T) * H, 0.0f);
    for (int t = 0; t < T; ++t) {
      std::vector<float> node_total(H, 0.0f);
      for (int d = 0; d < p.ranks; ++d) {
        if (d % p.per_node() == 0) std::fill(node_total.begin(), node_total.end(), 0.0f);
        bool named = false;
        for (int k = 0; k < p.top_k; ++k) {
          const int e = routing.topk_idx[r][t * p.top_k + k];
          named |= e >= 0 && e < p.experts && e / L == d;
        }
        const Element wire = p.wire == xen_moe::WireType::kNative ? p.element : Element::kF32;
        std::vector<float> partials(H, 0.0f);
        for (int h = 0; h < H && named && p.moves(r, d); ++h) {
          float& partial = partials[h];
          for (int k = 0; k < S; ++k) {
            const int row = routing.positions[d][(static_cast<size_t>(r) * T + t) * S + k];
            if (row < 0) continue;
            const volatile float term = weighted ? weights[d][row] * y[d][static_cast<size_t>(row) * H + h]
                                                 : y[d][static_cast<size_t>(row) * H + h];  // no fused multiply-add
            partial += term;
          }
        }
        ThroughWire(partials.data(), H, p.wire, p.ue8m0);
        for (int h = 0; h < H; ++h) node_total[h] += Rounded(partials[h], wire);
        if ((d + 1) % p.per_node() != 0) continue;
        const bool apart = p.per_node() != p.ranks;
        if (apart) ThroughWire(node_total.data(), H, p.wire, p.ue8m0);
        for (int h = 0; h < H; ++h) {
          total[static_cast<size_t>(t) * H + h] += apart ? Rounded(node_total[h], wire) : node_total[h];
        }
      }
    }
    RankCase c;
    c.inputs = {Encode(y[r], p.element), ToBytes(routing.topk_idx[r]), ToBytes(routing.positions[r]),
                weighted ? ToBytes(weights[r]) : Bytes()};
    const Bytes bytes = Encode(total, p.element);
    c.outputs.push_back(Output{bytes, Bytes(bytes.size(), 0xFF), 0xFF});
    out.push_back(c);
  }
  return out;
}

// Combine by home. Inputs: y, topk_idx, positions, none, homes, router weights. Output: out.
inline std::vector<RankCase> ReferenceHomeCombine(const Problem& p, std::mt19937& rng) {
  RoutingCase routing = MakeRouting(p, rng);
  const int T = p.tokens, K = p.top_k, L = p.local_experts(), H = p.hidden;
  std::vector<std::vector<float>> y;
  for (int r = 0; r < p.ranks; ++r) y.push_back(RandomRows(rng, static_cast<int64_t>(p.capacity) * H, p.element));
  std::vector<RankCase> out;
  for (int r = 0; r < p.ranks; ++r) {
    std::vector<int> homes;
    std::vector<float>& weights = routing.topk_weights[r];
    for (float& w : weights) w /= 3;  // so that no sum is exact: its order shows
    for (int i = 0; i < T * K; ++i) homes.push_back(static_cast<int>(rng() % p.ranks));
    std::vector<float> total(static_cast<size_t>(T) * H, 0.0f);
    for (int t = 0; t < T; ++t) {
      for (int home = 0; home < p.ranks; ++home) {
        std::vector<float> partials(H, 0.0f);
        for (int k = 0; k < K; ++k) {
          const int e = routing.topk_idx[r][t * K + k];
          if (e < 0 || e >= p.experts || !p.moves(r, e / L) || homes[t * K + k] != home) continue;
          const int row = routing.positions[e / L][(static_cast<size_t>(r) * T + t) * K + k];
          for (int h = 0; h < H && row >= 0; ++h) {
            const float value = y[e / L][static_cast<size_t>(row) * H + h];
            const volatile float term = p.weighted ? weights[t * K + k] * value : value;  // no fused multiply-add
            partials[h] += term;
          }
        }
        for (int h = 0; h < H; ++h) total[static_cast<size_t>(t) * H + h] += Rounded(partials[h], p.element);
      }
    }
    RankCase c;
    c.inputs = {Encode(y[r], p.element), ToBytes(routing.topk_idx[r]),           ToBytes(routing.positions[r]), Bytes(),
                ToBytes(homes),          p.weighted ? ToBytes(weights) : Bytes()};
    const Bytes bytes = Encode(total, p.element);
    c.outputs.push_back(Output{bytes, Bytes(bytes.size(), 0xFF), 0xFF});
    out.push_back(c);
  }
  return out;
}

// Inputs: operand, sources.
inline std::vector<RankCase> ReferenceMove(const Problem& p, std::mt19937& rng) {
  const size_t unit = p.hidden;
  std::vector<int> sources;
  std::vector<Bytes> operands;
  for (int r = 0; r < p.ranks; ++r) {
    operands.emplace_back(p.tokens * unit);
    for (uint8_t& b : operands[r]) b = static_cast<uint8_t>(rng() % 251);
    for (int i = 0; i < p.capacity; ++i) {
      const int from = rng() % 5 ? static_cast<int>(rng() % (p.ranks * p.tokens)) : -1 - static_cast<int>(rng() % 3);
      sources.push_back(from < 0 || p.moves(r, from / p.tokens) ? from : -1);
    }
  }
  std::vector<RankCase> out;
  for (int r = 0; r < p.ranks; ++r) {
    Bytes bytes;
    for (int i = 0; i < p.capacity; ++i) {
      const int from = sources[r * p.capacity + i];
      if (from >= 0) {
        const uint8_t* const at = operands[from / p.tokens].data() + from % p.tokens * unit;
        bytes.insert(bytes.end(), at, at + unit);
      } else {
        bytes.insert(bytes.end(), unit, from == -1 ? 0 : from == -2 ? kLost : kFill);
      }
    }
    RankCase c;
    c.inputs = {operands[r], ToBytes(sources)};
    c.outputs.push_back(Output{bytes, Bytes(bytes.size(), 0xFF), 0xFF});
    out.push_back(c);
  }
  return out;
}

// `hidden` bytes are a unit; `capacity` units an output. all_to_all: tokens units to each rank, in an all_gather the
// same units. Inputs: operand, then, ragged, input_offsets, send_sizes, output_offsets. Bytes that no rank writes keep
// the fill byte (world.h).
inline std::vector<RankCase> ReferenceExchange(const Problem& p, std::mt19937& rng, uint8_t fill) {
  const size_t unit = p.hidden;
  const int R = p.ranks;
  if (p.by_table) return ReferenceMove(p, rng);
  std::vector<Bytes> operands;
  std::vector<std::vector<int>> from(R), sizes(R), to(R);
  std::vector<std::vector<int>> taken(R, std::vector<int>(R));  // [target][source]
  for (int t = 0; t < R; ++t) {
    for (int s = 0; s < R; ++s) taken[t][s] = static_cast<int>(rng() % (p.tokens + 1));
  }
  for (int s = 0; s < R; ++s) {
    Bytes operand(static_cast<size_t>(p.gather ? 1 : R) * p.tokens * unit);
    for (uint8_t& b : operand) b = static_cast<uint8_t>(rng() % 251);
    operands.push_back(operand);
    for (int t = 0; t < R; ++t) {
      from[s].push_back(p.gather ? 0 : t * p.tokens);
      sizes[s].push_back(p.ragged ? taken[t][s] : p.tokens);
      int offset = p.ragged ? 1 : s * p.tokens;
      for (int before = 0; p.ragged && before < s; ++before) offset += taken[t][before];
      to[s].push_back(offset);
    }
  }
  std::vector<RankCase> out;
  for (int t = 0; t < R; ++t) {
    RankCase c;
    c.inputs = {operands[t]};
    if (p.ragged) c.inputs.insert(c.inputs.end(), {ToBytes(from[t]), ToBytes(sizes[t]), ToBytes(to[t])});
    Bytes bytes(static_cast<size_t>(p.capacity) * unit, fill);
    for (int s = 0; s < R; ++s) {
      if (p.round >= 0 && (s == t || (s + t) % R != p.round)) continue;
      std::memcpy(bytes.data() + to[s][t] * unit, operands[s].data() + from[s][t] * unit, sizes[s][t] * unit);
    }
    c.outputs.push_back(Output{bytes, Bytes(bytes.size(), 0xFF), 0xFF});
    out.push_back(c);
  }
  return out;
}

inline std::vector<RankCase> Reference(const Problem& p) {
  std::mt19937 rng(p.seed);
  if (p.operation == Operation::kCombine) return p.by_home ? ReferenceHomeCombine(p, rng) : ReferenceCombine(p, rng);
  if (p.operation == Operation::kExchange) return ReferenceExchange(p, rng, kFill);
  return ReferenceDispatch(p, rng);
}

// A random small operation. Equal on all ranks, as they share the generator's state.
inline Problem RandomProblem(std::mt19937& rng, int ranks, int most_blocks) {
  auto pick = [&](std::initializer_list<int> from) { return from.begin()[rng() % from.size()]; };
  Problem p;
  p.ranks = ranks;
  p.seed = static_cast<uint32_t>(rng());
  p.operation = static_cast<Operation>(rng() % 4);
  p.layout = static_cast<Layout>(rng() % 3);
  p.tokens = pick({1, 3, 16, 40});
  p.top_k = pick({1, 2, 4});
  p.experts = pick({ranks, 2 * ranks + 1, 8});
  p.blocks = 1 + static_cast<int>(rng() % most_blocks);
  p.push_blocks = 1 + static_cast<int>(rng() % p.blocks);
  if (p.operation == Operation::kExchange) {
    p.ragged = rng() % 2;
    p.gather = !p.ragged && rng() % 2;
    p.low_latency = p.gather && rng() % 2;
    p.hidden = pick({1, 4, 6, 64, 80});
    if (p.low_latency) p.hidden = pick({16, 80, 464, 1008});
    if (p.gather && !p.low_latency && rng() % 2) p.round = static_cast<int>(rng() % ranks);
    p.chunk_bytes = pick({16, 256});
    p.ring_chunks = pick({1, 2, 4});
    p.lanes = 1 + static_cast<int>(rng() % std::max(1, most_blocks / (p.low_latency ? 1 : ranks)));
    if (p.gather && !p.low_latency) p.lanes *= xen_moe::kBlockLanes;
    p.capacity = ranks * p.tokens + (p.ragged ? 1 : 0);
    if (!p.gather && rng() % 3 == 0) p.by_table = true, p.ragged = false, p.capacity = pick({1, 3, 9});
    return p;
  }
  p.element =
      p.operation == Operation::kCombine ? static_cast<Element>(pick({0, 2})) : static_cast<Element>(pick({0, 2, 3}));
  p.hidden = pick({8, 64, 130, 256, 1024, 3600});
  p.scaled = p.operation != Operation::kCombine && p.element == Element::kByte;
  if (p.operation == Operation::kRedispatch) p.scaled = false;
  p.parts = pick({1, 2, 4});
  p.weighted = rng() % 2;
  p.slices = 1 + static_cast<int>(rng() % p.blocks);
  p.alignment = p.layout == Layout::kGrouped ? pick({1, 1, 4, 16}) : 1;
  const int rows = p.layout == Layout::kRanked ? ranks * p.tokens
                                               : ranks * p.tokens * std::min(p.top_k, p.local_experts()) +
                                                     p.local_experts() * (p.alignment - 1);
  p.capacity =
      p.layout == Layout::kPadded ? p.local_experts() * ranks * p.tokens : std::max(1, rng() % 4 ? rows : rows / 2);
  p.segment_tokens = pick({1, 7, 40});
  p.solo = rng() % 2;
  p.low_latency = rng() % 2;
  if (p.element != Element::kByte) p.wire = static_cast<xen_moe::WireType>(pick({0, 0, 1, 2, 3}));
  p.ue8m0 = rng() % 2;
  p.bulk = rng() % 2;
  if (p.operation == Operation::kCombine && p.layout != Layout::kRanked && p.hidden % 8 == 0 &&
      ranks <= xen_moe::kSmallGroup && rng() % 3 == 0) {
    p.by_home = true, p.low_latency = false, p.wire = xen_moe::WireType::kNative;
  }
  return p;
}

}  // namespace native
