// The handlers of dispatch, redispatch and combine: they check buffers and launch kernels. docs/design/internals.md has
// the order of operands and results.
#include "cuda_kernels/kernels.h"
#include "ffi/handlers.h"
#include "ffi/nccl_link.h"
#include "ffi/operation.h"

namespace xen_moe {
namespace {

using Bools = ffi::BufferR1<ffi::PRED>;
using Ints2 = ffi::BufferR2<ffi::S32>;
using Ints3 = ffi::BufferR3<ffi::S32>;
using Floats2 = ffi::BufferR2<ffi::F32>;
using IntsOut2 = ffi::ResultBufferR2<ffi::S32>;
using IntsOut3 = ffi::ResultBufferR3<ffi::S32>;

// The shape of the operand `active`.
std::vector<int64_t> ActiveShape(const Plan& plan, const Routing& r) { return {plan.masked ? r.ranks : 0}; }

int64_t ScaleBlocks(const Routing& r) { return (r.hidden + kScaleBlock - 1) / kScaleBlock; }

// [C, last], or [L, R*T, last] in the padded layout.
std::vector<int64_t> RowsShape(const Routing& r, int64_t last) {
  if (r.layout == Layout::kPadded) return {r.local_experts, static_cast<int64_t>(r.ranks) * r.tokens, last};
  return {r.capacity, last};
}
std::vector<int64_t> WeightsShape(const Routing& r) {
  std::vector<int64_t> shape = RowsShape(r, r.top_k);
  if (r.layout != Layout::kRanked) shape.pop_back();
  return shape;
}

// Launches `p` across nodes. The link of a group is chosen here and nowhere else: NCCL where there is a connection,
// which only a module with kernels over NCCL makes (NcclLinkKernels); else pointers.
int LaunchAcross(const DispatchParams& p, const RailParams& rails, const Member& member, cudaStream_t on) {
#ifdef XEN_MOE_NCCL_KERNELS
  if (member.connection) return NcclKernelsFor(p.routing.ranks).dispatch(p, rails, NcclSiteOf(member), on);
#endif
  return PeerKernelsFor(p.routing.ranks).dispatch(p, rails, &member.rail->peers, on);
}
int LaunchAcross(const CombineParams& p, const RailParams& rails, const Member& member, cudaStream_t on) {
#ifdef XEN_MOE_NCCL_KERNELS
  if (member.connection) return NcclKernelsFor(p.routing.ranks).combine(p, rails, NcclSiteOf(member), on);
#endif
  return PeerKernelsFor(p.routing.ranks).combine(p, rails, &member.rail->peers, on);
}

// Returns `plan`, which is that of rank 0, for the rank of `member`.
RailParams RailsOf(const RailPlan& plan, const Member& member, bool flight) {
  RailParams rails{plan, ExpectedOf(member.rail, plan.nodes * plan.per_node, plan.nodes), flight && plan.direct,
                   Part::kWhole};
  rails.plan.node = member.rank / plan.per_node;
  rails.plan.index = member.rank % plan.per_node;
  return rails;
}

// Launches `p` as the rank that this device has in its group. `result`: the first result, which names a flight.
template <class AnyPlan, class Params, class Launch>
ffi::Error Run(const AnyPlan& plan, Params* p, int32_t ordinal, cudaStream_t stream, ffi::RunId run, void* result,
               Launch launch) {
  return RunOn(plan, p->call.needs, ordinal, stream, run, result,
               [&](const Member& member, cudaStream_t on, const Beginning& beginning) {
                 Bind(&p->call, member, beginning);
                 p->routing.rank = member.rank;
                 if (plan.rail.nodes > 1) return LaunchAcross(*p, RailsOf(plan.rail, member, plan.flight), member, on);
                 return launch(*p, on);
               });
}

// x, scales, topk_idx, topk_weights, active -> rows, row_scales, positions, recv_counts, weights, clean topk_idx,
// [local_idx]
ffi::Error Dispatch(cudaStream_t stream, int32_t ordinal, ffi::RunId run, DispatchPlan* plan, ffi::AnyBuffer x,
                    Floats2 scales, Ints2 topk_idx, Floats2 topk_weights, Bools active,
                    ffi::Result<ffi::AnyBuffer> rows, ffi::Result<ffi::AnyBuffer> row_scales, IntsOut3 positions,
                    IntsOut2 recv_counts, ffi::Result<ffi::AnyBuffer> weights, IntsOut2 clean_topk_idx,
                    ffi::RemainingRets rest) {
  DispatchParams p = plan->params;
  const Routing& r = p.routing;
  const bool ranked = r.layout == Layout::kRanked;
  const size_t others = ranked;
  if (rest.size() != others) {
    return ffi::Error::InvalidArgument("xen_moe_jax: " + std::to_string(6 + rest.size()) + " results, not " +
                                       std::to_string(6 + others));
  }
  if (ranked) p.local_idx = static_cast<int*>((*rest.get<ffi::AnyBuffer>(0))->untyped_data());
  ffi::Error error = CheckOnce(plan, [&] {
    const int64_t columns = plan->scaled ? ScaleBlocks(r) : 0;
    std::vector<Expected> all{{"x", x, plan->dtype, {r.tokens, r.hidden}},
                              {"scales", scales, ffi::F32, {r.tokens, columns}},
                              {"topk_idx", topk_idx, ffi::S32, {r.tokens, r.top_k}},
                              {"topk_weights", topk_weights, ffi::F32, {r.tokens, r.top_k}},
                              {"active", active, ffi::PRED, ActiveShape(*plan, r)},
                              {"rows", *rows, plan->dtype, RowsShape(r, r.hidden)},
                              {"row_scales", *row_scales, ffi::F32, RowsShape(r, columns)},
                              {"positions", *positions, ffi::S32, {r.ranks, r.tokens, r.slots}},
                              {"recv_counts", *recv_counts, ffi::S32, {r.ranks, r.local_experts}},
                              {"weights", *weights, ffi::F32, WeightsShape(r)},
                              {"clean topk_idx", *clean_topk_idx, ffi::S32, {r.tokens, r.top_k}}};
    if (ranked) all.push_back({"local_idx", **rest.get<ffi::AnyBuffer>(0), ffi::S32, WeightsShape(r)});
    return all;
  });
  if (!error.success()) return error;
  p.x = x.untyped_data();
  p.scales = plan->scaled ? scales.typed_data() : nullptr;
  p.topk_idx = topk_idx.typed_data();
  p.topk_weights = topk_weights.typed_data();
  p.call.active = plan->masked ? active.typed_data() : nullptr;
  p.rows = rows->untyped_data();
  p.row_scales = plan->scaled ? static_cast<float*>(row_scales->untyped_data()) : nullptr;
  p.positions = positions->typed_data();
  p.recv_counts = recv_counts->typed_data();
  p.weights = static_cast<float*>(weights->untyped_data());
  p.clean_topk_idx = clean_topk_idx->typed_data();
  return Run(*plan, &p, ordinal, stream, run, p.rows, LaunchDispatch);
}

// x, topk_idx, positions, recv_counts, active -> rows
ffi::Error Redispatch(cudaStream_t stream, int32_t ordinal, ffi::RunId run, DispatchPlan* plan, ffi::AnyBuffer x,
                      Ints2 topk_idx, Ints3 positions, Ints2 recv_counts, Bools active,
                      ffi::Result<ffi::AnyBuffer> rows) {
  DispatchParams p = plan->params;
  const Routing& r = p.routing;
  ffi::Error error = CheckOnce(plan, [&] {
    return std::vector<Expected>{{"x", x, plan->dtype, {r.tokens, r.hidden}},
                                 {"topk_idx", topk_idx, ffi::S32, {r.tokens, r.top_k}},
                                 {"positions", positions, ffi::S32, {r.ranks, r.tokens, r.slots}},
                                 {"recv_counts", recv_counts, ffi::S32, {r.ranks, r.local_experts}},
                                 {"active", active, ffi::PRED, ActiveShape(*plan, r)},
                                 {"rows", *rows, plan->dtype, RowsShape(r, r.hidden)}};
  });
  if (!error.success()) return error;
  p.x = x.untyped_data();
  p.topk_idx = topk_idx.typed_data();
  p.positions = positions.typed_data();
  p.recv_counts = recv_counts.typed_data();
  p.call.active = plan->masked ? active.typed_data() : nullptr;
  p.rows = rows->untyped_data();
  return Run(*plan, &p, ordinal, stream, run, p.rows, LaunchDispatch);
}

// y, topk_idx, positions, recv_counts, active, weights -> out
ffi::Error Combine(cudaStream_t stream, int32_t ordinal, ffi::RunId run, CombinePlan* plan, ffi::AnyBuffer y,
                   Ints2 topk_idx, Ints3 positions, Ints2 recv_counts, Bools active, ffi::Buffer<ffi::F32> weights,
                   ffi::Result<ffi::AnyBuffer> out) {
  CombineParams p = plan->params;
  const Routing& r = p.routing;
  ffi::Error error = CheckOnce(plan, [&] {
    std::vector<Expected> all{{"y", y, plan->dtype, RowsShape(r, r.hidden)},
                              {"topk_idx", topk_idx, ffi::S32, {r.tokens, r.top_k}},
                              {"positions", positions, ffi::S32, {r.ranks, r.tokens, r.slots}},
                              {"recv_counts", recv_counts, ffi::S32, {r.ranks, r.local_experts}},
                              {"active", active, ffi::PRED, ActiveShape(*plan, r)},
                              {"out", *out, plan->dtype, {r.tokens, r.hidden}}};
    if (plan->weighted) all.push_back({"weights", weights, ffi::F32, WeightsShape(r)});
    return all;
  });
  if (!error.success()) return error;
  p.y = y.untyped_data();
  p.topk_idx = topk_idx.typed_data();
  p.positions = positions.typed_data();
  p.call.active = plan->masked ? active.typed_data() : nullptr;
  p.weights = plan->weighted ? weights.typed_data() : nullptr;
  p.out = out->untyped_data();
  return Run(*plan, &p, ordinal, stream, run, p.out, LaunchCombine);
}

// A combine by home: y, topk_idx, positions, recv_counts, active, home, topk_weights -> out
ffi::Error HomeCombine(cudaStream_t stream, int32_t ordinal, ffi::RunId run, HomeCombinePlan* plan, ffi::AnyBuffer y,
                       Ints2 topk_idx, Ints3 positions, Ints2 recv_counts, Bools active, Ints2 home,
                       Floats2 topk_weights, ffi::Result<ffi::AnyBuffer> out) {
  CombineParams p = plan->params;
  const Routing& r = p.routing;
  ffi::Error error = CheckOnce(plan, [&] {
    return std::vector<Expected>{{"y", y, plan->dtype, RowsShape(r, r.hidden)},
                                 {"topk_idx", topk_idx, ffi::S32, {r.tokens, r.top_k}},
                                 {"positions", positions, ffi::S32, {r.ranks, r.tokens, r.slots}},
                                 {"recv_counts", recv_counts, ffi::S32, {r.ranks, r.local_experts}},
                                 {"active", active, ffi::PRED, ActiveShape(*plan, r)},
                                 {"home", home, ffi::S32, {r.tokens, r.top_k}},
                                 {"topk_weights", topk_weights, ffi::F32, {r.tokens, r.top_k}},
                                 {"out", *out, plan->dtype, {r.tokens, r.hidden}}};
  });
  if (!error.success()) return error;
  p.y = y.untyped_data();
  p.topk_idx = topk_idx.typed_data();
  p.positions = positions.typed_data();
  p.call.active = plan->masked ? active.typed_data() : nullptr;
  p.home = home.typed_data();
  p.topk_weights = plan->weighted ? topk_weights.typed_data() : nullptr;
  p.out = out->untyped_data();
  return Run(*plan, &p, ordinal, stream, run, p.out, LaunchCombine);
}

// The results of a start, then arrays that keep the operands of the start alive -> the results of the start, complete,
// in the same buffers. A copy that XLA has made of them in between was made too early.
ffi::Error Done(cudaStream_t stream, int32_t ordinal, ffi::RunId run, ffi::RemainingArgs in_flight,
                ffi::RemainingRets landed) {
  bool in_place = landed.size() > 0 && in_flight.size() >= landed.size();
  for (size_t i = 0; in_place && i < landed.size(); ++i) {
    const ffi::AnyBuffer from = *in_flight.get<ffi::AnyBuffer>(i);
    in_place = from.size_bytes() == 0 || from.untyped_data() == (*landed.get<ffi::AnyBuffer>(i))->untyped_data();
  }
  try {
    if (in_place &&
        Flights::Get().Land(&CudaDevices(), ordinal, (*landed.get<ffi::AnyBuffer>(0))->untyped_data(), stream)) {
      return ffi::Error::Success();
    }
  } catch (const MemoryError& e) {
    return EndRun(ordinal, stream, run, ToError(e));
  }
  const ffi::Error error(
      ffi::ErrorCode::kFailedPrecondition,
      "xen_moe_jax: no flight lands in the buffers that its done half was given: XLA has copied them since "
      "the start half, or the start was in another program, or before xen_moe_jax.cuda.reset(). Start and "
      "finish a flight in one program and in the same turn of a loop; do not carry it through scan, "
      "while_loop or cond");
  return EndRun(ordinal, stream, run, error);
}

// The arguments of every handler before its operands.
template <class AnyPlan>
auto Given() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::RunId>()
      .Ctx<ffi::State<AnyPlan>>();
}
auto DispatchArguments() {
  return Given<DispatchPlan>()
      .Arg<ffi::AnyBuffer>()
      .Arg<Floats2>()
      .Arg<Ints2>()
      .Arg<Floats2>()
      .Arg<Bools>()
      .Ret<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Ret<ffi::BufferR3<ffi::S32>>()
      .Ret<ffi::BufferR2<ffi::S32>>()
      .Ret<ffi::AnyBuffer>()
      .Ret<ffi::BufferR2<ffi::S32>>()
      .RemainingRets();
}
auto RedispatchArguments() {
  return Given<DispatchPlan>()
      .Arg<ffi::AnyBuffer>()
      .Arg<Ints2>()
      .Arg<Ints3>()
      .Arg<Ints2>()
      .Arg<Bools>()
      .Ret<ffi::AnyBuffer>();
}
auto CombineArguments() {
  return Given<CombinePlan>()
      .Arg<ffi::AnyBuffer>()
      .Arg<Ints2>()
      .Arg<Ints3>()
      .Arg<Ints2>()
      .Arg<Bools>()
      .Arg<ffi::Buffer<ffi::F32>>()
      .Ret<ffi::AnyBuffer>();
}
auto HomeCombineArguments() {
  return Given<HomeCombinePlan>()
      .Arg<ffi::AnyBuffer>()
      .Arg<Ints2>()
      .Arg<Ints3>()
      .Arg<Ints2>()
      .Arg<Bools>()
      .Arg<Ints2>()
      .Arg<Floats2>()
      .Ret<ffi::AnyBuffer>();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(kDispatchInstantiate, MakePlan<DispatchPlan>, ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kCombineInstantiate, MakePlan<CombinePlan>, ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kHomeCombineInstantiate, MakePlan<HomeCombinePlan>, ffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(kDispatch, Dispatch, DispatchArguments(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(kRedispatch, Redispatch, RedispatchArguments(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(kCombine, Combine, CombineArguments(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(kHomeCombine, HomeCombine, HomeCombineArguments(), {ffi::Traits::kCmdBufferCompatible});

// Start and done cannot be part of a CUDA graph: a graph may end between the two.
XLA_FFI_DEFINE_HANDLER_SYMBOL(kDispatchStart, Dispatch, DispatchArguments());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kCombineStart, Combine, CombineArguments());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kDone, Done,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::RunId>()
                                  .RemainingArgs()
                                  .RemainingRets());

}  // namespace xen_moe
