// dispatch, redispatch and combine: decode, check, launch. Operand and result order: docs/internals.md.
#include "ffi/handlers.h"
#include "ffi/operation.h"

namespace xen_moe {
namespace {

ffi::ErrorOr<std::unique_ptr<RoutingPlan>> Instantiate(ffi::Dictionary dictionary) {
  auto plan = std::make_unique<RoutingPlan>();
  try {
    Attributes attributes([&](const char* name) { return dictionary.get<int64_t>(name); });
    DecodeRouting(attributes, plan.get());
    auto devices = dictionary.get<ffi::Span<const int64_t>>("devices");
    if (!devices.has_value())
      return ffi::Unexpected(ffi::Error::InvalidArgument("xen_moe_jax: attribute devices is missing"));
    plan->workspace =
        PrepareWorkspace(std::vector<DeviceKey>(devices->begin(), devices->end()), plan->routing.ranks,
                         static_cast<int>(attributes.Int("channel", 0, 15)), plan->needs, plan->schedule.blocks);
  } catch (const MemoryError& e) {
    return ffi::Unexpected(ToError(e));
  }
  return plan;
}

struct Shapes {
  std::vector<int64_t> rows, row_scales, positions, recv_counts, weights;
};
Shapes ShapesOf(const RoutingPlan& plan) {
  const Routing& r = plan.routing;
  std::vector<int64_t> lead{r.capacity};
  if (r.layout == Layout::kPadded) lead = {r.local_experts, static_cast<int64_t>(r.ranks) * r.tokens};
  auto with = [&](int64_t last) {
    std::vector<int64_t> out = lead;
    out.push_back(last);
    return out;
  };
  return {with(r.hidden),
          with((r.hidden + kScaleBlock - 1) / kScaleBlock),
          {r.ranks, r.tokens, r.slots},
          {r.ranks, r.local_experts},
          r.layout == Layout::kRanked ? with(r.top_k) : lead};
}

// Collects the first failed check.
class Checks {
 public:
  void Buffer(const char* name, ffi::ErrorOr<ffi::AnyBuffer> buffer, ffi::DataType dtype,
              const std::vector<int64_t>& dims) {
    if (!error_.success()) return;
    error_ = buffer.has_value() ? CheckBuffer(name, *buffer, dtype, dims) : buffer.error();
  }
  void Result(const char* name, ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> buffer, ffi::DataType dtype,
              const std::vector<int64_t>& dims) {
    if (!error_.success()) return;
    error_ = buffer.has_value() ? CheckBuffer(name, **buffer, dtype, dims) : buffer.error();
  }
  void Count(const char* what, size_t given, size_t wanted) {
    if (!error_.success() || given == wanted) return;
    error_ = ffi::Error::InvalidArgument(std::string("xen_moe_jax: ") + std::to_string(given) + " " + what + ", not " +
                                         std::to_string(wanted));
  }
  const ffi::Error& error() const { return error_; }

 private:
  ffi::Error error_ = ffi::Error::Success();
};

template <class T>
const T* In(ffi::RemainingArgs args, size_t i) {
  return static_cast<const T*>(args.get<ffi::AnyBuffer>(i)->untyped_data());
}
template <class T>
T* Out(ffi::RemainingRets rets, size_t i) {
  return static_cast<T*>((*rets.get<ffi::AnyBuffer>(i))->untyped_data());
}

DispatchParams DispatchBase(const RoutingPlan& plan) {
  DispatchParams p{};
  p.routing = plan.routing;
  p.staging = plan.staging;
  p.schedule = plan.schedule;
  p.element = plan.element;
  p.wire = plan.wire;
  p.ue8m0 = plan.ue8m0;
  p.known_positions = plan.known_positions;
  return p;
}

// x, [scales], topk_idx, topk_weights -> rows, [row_scales], positions, recv_counts, weights, [local_idx]
ffi::Error Dispatch(cudaStream_t stream, int32_t ordinal, RoutingPlan* plan, ffi::RemainingArgs args,
                    ffi::RemainingRets rets) {
  const Routing& r = plan->routing;
  const Shapes shapes = ShapesOf(*plan);
  const bool scaled = plan->scaled, ranked = r.layout == Layout::kRanked;
  const int64_t blocks = (r.hidden + kScaleBlock - 1) / kScaleBlock;
  const size_t idx = scaled ? 2 : 1, pos = scaled ? 2 : 1;
  Checks checks;
  checks.Count("operands", args.size(), idx + 2);
  checks.Count("results", rets.size(), pos + 3 + ranked);
  if (checks.error().success()) {
    checks.Buffer("x", args.get<ffi::AnyBuffer>(0), plan->dtype, {r.tokens, r.hidden});
    if (scaled) checks.Buffer("scales", args.get<ffi::AnyBuffer>(1), ffi::DataType::F32, {r.tokens, blocks});
    checks.Buffer("topk_idx", args.get<ffi::AnyBuffer>(idx), ffi::DataType::S32, {r.tokens, r.top_k});
    checks.Buffer("topk_weights", args.get<ffi::AnyBuffer>(idx + 1), ffi::DataType::F32, {r.tokens, r.top_k});
    checks.Result("rows", rets.get<ffi::AnyBuffer>(0), plan->dtype, shapes.rows);
    if (scaled) checks.Result("row_scales", rets.get<ffi::AnyBuffer>(1), ffi::DataType::F32, shapes.row_scales);
    checks.Result("positions", rets.get<ffi::AnyBuffer>(pos), ffi::DataType::S32, shapes.positions);
    checks.Result("recv_counts", rets.get<ffi::AnyBuffer>(pos + 1), ffi::DataType::S32, shapes.recv_counts);
    checks.Result("weights", rets.get<ffi::AnyBuffer>(pos + 2), ffi::DataType::F32, shapes.weights);
    if (ranked) checks.Result("local_idx", rets.get<ffi::AnyBuffer>(pos + 3), ffi::DataType::S32, shapes.weights);
  }
  if (!checks.error().success()) return checks.error();
  DispatchParams p = DispatchBase(*plan);
  p.x = In<void>(args, 0);
  p.scales = scaled ? In<float>(args, 1) : nullptr;
  p.topk_idx = In<int>(args, idx);
  p.topk_weights = In<float>(args, idx + 1);
  p.rows = Out<void>(rets, 0);
  p.row_scales = scaled ? Out<float>(rets, 1) : nullptr;
  p.positions = Out<int>(rets, pos);
  p.recv_counts = Out<int>(rets, pos + 1);
  p.weights = Out<float>(rets, pos + 2);
  p.local_idx = ranked ? Out<int>(rets, pos + 3) : nullptr;
  return RunOn(*plan->workspace, plan->needs, ordinal, stream, [&](const Member& member) {
    p.control = member.control;
    p.routing.rank = member.rank;
    return LaunchDispatch(p, stream);
  });
}

// x, topk_idx, positions, recv_counts -> rows
ffi::Error Redispatch(cudaStream_t stream, int32_t ordinal, RoutingPlan* plan, ffi::AnyBuffer x,
                      ffi::AnyBuffer topk_idx, ffi::AnyBuffer positions, ffi::AnyBuffer recv_counts,
                      ffi::Result<ffi::AnyBuffer> rows) {
  const Routing& r = plan->routing;
  const Shapes shapes = ShapesOf(*plan);
  Checks checks;
  checks.Buffer("x", x, plan->dtype, {r.tokens, r.hidden});
  checks.Buffer("topk_idx", topk_idx, ffi::DataType::S32, {r.tokens, r.top_k});
  checks.Buffer("positions", positions, ffi::DataType::S32, shapes.positions);
  checks.Buffer("recv_counts", recv_counts, ffi::DataType::S32, shapes.recv_counts);
  checks.Buffer("rows", *rows, plan->dtype, shapes.rows);
  if (!checks.error().success()) return checks.error();
  DispatchParams p = DispatchBase(*plan);
  p.x = x.untyped_data();
  p.topk_idx = static_cast<const int*>(topk_idx.untyped_data());
  p.positions = static_cast<int*>(positions.untyped_data());
  p.recv_counts = static_cast<int*>(recv_counts.untyped_data());
  p.rows = rows->untyped_data();
  return RunOn(*plan->workspace, plan->needs, ordinal, stream, [&](const Member& member) {
    p.control = member.control;
    p.routing.rank = member.rank;
    return LaunchDispatch(p, stream);
  });
}

// y, topk_idx, positions, recv_counts, weights -> out
ffi::Error Combine(cudaStream_t stream, int32_t ordinal, RoutingPlan* plan, ffi::AnyBuffer y, ffi::AnyBuffer topk_idx,
                   ffi::AnyBuffer positions, ffi::AnyBuffer recv_counts, ffi::AnyBuffer weights,
                   ffi::Result<ffi::AnyBuffer> out) {
  const Routing& r = plan->routing;
  const Shapes shapes = ShapesOf(*plan);
  Checks checks;
  checks.Buffer("y", y, plan->dtype, shapes.rows);
  checks.Buffer("topk_idx", topk_idx, ffi::DataType::S32, {r.tokens, r.top_k});
  checks.Buffer("positions", positions, ffi::DataType::S32, shapes.positions);
  checks.Buffer("recv_counts", recv_counts, ffi::DataType::S32, shapes.recv_counts);
  if (plan->weighted) checks.Buffer("weights", weights, ffi::DataType::F32, shapes.weights);
  checks.Buffer("out", *out, plan->dtype, {r.tokens, r.hidden});
  if (!checks.error().success()) return checks.error();
  if (plan->element == Element::kByte)
    return ffi::Error::InvalidArgument("xen_moe_jax: combine takes bf16, f16 or f32 rows");
  if (plan->weighted && r.layout == Layout::kRanked) {
    return ffi::Error::InvalidArgument("xen_moe_jax: the ranked layout takes weighted = 0");
  }
  CombineParams p{};
  p.routing = r;
  p.staging = plan->staging;
  p.schedule = plan->schedule;
  p.element = plan->element;
  p.wire = plan->wire;
  p.ue8m0 = plan->ue8m0;
  p.y = y.untyped_data();
  p.topk_idx = static_cast<const int*>(topk_idx.untyped_data());
  p.positions = static_cast<const int*>(positions.untyped_data());
  p.weights = plan->weighted ? static_cast<const float*>(weights.untyped_data()) : nullptr;
  p.out = out->untyped_data();
  return RunOn(*plan->workspace, plan->needs, ordinal, stream, [&](const Member& member) {
    p.control = member.control;
    p.routing.rank = member.rank;
    return LaunchCombine(p, stream);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(kRoutingInstantiate, Instantiate, ffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(kDispatch, Dispatch,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::State<RoutingPlan>>()
                                  .RemainingArgs()
                                  .RemainingRets(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(kRedispatch, Redispatch,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::State<RoutingPlan>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(kCombine, Combine,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::State<RoutingPlan>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace xen_moe
