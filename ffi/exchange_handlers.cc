// The handlers of all_to_all, ragged_all_to_all, all_gather and move_weights: they check buffers and launch kernels.
#include "cuda_kernels/kernels.h"
#include "ffi/handlers.h"
#include "ffi/operation.h"

namespace xen_moe {
namespace {

// Returns success, or an error that says that the buffers do not have the bytes of the plan. As CheckOnce, it compares
// only while `plan.checked` is false.
ffi::Error CheckBytes(const ExchangePlan& plan, const ffi::AnyBuffer& operand, const ffi::AnyBuffer& output) {
  const ExchangeParams& p = plan.params;
  if (plan.checked.load(std::memory_order_acquire) || (operand.size_bytes() == p.operand_units * p.unit_bytes &&
                                                       output.size_bytes() == p.output_units * p.unit_bytes)) {
    return ffi::Error::Success();
  }
  return ffi::Error::InvalidArgument(
      "xen_moe_jax: operand of " + std::to_string(operand.size_bytes()) + " and output of " +
      std::to_string(output.size_bytes()) + " bytes do not match operand_units " + std::to_string(p.operand_units) +
      ", output_units " + std::to_string(p.output_units) + ", unit_bytes " + std::to_string(p.unit_bytes));
}

// all_to_all and all_gather: operand -> output. ragged_all_to_all: operand, output, input_offsets, send_sizes,
// output_offsets, recv_sizes -> output, in the place of the second operand.
ffi::Error Exchange(cudaStream_t stream, int32_t ordinal, ffi::RunId run, ExchangePlan* plan, ffi::RemainingArgs args,
                    ffi::Result<ffi::AnyBuffer> output) {
  ExchangeParams p = plan->params;
  const size_t wanted = plan->ragged ? 6 : 1;
  if (args.size() != wanted) {
    return ffi::Error::InvalidArgument("xen_moe_jax: " + std::to_string(args.size()) + " operands, not " +
                                       std::to_string(wanted));
  }
  const ffi::AnyBuffer operand = *args.get<ffi::AnyBuffer>(0);
  ffi::Error error = CheckBytes(*plan, operand, *output);
  if (!error.success()) return error;
  error = CheckOnce(plan, [&] {
    static const char* const names[] = {"input_offsets", "send_sizes", "output_offsets", "recv_sizes"};
    std::vector<Expected> all;
    for (size_t i = 0; plan->ragged && i < 4; ++i) {
      all.push_back({names[i], *args.get<ffi::AnyBuffer>(2 + i), ffi::S32, {p.ranks}});
    }
    return all;
  });
  if (!error.success()) return error;
  p.operand = static_cast<const char*>(operand.untyped_data());
  p.output = static_cast<char*>(output->untyped_data());
  if (plan->ragged) {
    const int** targets[] = {&p.input_offsets, &p.send_sizes, &p.output_offsets, &p.recv_sizes};
    for (size_t i = 0; i < 4; ++i) {
      *targets[i] = static_cast<const int*>(args.get<ffi::AnyBuffer>(2 + i)->untyped_data());
    }
    const ffi::AnyBuffer initial = *args.get<ffi::AnyBuffer>(1);
    if (initial.untyped_data() != output->untyped_data()) {
      return ffi::Error::Internal("xen_moe_jax: ragged_all_to_all must alias its output operand");
    }
  }
  return RunOn(*plan, p.call.needs, ordinal, stream, run, p.output,
               [&](const Member& member, cudaStream_t on, const Beginning& beginning) {
                 Bind(&p.call, member, beginning);
                 p.rank = member.rank;
                 return LaunchExchange(p, on);
               });
}

// move_weights: operand [S_old, ...], sources [R, S_new], active -> output [S_new, ...].
ffi::Error Move(cudaStream_t stream, int32_t ordinal, ffi::RunId run, MovePlan* plan, ffi::AnyBuffer operand,
                ffi::BufferR2<ffi::S32> sources, ffi::BufferR1<ffi::PRED> active, ffi::Result<ffi::AnyBuffer> output) {
  ExchangeParams p = plan->params;
  ffi::Error error = CheckBytes(*plan, operand, *output);
  if (!error.success()) return error;
  error = CheckOnce(plan, [&] {
    return std::vector<Expected>{{"sources", sources, ffi::S32, {p.ranks, static_cast<int64_t>(p.output_units)}},
                                 {"active", active, ffi::PRED, {plan->masked ? p.ranks : 0}}};
  });
  if (!error.success()) return error;
  p.operand = static_cast<const char*>(operand.untyped_data());
  p.output = static_cast<char*>(output->untyped_data());
  p.sources = sources.typed_data();
  p.call.active = plan->masked ? active.typed_data() : nullptr;
  return RunOn(*plan, p.call.needs, ordinal, stream, run, p.output,
               [&](const Member& member, cudaStream_t on, const Beginning& beginning) {
                 Bind(&p.call, member, beginning);
                 p.rank = member.rank;
                 return LaunchExchange(p, on);
               });
}

// The arguments of both handlers of move_weights.
auto MoveArguments() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::RunId>()
      .Ctx<ffi::State<MovePlan>>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::BufferR2<ffi::S32>>()
      .Arg<ffi::BufferR1<ffi::PRED>>()
      .Ret<ffi::AnyBuffer>();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(kMoveInstantiate, MakePlan<MovePlan>, ffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(kMove, Move, MoveArguments(), {ffi::Traits::kCmdBufferCompatible});

// A start and its done cannot be parts of a CUDA graph: a graph may end between the two.
XLA_FFI_DEFINE_HANDLER_SYMBOL(kMoveStart, Move, MoveArguments());

XLA_FFI_DEFINE_HANDLER_SYMBOL(kExchangeInstantiate, MakePlan<ExchangePlan>, ffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(kExchange, Exchange,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::State<ExchangePlan>>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace xen_moe
