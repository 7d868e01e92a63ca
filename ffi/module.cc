// xen_moe_jax._cuda: FFI targets and the workspaces' controls. Importing it needs no GPU and no driver.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <type_traits>

#include "ffi/handlers.h"
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

template <class F>
auto Translated(F f) {
  try {
    return f();
  } catch (const MemoryError& e) {
    throw std::runtime_error(e.message);
  }
}

// Staging bytes per rank of an operation with these attributes.
template <class Plan, class Decode>
uint64_t StagingBytes(nb::dict attributes, Decode decode) {
  return Translated([&] {
    Plan plan;
    decode(Attributes([&](const char* name) -> ffi::ErrorOr<int64_t> {
             if (!attributes.contains(name)) return ffi::Unexpected(ffi::Error::InvalidArgument(name));
             return nb::cast<int64_t>(attributes[name]);
           }),
           &plan);
    const auto up = [](uint64_t x) { return (x + 255) / 256 * 256; };
    return 2 * (up(plan.needs.flag_bytes) + up(plan.needs.data_bytes));
  });
}

}  // namespace
}  // namespace xen_moe

NB_MODULE(_cuda, m) {
  using namespace xen_moe;
  m.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("cudart_version") = CUDART_VERSION;
  m.attr("max_ranks") = kMaxRanks;
  m.attr("max_blocks") = kMaxBlocks;
  m.attr("devices_per_process") = kDevicesPerProcess;
  m.def("device_count", [] {
    int n = 0;
    return cudaGetDeviceCount(&n) == cudaSuccess ? n : 0;
  });
  m.def("types", [] {
    nb::dict d;
    d["xen_moe_routing_plan"] = StateType<RoutingPlan>();
    d["xen_moe_exchange_plan"] = StateType<ExchangePlan>();
    return d;
  });
  m.def("targets", [] {
    nb::dict d;
    d["xen_moe_dispatch"] = Stages(kRoutingInstantiate, kDispatch);
    d["xen_moe_redispatch"] = Stages(kRoutingInstantiate, kRedispatch);
    d["xen_moe_combine"] = Stages(kRoutingInstantiate, kCombine);
    d["xen_moe_exchange"] = Stages(kExchangeInstantiate, kExchange);
    return d;
  });
  m.def("configure", [](int process, int num_processes, std::vector<int64_t> devices) {
    Registry::Get().Configure(process, num_processes, std::move(devices));
  });
  m.def("set_provider", [](nb::capsule table) {
    Registry::Get().SetProvider(static_cast<const MemoryProvider*>(table.data("xen_moe_memory_provider")));
  });
  m.def("routing_staging_bytes",
        [](nb::dict attributes) { return StagingBytes<RoutingPlan>(attributes, DecodeRouting); });
  m.def("exchange_staging_bytes",
        [](nb::dict attributes) { return StagingBytes<ExchangePlan>(attributes, DecodeExchange); });
  m.def("reserve", [](std::vector<int64_t> devices, int ranks, int channel, uint64_t bytes) {
    nb::gil_scoped_release nogil;
    Translated([&] {
      Registry::Get().Find(std::move(devices), ranks, channel)->Reserve(bytes);
      return 0;
    });
  });
  m.def("release", [](std::vector<int64_t> devices, int ranks, int channel) {
    nb::gil_scoped_release nogil;
    Translated([&] {
      Registry::Get().Find(std::move(devices), ranks, channel)->Release();
      return 0;
    });
  });
  m.def("reset", [] {
    nb::gil_scoped_release nogil;
    Translated([] {
      Registry::Get().ResetAll();
      return 0;
    });
  });
  m.def("release_all", [] {
    nb::gil_scoped_release nogil;
    Translated([] {
      Registry::Get().ReleaseAll();
      return 0;
    });
  });
  m.def("workspaces", [] {
    nb::list out;
    for (const auto& workspace : Registry::Get().All()) {
      nb::dict d;
      d["ranks"] = workspace->ranks();
      d["channel"] = workspace->channel();
      d["devices"] = workspace->devices();
      d["staging_bytes"] = workspace->staging_bytes();
      d["scratch_bytes"] = workspace->scratch_bytes();
      out.append(d);
    }
    return out;
  });
}
