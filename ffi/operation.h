// From XLA's attributes and buffers to the kernels' Params. XLA makes one plan for each custom call, when it
// instantiates an executable; the plan holds everything that does not change from call to call.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "cuda_kernels/core/params.h"
#include "cuda_kernels/node/rail_plan.h"
#include "ffi/attributes.h"
#include "ffi/flights.h"
#include "ffi/registry.h"
#include "xla/ffi/api/ffi.h"

namespace xen_moe {

namespace ffi = xla::ffi;

// The values of attributes. ffi/module.cc exports the names to Python, which writes their indices.
constexpr ffi::DataType kDtypes[] = {ffi::DataType::BF16,     ffi::DataType::F16, ffi::DataType::F32,
                                     ffi::DataType::F8E4M3FN, ffi::DataType::S8,  ffi::DataType::F8E5M2};
constexpr const char* kDtypeNames[] = {"bfloat16", "float16", "float32", "float8_e4m3fn", "int8", "float8_e5m2"};
constexpr const char* kWireNames[] = {"", "float8_e4m3fn", "int8", "mxfp4"};
constexpr const char* kLayoutNames[] = {"grouped", "ranked", "padded"};
constexpr int kNumDtypes = static_cast<int>(std::size(kDtypes));
constexpr int kMaxChannels = 16;

// The part of a plan that every operation has.
struct Plan {
  std::shared_ptr<Workspace> workspace;  // null: the program was compiled without GPUs, to be saved
  int channel = 0;
  uint32_t site = 0;                 // the number that Python gave the call
  int dtype_code = 0;                // index into kDtypes; exchange: 0
  bool flight = false;               // the call is a start, which another call finishes
  bool masked = false;               // the call has an operand that says which ranks are active
  double timeout_s = 0.0;            // limit of the wait for other processes when memory changes
  RailPlan rail{};                   // of rank 0, for groups between nodes; all zero where all ranks share NVLink
  std::atomic<bool> checked{false};  // the shapes of this call's buffers are right; they never change
};

struct DispatchPlan : Plan {
  static ffi::TypeId id;
  DispatchParams params{};  // without pointers and rank
  ffi::DataType dtype{};
  bool scaled = false;
};

struct CombinePlan : Plan {
  static ffi::TypeId id;
  CombineParams params{};
  ffi::DataType dtype{};
  bool weighted = false;
};

// A combine whose rows are added by home: cuda_kernels/combine/home.cuh.
struct HomeCombinePlan : CombinePlan {
  static ffi::TypeId id;
};

struct ExchangePlan : Plan {
  static ffi::TypeId id;
  ExchangeParams params{};
  bool ragged = false;
};

// An exchange whose rows a table names: move_weights.
struct MovePlan : ExchangePlan {
  static ffi::TypeId id;
};

// An all_gather_matmul: its exchange, in rounds, and the matmul of a rank's rows by `depth x columns` weights.
struct GatherMatmulPlan : ExchangePlan {
  static ffi::TypeId id;
  int depth = 0, columns = 0;
  uint64_t workspace_bytes = 0;  // of cuBLAS's own workspace
};

// Fills a plan but for its workspace, from attributes alone: also for size hints, which need no device. Throws
// MemoryError where the attributes are no operation that the kernels run.
void Decode(const Attributes& attributes, DispatchPlan* plan);
void Decode(const Attributes& attributes, CombinePlan* plan);
void Decode(const Attributes& attributes, HomeCombinePlan* plan);
void Decode(const Attributes& attributes, ExchangePlan* plan);
void Decode(const Attributes& attributes, MovePlan* plan);
void Decode(const Attributes& attributes, GatherMatmulPlan* plan);

ffi::Error ToError(const MemoryError& e);

uint32_t NextCallId();
// Returns the workspace that serves `plan`, with enough memory: memory is made and GPUs are asked here, not in every
// call. `blocks`: thread blocks of the operation.
std::shared_ptr<Workspace> PrepareWorkspace(const Plan& plan, std::vector<DeviceKey> devices, int ranks,
                                            const Needs& needs, int blocks);
// Fills Descriptor::site and the signature. Devices of one process share the plan, so its own number tells it from
// every other; between processes it is the number that Python gave the call.
void NameSite(const Plan& plan, int ranks, Call* call);

inline int RanksOf(const DispatchParams& p) { return p.routing.ranks; }
inline int RanksOf(const CombineParams& p) { return p.routing.ranks; }
inline int RanksOf(const ExchangeParams& p) { return p.ranks; }
inline int BlocksOf(const DispatchParams& p) { return p.schedule.blocks; }
inline int BlocksOf(const CombineParams& p) { return p.schedule.blocks; }
inline int BlocksOf(const ExchangeParams& p) { return ExchangeBlocks(p); }

// The instantiate stage of every handler.
template <class P>
ffi::ErrorOr<std::unique_ptr<P>> MakePlan(ffi::Dictionary dictionary) {
  auto plan = std::make_unique<P>();
  try {
    const Attributes attributes([&](const char* name) { return dictionary.get<int64_t>(name); });
    Decode(attributes, plan.get());
    auto devices = dictionary.get<ffi::Span<const int64_t>>("devices");
    if (!devices.has_value()) Refuse("attribute devices is missing");
    plan->params.call.call_id = NextCallId();
    if (const char* unfit = Unfit(plan->params)) Refuse(std::string("the kernels cannot run these sizes: ") + unfit);
    if (!Registry::Get().KnowsJob()) return plan;
    auto& params = plan->params;
    plan->workspace = PrepareWorkspace(*plan, std::vector<DeviceKey>(devices->begin(), devices->end()), RanksOf(params),
                                       params.call.needs, BlocksOf(params));
    NameSite(*plan, RanksOf(params), &params.call);
  } catch (const MemoryError& e) {
    return ffi::Unexpected(ToError(e));
  }
  return plan;
}

// Returns success, or an error that names the buffer and says what it is and what it must be.
ffi::Error CheckBuffer(const char* name, ffi::DataType given, ffi::Span<const int64_t> given_dims, ffi::DataType dtype,
                       const std::vector<int64_t>& dims);

struct Expected {
  template <class Buffer>
  Expected(const char* name, const Buffer& buffer, ffi::DataType dtype, std::vector<int64_t> shape)
      : name(name), given(buffer.element_type()), dims(buffer.dimensions()), dtype(dtype), shape(std::move(shape)) {}
  const char* name;
  ffi::DataType given;
  ffi::Span<const int64_t> dims;
  ffi::DataType dtype;
  std::vector<int64_t> shape;
};
// Checks the buffers of a call when it runs for the first time: their shapes never change.
template <class MakeExpected>
ffi::Error CheckOnce(Plan* plan, MakeExpected expected) {
  if (plan->checked.load(std::memory_order_acquire)) return ffi::Error::Success();
  for (const Expected& e : expected()) {
    if (ffi::Error error = CheckBuffer(e.name, e.given, e.dims, e.dtype, e.shape); !error.success()) return error;
  }
  plan->checked.store(true, std::memory_order_release);
  return ffi::Error::Success();
}

// Returns the member that runs on this device, with its memory ready, or an error. The caller holds `*launching` until
// it has launched the kernel.
ffi::ErrorOr<const Member*> Enter(const Plan& plan, const Needs& needs, int32_t ordinal, cudaStream_t stream,
                                  int64_t run, std::shared_lock<std::shared_mutex>* launching);
ffi::Error Launched(int32_t ordinal, int code);

// Returns `error`, with which `run` ends on this device. XLA then frees the memory that the run's flights still write,
// so this makes `stream` wait for them first.
ffi::Error EndRun(int32_t ordinal, cudaStream_t stream, ffi::RunId run, const ffi::Error& error);

// Sets the fields of `call` that depend on the member that launches it, and how its kernel shows that it has begun.
inline void Bind(Call* call, const Member& member, const Beginning& beginning) {
  call->control = member.control;
  call->mailbox = member.mailbox;
  call->begun = beginning.word;
  call->begin = beginning.number;
}

// Calls `launch(member, stream, beginning)` for the member that runs on this device, once its memory is ready and its
// group has not failed. `result`: the first result, by which the done half finds a flight.
template <class Launch>
ffi::Error RunOn(const Plan& plan, const Needs& needs, int32_t ordinal, cudaStream_t stream, ffi::RunId run,
                 const void* result, Launch launch) {
  const auto failed = [&](const ffi::Error& error) { return EndRun(ordinal, stream, run, error); };
  std::shared_lock<std::shared_mutex> launching;
  ffi::ErrorOr<const Member*> member = Enter(plan, needs, ordinal, stream, run.run_id, &launching);
  if (!member.has_value()) return failed(member.error());
  if (!plan.flight) {
    const ffi::Error error = Launched(ordinal, launch(**member, stream, Beginning{}));
    return error.success() ? error : failed(error);
  }
  try {
    Flights& flights = Flights::Get();
    const std::lock_guard<std::mutex> together(flights.launching(ordinal));
    const Takeoff takeoff = flights.Fork(&CudaDevices(), ordinal, stream, result, run.run_id);
    const int code = launch(**member, static_cast<cudaStream_t>(takeoff.stream), takeoff.beginning);
    if (ffi::Error e = Launched(ordinal, code); !e.success()) return failed(e);
    flights.Started(&CudaDevices(), ordinal, stream, result, run.run_id, takeoff);
  } catch (const MemoryError& e) {
    return failed(ToError(e));
  }
  return ffi::Error::Success();
}

}  // namespace xen_moe
