// From XLA's attributes and buffers to the kernels' Params: decoding, checking, sizes. One Plan per custom call, made
// when the executable is instantiated.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda_kernels/params.h"
#include "ffi/symmetric_memory.h"
#include "xla/ffi/api/ffi.h"

namespace xen_moe {

namespace ffi = xla::ffi;

// The static half of a dispatch, redispatch or combine.
struct RoutingPlan {
  static ffi::TypeId id;
  std::shared_ptr<Workspace> workspace;
  Needs needs;
  Routing routing{};
  Staging staging{};
  Schedule schedule{};
  Element element{};
  ffi::DataType dtype{};
  WireType wire{};
  bool ue8m0 = false, scaled = false, weighted = false, known_positions = false;
};

// The static half of an all_to_all or ragged_all_to_all.
struct ExchangePlan {
  static ffi::TypeId id;
  std::shared_ptr<Workspace> workspace;
  Needs needs;
  ExchangeParams params{};  // without pointers and rank
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

void DecodeRouting(const Attributes& attributes, RoutingPlan* plan);
void DecodeExchange(const Attributes& attributes, ExchangePlan* plan);

// Makes the workspace serve the plan.
std::shared_ptr<Workspace> PrepareWorkspace(std::vector<DeviceKey> devices, int ranks, int channel, const Needs& needs,
                                            int blocks);

// Runs `launch(member)` on the member of this device, with the memory ready and earlier failures reported.
ffi::Error RunOn(Workspace& workspace, const Needs& needs, int32_t ordinal, cudaStream_t stream,
                 const std::function<int(const Member&)>& launch);

ffi::Error ToError(const MemoryError& e);
std::string Shape(ffi::AnyBuffer::Dimensions dims);
// Success, or an error that names the buffer, what it is and what it must be.
ffi::Error CheckBuffer(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType dtype,
                       const std::vector<int64_t>& dims);

}  // namespace xen_moe
