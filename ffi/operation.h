// From XLA's attributes and buffers to the kernels' Params: decoding, checking, sizes. One plan per custom call, made
// when the executable is instantiated; it holds everything that does not change from call to call.
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
#include "ffi/flights.h"
#include "ffi/symmetric_memory.h"
#include "xla/ffi/api/ffi.h"

namespace xen_moe {

namespace ffi = xla::ffi;

// What Python writes into attributes; exported to it by ffi/module.cc.
constexpr ffi::DataType kDtypes[] = {ffi::DataType::BF16,     ffi::DataType::F16, ffi::DataType::F32,
                                     ffi::DataType::F8E4M3FN, ffi::DataType::S8,  ffi::DataType::F8E5M2};
constexpr const char* kDtypeNames[] = {"bfloat16", "float16", "float32", "float8_e4m3fn", "int8", "float8_e5m2"};
constexpr const char* kWireNames[] = {"", "float8_e4m3fn", "int8"};
constexpr const char* kLayoutNames[] = {"grouped", "ranked", "padded"};
constexpr int kNumDtypes = static_cast<int>(std::size(kDtypes));
constexpr int kMaxChannels = 16;

// The static half of every operation.
struct Plan {
  std::shared_ptr<Workspace> workspace;  // null: compiled where there is no GPU, to be saved
  bool flight = false;                   // a start, that another call finishes
  double timeout_s = 0.0;                // for memory to be agreed on
  bool masked = false;                   // it is told which ranks take part
  RailPlan rail{};                       // between nodes, as rank 0's; no nodes: all ranks share NVLink
  std::atomic<bool> checked{false};      // the buffers of this call site: their shapes never change
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

struct ExchangePlan : Plan {
  static ffi::TypeId id;
  ExchangeParams params{};
  bool ragged = false;
};

// Attributes as Python wrote them, without the parts that need a device: also used for size hints.
class Attributes {
 public:
  using Lookup = std::function<ffi::ErrorOr<int64_t>(const char*)>;
  explicit Attributes(Lookup lookup) : lookup_(std::move(lookup)) {}
  // Throws MemoryError when absent or outside [low, high].
  int64_t Int(const char* name, int64_t low, int64_t high) const;

 private:
  Lookup lookup_;
};

void Decode(const Attributes& attributes, DispatchPlan* plan);
void Decode(const Attributes& attributes, CombinePlan* plan);
void Decode(const Attributes& attributes, ExchangePlan* plan);

ffi::Error ToError(const MemoryError& e);

// The workspace that serves a plan of these needs; memory is made and GPUs are asked here, not in every call.
// `ranks_per_node`: of kernels across nodes; 0: all ranks share NVLink.
std::shared_ptr<Workspace> PrepareWorkspace(const Attributes& attributes, std::vector<DeviceKey> devices, int ranks,
                                            int ranks_per_node, const Needs& needs, int blocks, double seconds,
                                            bool flight, bool masked);
uint32_t NextCallId();
// Descriptor::site and what follows from it. Devices of one process share the plan, so its own number tells it from
// every other; between processes it is the number that Python gave the call.
void NameSite(const Attributes& attributes, const Workspace& workspace, int ranks, Call* call);

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
    plan->workspace = PrepareWorkspace(attributes, std::vector<DeviceKey>(devices->begin(), devices->end()),
                                       RanksOf(plan->params), plan->rail.per_node, plan->params.call.needs,
                                       BlocksOf(plan->params), plan->timeout_s, plan->flight, plan->masked);
    NameSite(attributes, *plan->workspace, RanksOf(plan->params), &plan->params.call);
  } catch (const MemoryError& e) {
    return ffi::Unexpected(ToError(e));
  }
  return plan;
}

// Success, or an error that names the buffer, what it is and what it must be.
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
// At the first call of a call site: the shapes of its buffers never change.
template <class MakeExpected>
ffi::Error CheckOnce(Plan* plan, MakeExpected expected) {
  if (plan->checked.load(std::memory_order_acquire)) return ffi::Error::Success();
  for (const Expected& e : expected()) {
    if (ffi::Error error = CheckBuffer(e.name, e.given, e.dims, e.dtype, e.shape); !error.success()) return error;
  }
  plan->checked.store(true, std::memory_order_release);
  return ffi::Error::Success();
}

// The member of this device, ready to launch on, or an error. `*launching` is held until the launch is made.
ffi::ErrorOr<const Member*> Enter(const Plan& plan, const Needs& needs, int32_t ordinal, cudaStream_t stream,
                                  int64_t run, std::shared_lock<std::shared_mutex>* launching);
ffi::Error Launched(int32_t ordinal, int code);

// `error`, with which `run` ends here: XLA then frees the memory that its flights still write to, so `stream` waits for
// them first.
ffi::Error EndRun(int32_t ordinal, cudaStream_t stream, ffi::RunId run, const ffi::Error& error);

// What a call takes from the group's member that launches it, and how it shows that it has begun.
inline void Bind(Call* call, const Member& member, const Beginning& beginning) {
  call->control = member.control;
  call->mailbox = member.mailbox;
  call->begun = beginning.word;
  call->begin = beginning.number;
}

// Runs `launch(member, stream, beginning)` on the member of this device, with the memory ready and earlier failures
// reported. `result`: the first of its results, by which the done half finds a flight.
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
