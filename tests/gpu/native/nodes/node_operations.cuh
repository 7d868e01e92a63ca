// Operations across nodes as the programs of this folder and of processes/ run them, over any link.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "cuda_kernels/node_combine.cuh"
#include "cuda_kernels/node_dispatch.cuh"
#include "cuda_kernels/quantize_codec.cuh"
#include "tests/gpu/native/expectations.h"

namespace native {

using namespace XEN_MOE_KERNELS;

struct NodeOptions : Options {
  int per_node = 2;
  bool network = false;
  uint32_t broken = 0;
};

// One operation of one rank.
struct NodeOperation {
  Prepared* prepared = nullptr;
  RailParams rails{};
  void Plan(int chunk_tokens, uint64_t* expected) {
    const Problem& p = prepared->problem;
    if (p.operation == Operation::kCombine) {
      CombineParams& k = prepared->combine;
      rails.plan = PlanRail(k.routing, p.operation, chunk_tokens, k.schedule, &k.staging);
      Describe(&k, k.weights != nullptr, static_cast<uint32_t>(p.element), p.site);
    } else {
      DispatchParams& d = prepared->dispatch;
      rails.plan = PlanRail(d.routing, p.operation, chunk_tokens, d.schedule, &d.staging);
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

template <class Link>
int LaunchOne(const NodeOperation& o, const Link& link, cudaStream_t stream) {
  const Problem& p = o.prepared->problem;
  const bool native = p.wire == WireType::kNative;
  if (p.operation == Operation::kCombine) {
    const CombineParams& k = o.prepared->combine;
    if (p.element == Element::kF32) return LaunchNodeCombine<float, WireType::kNative>(k, o.rails, link, stream);
    return native ? LaunchNodeCombine<__nv_bfloat16, WireType::kNative>(k, o.rails, link, stream)
                  : LaunchNodeCombine<__nv_bfloat16, WireType::kFp8>(k, o.rails, link, stream);
  }
  const DispatchParams& d = o.prepared->dispatch;
  if (!native) return LaunchNodeDispatch<QuantizeCodec<__nv_bfloat16, WireType::kFp8>>(d, o.rails, link, stream);
  return p.hidden * p.element_bytes() % 16 == 0
             ? LaunchNodeDispatch<CopyCodec<int4>>(d, o.rails, link, stream)
             : LaunchNodeDispatch<CopyCodec<unsigned short>>(d, o.rails, link, stream);
}
// Loaded before any of them spins.
template <class Link>
void Preload() {
  cudaFuncAttributes a;
  NATIVE_CHECK((PreloadNodeCombine<float, WireType::kNative, Link>()));
  NATIVE_CHECK((PreloadNodeCombine<__nv_bfloat16, WireType::kNative, Link>()));
  NATIVE_CHECK((PreloadNodeCombine<__nv_bfloat16, WireType::kFp8, Link>()));
  NATIVE_CHECK(cudaFuncGetAttributes(&a, NodeDispatchKernel<CopyCodec<int4>, Link>));
  NATIVE_CHECK(cudaFuncGetAttributes(&a, NodeDispatchKernel<CopyCodec<unsigned short>, Link>));
  NATIVE_CHECK(cudaFuncGetAttributes(&a, NodeDispatchKernel<QuantizeCodec<__nv_bfloat16, WireType::kFp8>, Link>));
}

// Operations that the kernels across nodes take, every kind in every layout first.
inline Problem NodeProblem(std::mt19937& rng, const NodeOptions& o, int i) {
  for (;;) {
    Problem p = RandomProblem(rng, o.ranks, std::min(8, MostBlocks(o)));
    if (p.operation == Operation::kExchange) continue;
    if (i < 9 && (static_cast<int>(p.operation) != i % 3 || static_cast<int>(p.layout) != i / 3)) continue;
    p.ranks_per_node = o.per_node, p.low_latency = p.bulk = false;
    if (p.wire != WireType::kNative) p.wire = WireType::kFp8, p.element = Element::kBf16, p.scaled = false;
    return p;
  }
}
// What rank `s` has to send rank `t` in an operation: every token once for each other node that it has experts on, with
// what is stated beside it (docs/nodes_design.md). `topk`: [R][T, K].
inline uint64_t BytesBetween(const Problem& p, int chunk_tokens, const std::vector<std::vector<int>>& topk, int s,
                             int t) {
  const int per_node = p.per_node();
  if (s == t || s % per_node != t % per_node) return 0;
  const bool combine = p.operation == Operation::kCombine, native = p.wire == WireType::kNative;
  auto up = [](uint64_t bytes) { return (bytes + 15) / 16 * 16; };
  const uint64_t scales = p.scaled || !native ? up(static_cast<uint64_t>(p.scale_blocks()) * 4) : 0;
  const uint64_t row = up(static_cast<uint64_t>(p.hidden) * (native ? p.element_bytes() : 1)) + scales;
  const uint64_t routing = combine ? 0 : up(static_cast<uint64_t>(p.top_k) * 8);
  const uint64_t headers = static_cast<uint64_t>((p.tokens + chunk_tokens - 1) / chunk_tokens) * 16;
  const int owner = combine ? t : s, node = (combine ? s : t) / per_node;
  uint64_t tokens = 0;
  for (int i = 0; i < p.tokens; ++i) {
    bool goes = false;
    for (int k = 0; k < p.top_k; ++k) {
      const int e = topk[owner][static_cast<size_t>(i) * p.top_k + k];
      goes |= e >= 0 && e < p.experts && e / p.local_experts() / per_node == node;
    }
    tokens += goes;
  }
  return headers + tokens * (row + routing);
}

}  // namespace native
