// xen_moe_jax._cuda: the FFI targets, the kernels' limits and the functions that control workspaces. Importing the
// module needs no GPU and no driver.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string_view>
#include <type_traits>

#include "cuda_kernels/core/cuda_error.h"
#include "cuda_kernels/low_latency/ll128_plan.h"
#include "ffi/cublas.h"
#include "ffi/handlers.h"
#include "ffi/memory_bindings.h"
#include "ffi/nccl_link.h"
#include "ffi/nccl_memory.h"
#include "ffi/operation.h"

namespace nb = nanobind;
using namespace nb::literals;

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

// Returns the staging bytes per rank that operations with these attributes share, a dispatch, a redispatch or a
// combine, whether or not each of them has a kernel of its own on the only rank of a group (core/alone.h). With
// low_latency = 1, both the low-latency kernels and the other ones can run them in that many bytes.
template <class P>
uint64_t StagingBytes(nb::dict attributes) {
  Needs most;
  const auto up = [](uint64_t x) { return (x + 255) / 256 * 256; };
  try {
    const bool low_latency = attributes.contains("low_latency") && nb::cast<int64_t>(attributes["low_latency"]) != 0;
    for (int64_t low = 0; low <= static_cast<int64_t>(low_latency); ++low) {
      P plan;
      Decode(Attributes([&](const char* name) -> ffi::ErrorOr<int64_t> {
               if (std::string_view(name) == "low_latency") return low;
               if (low && std::string_view(name) == "wire") return int64_t{0};  // they send rows as they are
               if (std::string_view(name) == "site") return int64_t{0};
               if (!attributes.contains(name)) return ffi::Unexpected(ffi::Error::InvalidArgument(name));
               const int64_t value = nb::cast<int64_t>(attributes[name]);
               // Between nodes the low-latency kernels send as few chunks as possible.
               return low && value && std::string_view(name) == "chunk_tokens" ? int64_t{kChunkTokens} : value;
             }),
             &plan);
      const Staging& staging = plan.params.staging;
      most.flag_bytes = std::max(most.flag_bytes, up(staging.flag_bytes));
      most.data_bytes = std::max(most.data_bytes, up(staging.data_bytes));
    }
  } catch (const MemoryError& e) {
    throw std::runtime_error(e.message);
  }
  return 2 * (most.flag_bytes + most.data_bytes);
}

// Returns "", or why the low-latency kernels do not take a dispatch (`combine`: a combine) of these shapes.
std::string NoLowLatency(bool combine, int ranks, int ranks_per_node, int tokens, int top_k, int experts, int hidden,
                         int layout, int dtype, int wire, int chunk_tokens) {
  Routing r{};
  r.ranks = ranks, r.ranks_per_node = ranks_per_node, r.tokens = tokens, r.top_k = top_k, r.experts = experts;
  r.local_experts = (experts + ranks - 1) / ranks, r.hidden = hidden, r.layout = static_cast<Layout>(layout);
  const Element element = dtype > static_cast<int>(Element::kF32) ? Element::kByte : static_cast<Element>(dtype);
  const Operation operation = combine ? Operation::kCombine : Operation::kDispatch;
  const char* why = WhyNotLowLatency(r, operation, element, static_cast<WireType>(wire), chunk_tokens);
  return why ? why : "";
}

// Returns "", or why no kernel combines rows of these shapes by home.
std::string NoHomeCombine(int ranks, int ranks_per_node, int hidden, int layout) {
  Routing r{};
  r.ranks = ranks, r.ranks_per_node = ranks_per_node, r.hidden = hidden, r.layout = static_cast<Layout>(layout);
  const char* why = WhyNotByHome(r, WireType::kNative, false, 0);
  return why ? why : "";
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
  // The limits and names of the kernels. Python has no others.
  m.attr("max_ranks") = kMaxRanks;
  m.attr("max_nodes") = kMaxNodes;
  m.attr("max_top_k") = kMaxSlots;
  m.attr("max_experts") = kMaxExperts;
  m.attr("max_chunks") = kMaxChunks;
  m.attr("max_chunk_tokens") = kChunkTokens;
  m.attr("max_blocks") = kMaxBlocks;
  m.attr("warps") = kWarps;
  m.attr("block_lanes") = kBlockLanes;
  m.attr("max_gather_bytes") = kMostGatherRounds * kRoundData;  // of an operand, by the low-latency kernels
  m.attr("solo_layout_bytes") = SoloLayoutLimit();
  m.attr("dtypes") = Names(kDtypeNames);  // an attribute holds the index of a name
  m.attr("wires") = Names(kWireNames);    // "": no wire format
  m.attr("layouts") = Names(kLayoutNames);
  m.def("device_count", [] {
    int n = 0;
    return Taken(cudaGetDeviceCount(&n)) == cudaSuccess ? n : 0;
  });
  m.def("types", [] {
    nb::dict d;
    d["xen_moe_dispatch_plan"] = StateType<DispatchPlan>();
    d["xen_moe_combine_plan"] = StateType<CombinePlan>();
    d["xen_moe_home_combine_plan"] = StateType<HomeCombinePlan>();
    d["xen_moe_move_plan"] = StateType<MovePlan>();
    d["xen_moe_exchange_plan"] = StateType<ExchangePlan>();
    d["xen_moe_gather_matmul_plan"] = StateType<GatherMatmulPlan>();
    return d;
  });
  m.def("targets", [] {
    nb::dict d;
    d["xen_moe_dispatch"] = Stages(kDispatchInstantiate, kDispatch);
    d["xen_moe_redispatch"] = Stages(kDispatchInstantiate, kRedispatch);
    d["xen_moe_combine"] = Stages(kCombineInstantiate, kCombine);
    d["xen_moe_combine_at_home"] = Stages(kHomeCombineInstantiate, kHomeCombine);
    d["xen_moe_dispatch_start"] = Stages(kDispatchInstantiate, kDispatchStart);
    d["xen_moe_combine_start"] = Stages(kCombineInstantiate, kCombineStart);
    nb::dict done;
    done["execute"] = Target(kDone);
    d["xen_moe_done"] = done;
    d["xen_moe_exchange"] = Stages(kExchangeInstantiate, kExchange);
    d["xen_moe_move_weights"] = Stages(kMoveInstantiate, kMove);
    d["xen_moe_move_weights_start"] = Stages(kMoveInstantiate, kMoveStart);
    nb::dict rows;
    rows["execute"] = Target(kQuantizedRows);
    d["xen_moe_quantized_rows"] = rows;
    d["xen_moe_gather_matmul"] = Stages(kGatherMatmulInstantiate, kGatherMatmul);
    return d;
  });
  m.def("set_cublas", &SetCublas, "path"_a);
  m.def("no_low_latency", &NoLowLatency, "combine"_a, "ranks"_a, "ranks_per_node"_a, "num_tokens"_a, "top_k"_a,
        "num_experts"_a, "hidden"_a, "layout"_a, "dtype"_a, "wire"_a, "chunk_tokens"_a);
  m.def("no_home_combine", &NoHomeCombine, "ranks"_a, "ranks_per_node"_a, "hidden"_a, "layout"_a);
  m.def("dispatch_staging_bytes", &StagingBytes<DispatchPlan>);
  m.def("home_combine_staging_bytes", &StagingBytes<HomeCombinePlan>);
  BindMemory(m, &CudaDevices(), NcclLinkKernels());
  // For groups between nodes. `nccl_headers`: the version of the headers with which the kernels were compiled; 0 where
  // there are no such kernels. `nccl_ranks_per_node`: how many processes share NVLink, once NCCL has been started; 0
  // where there are no such kernels.
  m.attr("nccl_headers") = NcclLinkHeaders();
  m.def("nccl_ranks_per_node", [] { return WithoutGil([] { return NcclRanksPerNode(); }); });
  BindNccl(m, &CudaDevices(), NcclProvider());
  BindIpc(m);
}
