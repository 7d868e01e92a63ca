// The handler of all_gather_matmul: this rank's rows are multiplied while the rows of the other ranks travel, and each
// other rank's rows are multiplied when they have arrived.
//
// Rows are exchanged in rounds (cuda_kernels/exchange/gather.cu): in each round a rank sends its rows to one other rank
// and receives the rows of that rank. A round is a kernel on the library's stream. XLA's stream multiplies this rank's
// rows at once, and a peer's rows when their round has ended. Every product goes straight to its place in the result.
// While rounds are still running, a matmul leaves the multiprocessors of a round to them.
#include <vector>

#include "cuda_kernels/kernels.h"
#include "ffi/cublas.h"
#include "ffi/handlers.h"
#include "ffi/operation.h"

namespace xen_moe {
namespace {

// Returns the first round in which some rank has a peer: with two ranks, none has one in round 0.
int FirstRound(int ranks) { return ranks == 2 ? 1 : 0; }

int64_t RowsOf(const GatherMatmulPlan& plan) { return static_cast<int64_t>(plan.params.operand_units); }
Matmul ShapeOf(const GatherMatmulPlan& plan) {
  return {nullptr, nullptr, nullptr, RowsOf(plan), plan.columns, plan.depth, kDtypes[plan.dtype_code]};
}

// x [T, K], w [K, N] -> out [R * T, N], gathered [R * T, K] (scratch without this rank's rows), workspace (of cuBLAS).
ffi::Error GatherMatmul(cudaStream_t stream, int32_t ordinal, ffi::RunId run, GatherMatmulPlan* plan, ffi::AnyBuffer x,
                        ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> gathered,
                        ffi::Result<ffi::AnyBuffer> workspace) {
  ExchangeParams p = plan->params;
  const int64_t rows = RowsOf(*plan), depth = plan->depth, columns = plan->columns;
  const ffi::DataType dtype = kDtypes[plan->dtype_code];
  ffi::Error error = CheckOnce(plan, [&] {
    return std::vector<Expected>{{"x", x, dtype, {rows, depth}},
                                 {"w", w, dtype, {depth, columns}},
                                 {"out", *out, dtype, {p.ranks * rows, columns}},
                                 {"gathered", *gathered, dtype, {p.ranks * rows, depth}}};
  });
  if (!error.success()) return error;
  p.operand = static_cast<const char*>(x.untyped_data());
  p.output = static_cast<char*>(gathered->untyped_data());
  char* const result = static_cast<char*>(out->untyped_data());

  std::shared_lock<std::shared_mutex> launching;
  ffi::ErrorOr<const Member*> member = Enter(*plan, p.call.needs, ordinal, stream, run.run_id, &launching);
  if (!member.has_value()) return EndRun(ordinal, stream, run, member.error());
  p.rank = (*member)->rank;
  std::vector<void*> marks;  // of the rounds, in order
  size_t joined = 0;
  // Counts the mark first: a join that throws has given the mark's event back.
  const auto join = [&] {
    const size_t round = joined++;
    CudaDevices().Join(ordinal, stream, marks[round]);
    return static_cast<int>(round);
  };
  try {
    Devices& gpus = CudaDevices();
    const int all_sms = gpus.SmCount(ordinal);
    const auto multiply = [&](const char* from, int rank, int sms) {
      Matmul matmul = ShapeOf(*plan);
      matmul.rows = from, matmul.weights = static_cast<const char*>(w.untyped_data());
      matmul.out = result + rank * rows * columns * 2;
      QueueMatmul(ordinal, stream, matmul, sms, workspace->untyped_data(), workspace->size_bytes());
    };
    const std::lock_guard<std::mutex> together(Flights::Get().launching(ordinal));
    Takeoff takeoff = Flights::Get().Fork(&gpus, ordinal, stream, p.output, run.run_id);
    const Beginning first = takeoff.beginning;
    for (p.round = FirstRound(p.ranks); p.round < p.ranks; ++p.round) {
      Bind(&p.call, **member, takeoff.beginning);
      const int code = LaunchExchange(p, static_cast<cudaStream_t>(takeoff.stream));
      error = Launched(ordinal, code);
      if (!error.success()) break;
      marks.push_back(gpus.Mark(ordinal));
      takeoff.beginning = Beginning{};  // the first kernel shows that it has begun
    }
    if (error.success()) {
      if (first.word) gpus.AwaitBeginning(ordinal, stream, first);
      multiply(p.operand, p.rank, all_sms - ExchangeBlocks(p));
    }
    while (joined < marks.size()) {
      const int peer = (FirstRound(p.ranks) + join() - p.rank + p.ranks) % p.ranks;
      if (peer == p.rank || !error.success()) continue;
      const int busy = joined < marks.size() ? ExchangeBlocks(p) : 0;
      multiply(p.output + peer * rows * depth * 2, peer, all_sms - busy);
    }
    if (!error.success()) return EndRun(ordinal, stream, run, error);
    // The products of this rank's rows do not show a failure of the group, and nor do those of rounds before it.
    const int code = LaunchPoison((*member)->mailbox, result, out->size_bytes(), p.poison, p.ranks, stream);
    error = Launched(ordinal, code);
  } catch (const MemoryError& e) {
    error = ToError(e);
    while (joined < marks.size()) {
      try {
        join();
      } catch (const MemoryError&) {
        // The GPU is lost; the first error tells more.
      }
    }
  }
  return error.success() ? error : EndRun(ordinal, stream, run, error);
}

// Makes the plan, and prepares cuBLAS on every GPU of this process that runs it.
ffi::ErrorOr<std::unique_ptr<GatherMatmulPlan>> Instantiate(ffi::Dictionary dictionary) {
  auto plan = MakePlan<GatherMatmulPlan>(dictionary);
  if (!plan.has_value() || (*plan)->workspace == nullptr) return plan;
  try {
    for (const Member& member : (*plan)->workspace->members()) {
      const int sms = CudaDevices().SmCount(member.ordinal);
      PrepareCublas(member.ordinal, ShapeOf(**plan), {sms, sms - ExchangeBlocks((*plan)->params)},
                    (*plan)->workspace_bytes);
    }
  } catch (const MemoryError& e) {
    return ffi::Unexpected(ToError(e));
  }
  return plan;
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(kGatherMatmulInstantiate, Instantiate, ffi::Ffi::BindInstantiate().Attrs());

// Its rounds run on a stream of the library's own, and are no part of a CUDA graph.
XLA_FFI_DEFINE_HANDLER_SYMBOL(kGatherMatmul, GatherMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::State<GatherMatmulPlan>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

}  // namespace xen_moe
