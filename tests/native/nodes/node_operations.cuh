// Operations across nodes as the programs of this folder and of processes/ run them, over any link.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "cuda_kernels/dispatch/quantize_codec.cuh"
#include "cuda_kernels/node/combine.cuh"
#include "cuda_kernels/node/dispatch.cuh"
#include "cuda_kernels/node/low_latency_combine.cuh"
#include "cuda_kernels/node/low_latency_dispatch.cuh"
#include "tests/native/expectations.h"

namespace native {

using namespace xen_moe::XEN_MOE_VARIANT;

struct NodeOptions : Options {
  int per_node = 2;
  bool network = false;
  uint32_t broken = 0;
};

// One operation of one rank.
struct NodeOperation {
  Prepared* prepared = nullptr;
  RailParams rails{};
  bool low_latency() const {
    const bool combine = prepared->problem.operation == Operation::kCombine;
    return combine ? prepared->combine.schedule.low_latency : prepared->dispatch.schedule.low_latency;
  }
  void Plan(uint64_t* expected) {
    const Problem& p = prepared->problem;
    const int chunk_tokens = p.chunk_tokens;
    if (p.operation == Operation::kCombine) {
      CombineParams& k = prepared->combine;
      rails.plan = PlanRail(k.routing, p.operation, chunk_tokens, k.schedule, k.call.active != nullptr, &k.staging);
      Describe(&k, k.weights != nullptr, static_cast<uint32_t>(p.element), p.site);
    } else {
      DispatchParams& d = prepared->dispatch;
      rails.plan = PlanRail(d.routing, p.operation, chunk_tokens, d.schedule, d.call.active != nullptr, &d.staging);
      Describe(&d, p.scaled, static_cast<uint32_t>(p.element), p.site);
    }
    rails.expected = expected;
  }
  // [T, K] as the rank was given them.
  std::vector<int> Experts() const {
    const Problem& p = prepared->problem;
    std::vector<int> out(static_cast<size_t>(p.tokens) * p.top_k);
    const int* const from = prepared->Input(p.operation == Operation::kCombine ? 1 : 2);
    NATIVE_CHECK(cudaMemcpy(out.data(), from, out.size() * 4, cudaMemcpyDeviceToHost));
    return out;
  }
};

// `in_flight`: launches it as an asynchronous operation. An operation of few tokens then runs in parts, which the other
// ranks do not notice.
template <class Link>
int LaunchOne(NodeOperation o, const Link& link, cudaStream_t stream, bool in_flight) {
  const Problem& p = o.prepared->problem;
  o.rails.in_flight = in_flight && o.low_latency();
  const bool native = p.wire == WireType::kNative;
  if (p.operation == Operation::kCombine) {
    const CombineParams& k = o.prepared->combine;
    if (o.low_latency()) return LaunchNodeLowLatencyCombine(k, o.rails, link, stream);
    if (p.element == Element::kF32) return LaunchNodeCombine<float, WireType::kNative>(k, o.rails, link, stream);
    return native ? LaunchNodeCombine<__nv_bfloat16, WireType::kNative>(k, o.rails, link, stream)
                  : LaunchNodeCombine<__nv_bfloat16, WireType::kFp8>(k, o.rails, link, stream);
  }
  const DispatchParams& d = o.prepared->dispatch;
  if (o.low_latency()) return LaunchNodeLowLatencyDispatch(d, o.rails, link, stream);
  if (!native) return LaunchNodeDispatch<QuantizeCodec<__nv_bfloat16, WireType::kFp8>>(d, o.rails, link, stream);
  return p.hidden * p.element_bytes() % 16 == 0
             ? LaunchNodeDispatch<CopyCodec<int4>>(d, o.rails, link, stream)
             : LaunchNodeDispatch<CopyCodec<unsigned short>>(d, o.rails, link, stream);
}
// Loaded before any of them spins.
template <class Link>
void Preload() {
  NATIVE_CHECK(PreloadNodeLowLatencyDispatch<Link>());
  NATIVE_CHECK(PreloadNodeLowLatencyCombine<Link>());
  NATIVE_CHECK((PreloadNodeCombine<float, WireType::kNative, Link>()));
  NATIVE_CHECK((PreloadNodeCombine<__nv_bfloat16, WireType::kNative, Link>()));
  NATIVE_CHECK((PreloadNodeCombine<__nv_bfloat16, WireType::kFp8, Link>()));
  NATIVE_CHECK((PreloadNodeDispatch<CopyCodec<int4>, Link>()));
  NATIVE_CHECK((PreloadNodeDispatch<CopyCodec<unsigned short>, Link>()));
  NATIVE_CHECK((PreloadNodeDispatch<QuantizeCodec<__nv_bfloat16, WireType::kFp8>, Link>()));
}

// Operations that the kernels across nodes take, every kind in every layout first. `few`: with the kernels for few
// tokens, where those take it.
inline Problem NodeProblem(std::mt19937& rng, const NodeOptions& o, int i, bool few = false) {
  for (;;) {
    Problem p = RandomProblem(rng, o.ranks, std::min(8, MostBlocks(o)));
    if (p.operation == Operation::kExchange) continue;
    const int operation = few ? i % 2 * 2 : i % 3, layout = few ? i / 2 : i / 3;
    if (layout < 3 && (static_cast<int>(p.operation) != operation || static_cast<int>(p.layout) != layout)) continue;
    if (p.operation == Operation::kCombine && (layout == 0 || (layout == 2 && !few))) {  // sums whose order shows
      if (p.element != Element::kF32 || p.wire != WireType::kNative || !p.weighted) continue;
      if (p.top_k < 4 || p.tokens < 16) continue;
      if (!few && (p.hidden % 8 == 0) != (layout == 2)) continue;  // octet by octet, and streamed
    }
    p.ranks_per_node = o.per_node, p.low_latency = few, p.bulk = p.by_home = false;
    if (few) {  // what those take
      if (p.operation == Operation::kRedispatch || p.hidden * p.element_bytes() % 16) continue;
      if (p.scaled && p.scale_blocks() % 4) continue;
      p.wire = WireType::kNative;
    }
    if (p.wire != WireType::kNative) p.wire = WireType::kFp8, p.element = Element::kBf16, p.scaled = false;
    return p;
  }
}
// The bytes that rank `s` has to send rank `t` in an operation: every token once for each other node (few tokens: for
// each rank there) on which it has experts, with the words beside it (docs/design/nodes_kernels.md). `topk`: [R][T, K].
inline uint64_t BytesBetween(const Problem& p, bool direct, const std::vector<std::vector<int>>& topk, int s, int t) {
  const int per_node = p.per_node(), chunk_tokens = p.chunk_tokens;
  if (direct ? s / per_node == t / per_node || !p.moves(s, t) : s == t || s % per_node != t % per_node) return 0;
  const bool combine = p.operation == Operation::kCombine, native = p.wire == WireType::kNative;
  auto up = [](uint64_t bytes) { return (bytes + 15) / 16 * 16; };
  const uint64_t scales = p.scaled || !native ? up(static_cast<uint64_t>(p.scale_blocks()) * 4) : 0;
  const uint64_t row = up(static_cast<uint64_t>(p.hidden) * (native ? p.element_bytes() : 1)) + scales;
  const uint64_t routing = combine ? 0 : up(static_cast<uint64_t>(p.top_k) * 8);
  const uint64_t chunks = (p.tokens + chunk_tokens - 1) / chunk_tokens;
  const uint64_t leads = combine || direct ? 0 : (chunks + kLeadChunks - 1) / kLeadChunks;
  const uint64_t headers = chunks * 16 + leads * (16 + kLeadChunks * 4);
  const int columns = p.layout == Layout::kRanked ? 1 : p.local_experts();
  const uint64_t counts = direct && !combine ? up(static_cast<uint64_t>(columns) * 4) : 0;
  const int owner = combine ? t : s, holder = combine ? s : t;
  uint64_t tokens = 0;
  for (int i = 0; i < p.tokens; ++i) {
    bool goes = false;
    for (int k = 0; k < p.top_k; ++k) {
      const int e = topk[owner][static_cast<size_t>(i) * p.top_k + k];
      if (e < 0 || e >= p.experts) continue;
      const int rank = e / p.local_experts();
      goes |= direct ? rank == holder : rank / per_node == holder / per_node;
    }
    tokens += goes;
  }
  return headers + counts + tokens * (row + routing);
}

}  // namespace native
