// xen_moe_jax._cuda: FFI targets, limits, and the workspaces' controls. Importing it needs no GPU and no driver.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <type_traits>

#include "ffi/handlers.h"
#include "ffi/memory_bindings.h"
#include "ffi/operation.h"

namespace nb = nanobind;

namespace xen_moe {
namespace {

template <class Handler>
nb::capsule Target(Handler* handler) {
  static_assert(std::is_invocable_r_v<XLA_FFI_Error*, Handler, XLA_FFI_CallFrame*>, "not an FFI handler");
  return nb::capsule(reinterpret_cast<void*>(handler));
}
template <class State>
nb::dict StateType() {
  static auto info = ffi::MakeTypeInfo<State>();
  nb::dict d;
  d["type_id"] = nb::capsule(static_cast<void*>(&State::id));
  d["type_info"] = nb::capsule(static_cast<void*>(&info));
  return d;
}
template <class Instantiate, class Execute>
nb::dict Stages(Instantiate* instantiate, Execute* execute) {
  nb::dict d;
  d["instantiate"] = Target(instantiate);
  d["execute"] = Target(execute);
  return d;
}

// Staging bytes per rank of an operation with these attributes.
template <class P>
uint64_t StagingBytes(nb::dict attributes) {
  try {
    P plan;
    Decode(Attributes([&](const char* name) -> ffi::ErrorOr<int64_t> {
             if (!attributes.contains(name)) return ffi::Unexpected(ffi::Error::InvalidArgument(name));
             return nb::cast<int64_t>(attributes[name]);
           }),
           &plan);
    const Needs& needs = plan.params.call.needs;
    const auto up = [](uint64_t x) { return (x + 255) / 256 * 256; };
    return 2 * (up(needs.flag_bytes) + up(needs.data_bytes));
  } catch (const MemoryError& e) {
    throw std::runtime_error(e.message);
  }
}

template <size_t N>
nb::tuple Names(const char* const (&names)[N]) {
  nb::list out;
  for (const char* name : names) out.append(name);
  return nb::tuple(out);
}

}  // namespace
}  // namespace xen_moe

NB_MODULE(_cuda, m) {
  using namespace xen_moe;
  m.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("cudart_version") = CUDART_VERSION;
  // What Python must know of the kernels: here and nowhere else.
  m.attr("max_ranks") = kMaxRanks;
  m.attr("max_top_k") = kMaxSlots;
  m.attr("max_experts") = kMaxExperts;
  m.attr("max_blocks") = kMaxBlocks;
  m.attr("max_parts") = kMaxParts;
  m.attr("max_channels") = kMaxChannels;
  m.attr("warps") = kWarps;
  m.attr("scale_block") = kScaleBlock;
  m.attr("solo_layout_bytes") = SoloLayoutLimit();
  m.attr("dtypes") = Names(kDtypeNames);  // an attribute is the index
  m.attr("wires") = Names(kWireNames);    // "": none
  m.attr("layouts") = Names(kLayoutNames);
  m.def("device_count", [] {
    int n = 0;
    return cudaGetDeviceCount(&n) == cudaSuccess ? n : 0;
  });
  m.def("types", [] {
    nb::dict d;
    d["xen_moe_dispatch_plan"] = StateType<DispatchPlan>();
    d["xen_moe_combine_plan"] = StateType<CombinePlan>();
    d["xen_moe_exchange_plan"] = StateType<ExchangePlan>();
    return d;
  });
  m.def("targets", [] {
    nb::dict d;
    d["xen_moe_dispatch"] = Stages(kDispatchInstantiate, kDispatch);
    d["xen_moe_redispatch"] = Stages(kDispatchInstantiate, kRedispatch);
    d["xen_moe_combine"] = Stages(kCombineInstantiate, kCombine);
    d["xen_moe_dispatch_start"] = Stages(kDispatchInstantiate, kDispatchStart);
    d["xen_moe_redispatch_start"] = Stages(kDispatchInstantiate, kRedispatchStart);
    d["xen_moe_combine_start"] = Stages(kCombineInstantiate, kCombineStart);
    nb::dict done;
    done["execute"] = Target(kDone);
    d["xen_moe_done"] = done;
    d["xen_moe_exchange"] = Stages(kExchangeInstantiate, kExchange);
    return d;
  });
  m.def("dispatch_staging_bytes", &StagingBytes<DispatchPlan>);
  BindMemory(m, &CudaDevices());
}
