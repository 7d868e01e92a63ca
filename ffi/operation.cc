#include "ffi/operation.h"

#include <algorithm>
#include <limits>

#include "cuda_kernels/core/cuda_error.h"

namespace xen_moe {

ffi::TypeId DispatchPlan::id = {};
ffi::TypeId CombinePlan::id = {};
ffi::TypeId HomeCombinePlan::id = {};
ffi::TypeId ExchangePlan::id = {};
ffi::TypeId MovePlan::id = {};
ffi::TypeId GatherMatmulPlan::id = {};

namespace {

// All integer attributes: name, field, smallest and largest value. call.py, collectives.py and gather_matmul.py in
// xen_moe_jax/backends/cuda/ write them; a bool is 0 or 1.
constexpr int64_t kIntMax = std::numeric_limits<int32_t>::max();
constexpr int64_t kInt64Max = std::numeric_limits<int64_t>::max();

constexpr Attribute<Routing> kRoutingAttributes[] = {
    {"ranks", &Routing::ranks, 1, kMaxRanks},
    {"num_tokens", &Routing::tokens, 1, 1 << 24},
    {"top_k", &Routing::top_k, 1, kMaxSlots},
    {"num_experts", &Routing::experts, 1, kMaxExperts},
    {"hidden", &Routing::hidden, 1, 1 << 24},
    {"capacity", &Routing::capacity, 1, kIntMax},
    {"alignment", &Routing::alignment, 1, 1 << 20},
    {"layout", &Routing::layout, 0, 2},
    {"ranks_per_node", &Routing::ranks_per_node, 1, kMaxRanks},
};

constexpr Attribute<Schedule> kScheduleAttributes[] = {
    {"blocks", &Schedule::blocks, 1, kMaxBlocks},
    {"push_blocks", &Schedule::push_blocks, 1, kMaxBlocks},
    {"layout_blocks", &Schedule::layout_blocks, 1, kMaxBlocks},
    {"parts", &Schedule::parts, 1, kMaxParts},
    {"segment_tokens", &Schedule::segment_tokens, 1, 1 << 20},
    {"solo_layout", &Schedule::solo_layout},
    {"low_latency", &Schedule::low_latency},
    {"bulk", &Schedule::bulk},
    {"chunk_tokens", &Schedule::chunk_tokens, 0, kChunkTokens},
};

constexpr Attribute<Call> kCallAttributes[] = {
    {"timeout_ns", &Call::timeout_ns, 0, kInt64Max},
};

// DispatchParams or CombineParams.
template <class Params>
constexpr Attribute<Params> kWireAttributes[] = {
    {"wire", &Params::wire, 0, 3},
    {"ue8m0", &Params::ue8m0},
};

constexpr Attribute<ExchangeParams> kExchangeAttributes[] = {
    {"ranks", &ExchangeParams::ranks, 1, kMaxRanks},
    {"gather", &ExchangeParams::gather},
    {"low_latency", &ExchangeParams::low_latency},
    {"lanes", &ExchangeParams::lanes, 1, kMaxBlocks * kBlockLanes},
    {"poison", &ExchangeParams::poison, 0, 255},
    {"chunk_bytes", &ExchangeParams::chunk_bytes, 256, 1 << 24},
    {"ring_chunks", &ExchangeParams::ring_chunks, 1, 1 << 20},
    {"unit_bytes", &ExchangeParams::unit_bytes, 1, int64_t{1} << 40},
    {"operand_units", &ExchangeParams::operand_units, 0, kIntMax},
    {"output_units", &ExchangeParams::output_units, 0, kIntMax},
};

// `site` belongs to the call and not to the operation: size hints give 0.
constexpr Attribute<Plan> kPlanAttributes[] = {
    {"channel", &Plan::channel, 0, kMaxChannels - 1},
    {"site", &Plan::site, 0, std::numeric_limits<uint32_t>::max()},
};
// Attributes of dispatch and combine.
constexpr Attribute<Plan> kRoutedPlanAttributes[] = {
    {"dtype", &Plan::dtype_code, 0, kNumDtypes - 1},
    {"flight", &Plan::flight},
    {"masked", &Plan::masked},
};
constexpr Attribute<DispatchPlan> kDispatchPlanAttributes[] = {{"scaled", &DispatchPlan::scaled}};
constexpr Attribute<DispatchParams> kDispatchAttributes[] = {{"known_positions", &DispatchParams::known_positions}};
constexpr Attribute<CombinePlan> kCombinePlanAttributes[] = {{"weighted", &CombinePlan::weighted}};
constexpr Attribute<Plan> kMovePlanAttributes[] = {{"flight", &Plan::flight}, {"masked", &Plan::masked}};
constexpr Attribute<ExchangeParams> kMoveAttributes[] = {{"lost", &ExchangeParams::lost, 0, 255}};
constexpr Attribute<ExchangePlan> kExchangePlanAttributes[] = {{"ragged", &ExchangePlan::ragged}};
constexpr Attribute<GatherMatmulPlan> kGatherMatmulAttributes[] = {
    {"dtype", &Plan::dtype_code, 0, 1},
    {"depth", &GatherMatmulPlan::depth, 1, kIntMax},
    {"columns", &GatherMatmulPlan::columns, 1, kIntMax},
    {"workspace_bytes", &GatherMatmulPlan::workspace_bytes, 0, 1 << 30},
};

void CheckAtMost(const char* name, int value, const char* limit_name, int limit) {
  if (value <= limit) return;
  Refuse(std::string("attribute ") + name + " = " + std::to_string(value) + ": must be at most " +
         std::to_string(limit) + ", which is " + limit_name);
}

void DecodeRouting(const Attributes& attributes, Routing* r) {
  attributes.Decode(kRoutingAttributes, r);
  CheckAtMost("ranks_per_node", r->ranks_per_node, "ranks", r->ranks);
  r->local_experts = (r->experts + r->ranks - 1) / r->ranks;
  r->slots = r->layout == Layout::kRanked ? 1 : r->top_k;
  if (static_cast<int64_t>(r->ranks) * r->tokens * r->top_k > kIntMax) {
    Refuse("num_tokens * top_k * ranks = " + std::to_string(static_cast<int64_t>(r->ranks) * r->tokens * r->top_k) +
           ": must be below 2^31; split the batch");
  }
}

void DecodeSchedule(const Attributes& attributes, const Routing& r, Schedule* s) {
  attributes.Decode(kScheduleAttributes, s);
  CheckAtMost("push_blocks", s->push_blocks, "blocks", s->blocks);
  CheckAtMost("layout_blocks", s->layout_blocks, "blocks", s->blocks);
  s->part_elements = ((r.hidden + s->parts - 1) / s->parts + 255) / 256 * 256;
  if (s->solo_layout && SoloLayoutBytes(r, *s) > SoloLayoutLimit()) {
    Refuse("attribute solo_layout = 1: positions need " + std::to_string(SoloLayoutBytes(r, *s)) +
           " bytes of shared memory; at most " + std::to_string(SoloLayoutLimit()));
  }
}

// Plans the chunks that cross between nodes, and adds their memory to the staging memory.
template <class P>
void DecodeRail(Operation operation, P* plan) {
  auto& p = plan->params;
  if (p.routing.ranks % p.routing.ranks_per_node != 0) {
    Refuse("attribute ranks_per_node = " + std::to_string(p.routing.ranks_per_node) + ": must divide the " +
           std::to_string(p.routing.ranks) + " ranks");
  }
  plan->rail = PlanRail(p.routing, operation, p.schedule.chunk_tokens, p.schedule, plan->masked, &p.staging);
  if (const char* why = UnfitRail(p.call, p.routing, p.schedule, plan->rail)) {
    Refuse(std::string("the kernels across nodes do not take this operation: ") + why);
  }
}

constexpr double kAgreementSeconds = 600.0;  // for other processes, where the operation itself would wait for ever

void DecodeCall(const Attributes& attributes, Plan* plan, Call* call) {
  attributes.Decode(kPlanAttributes, plan);
  attributes.Decode(kCallAttributes, call);
  plan->timeout_s = call->timeout_ns == 0 ? kAgreementSeconds : static_cast<double>(call->timeout_ns) * 1e-9;
}

// The attributes that dispatch and combine share.
template <class P>
void DecodeShared(const Attributes& attributes, Operation operation, bool scaled, P* plan) {
  auto& p = plan->params;
  DecodeCall(attributes, plan, &p.call);
  DecodeRouting(attributes, &p.routing);
  DecodeSchedule(attributes, p.routing, &p.schedule);
  attributes.Decode(kWireAttributes<std::decay_t<decltype(p)>>, &p);
  attributes.Decode(kRoutedPlanAttributes, static_cast<Plan*>(plan));
  plan->dtype = kDtypes[plan->dtype_code];
  p.element =
      plan->dtype_code > static_cast<int>(Element::kF32) ? Element::kByte : static_cast<Element>(plan->dtype_code);
  if (p.element == Element::kByte && p.wire != WireType::kNative) Refuse("a one-byte dtype takes no wire format");
  if (p.schedule.low_latency) {
    if (const char* why = WhyNotLowLatency(p.routing, operation, p.element, p.wire, p.schedule.chunk_tokens)) {
      Refuse(std::string("attribute low_latency = 1: these kernels do not take this operation: ") + why);
    }
    p.staging = PlanLowLatency(p.routing, operation, p.element, scaled);
  } else {
    p.staging = PlanStaging(p.routing, p.schedule, p.element, p.wire, scaled);
  }
  if (p.schedule.chunk_tokens > 0) DecodeRail(operation, plan);
}

std::string Shape(ffi::Span<const int64_t> dims) {
  std::string out = "[";
  for (size_t i = 0; i < dims.size(); ++i) out += (i ? "," : "") + std::to_string(dims[i]);
  return out + "]";
}

bool Capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return Taken(cudaStreamIsCapturing(stream, &status)) != cudaSuccess || status != cudaStreamCaptureStatusNone;
}

}  // namespace

void Decode(const Attributes& attributes, DispatchPlan* plan) {
  attributes.Decode(kDispatchPlanAttributes, plan);
  attributes.Decode(kDispatchAttributes, &plan->params);
  const Operation operation = plan->params.known_positions ? Operation::kRedispatch : Operation::kDispatch;
  DecodeShared(attributes, operation, plan->scaled, plan);
  Describe(&plan->params, plan->scaled, static_cast<uint32_t>(plan->dtype_code), 0);
}

void Decode(const Attributes& attributes, CombinePlan* plan) {
  attributes.Decode(kCombinePlanAttributes, plan);
  DecodeShared(attributes, Operation::kCombine, false, plan);
  if (plan->params.element == Element::kByte) Refuse("combine takes bfloat16, float16 or float32 rows");
  if (plan->weighted && plan->params.routing.layout == Layout::kRanked) Refuse("the ranked layout takes weighted = 0");
  Describe(&plan->params, plan->weighted, static_cast<uint32_t>(plan->dtype_code), 0);
}

void Decode(const Attributes& attributes, HomeCombinePlan* plan) {
  Decode(attributes, static_cast<CombinePlan*>(plan));
  CombineParams& p = plan->params;
  if (const char* why = WhyNotByHome(p.routing, p.wire, p.schedule.low_latency, p.schedule.chunk_tokens)) Refuse(why);
  p.by_home = true;
  p.staging = PlanHomeStaging(p.routing, p.schedule, p.element);
  Describe(&p, plan->weighted, static_cast<uint32_t>(plan->dtype_code), 0);
}

void Decode(const Attributes& attributes, ExchangePlan* plan) {
  ExchangeParams& p = plan->params;
  DecodeCall(attributes, plan, &p.call);
  attributes.Decode(kExchangeAttributes, &p);
  attributes.Decode(kExchangePlanAttributes, plan);
  CheckAtMost("lanes", ExchangeBlocks(p), "as many as so many thread blocks have", kMaxBlocks);
  p.chunk_bytes = p.chunk_bytes / 16 * 16;
  PlanExchange(&p, plan->ragged);
  Describe(&p, plan->ragged, 0, 0);
}

void Decode(const Attributes& attributes, MovePlan* plan) {
  Decode(attributes, static_cast<ExchangePlan*>(plan));
  ExchangeParams& p = plan->params;
  attributes.Decode(kMoveAttributes, &p);
  attributes.Decode(kMovePlanAttributes, static_cast<Plan*>(plan));
  p.by_table = true;
  PlanExchange(&p, false);
  Describe(&p, false, 0, 0);
}

void Decode(const Attributes& attributes, GatherMatmulPlan* plan) {
  attributes.Decode(kGatherMatmulAttributes, plan);
  plan->params.round = 0;
  Decode(attributes, static_cast<ExchangePlan*>(plan));
}

uint32_t NextCallId() {
  static std::atomic<uint32_t> next{1};
  uint32_t id = next++;
  return id != 0 ? id : next++;
}

void NameSite(const Plan& plan, int ranks, Call* call) {
  const bool one_process = static_cast<int>(plan.workspace->members().size()) == ranks;
  call->descriptor.site = one_process ? call->call_id : plan.site;
  call->signature = Signature(call->descriptor);
}

std::shared_ptr<Workspace> PrepareWorkspace(const Plan& plan, std::vector<DeviceKey> devices, int ranks,
                                            const Needs& needs, int blocks) {
  // plan.rail.per_node is 0 where all ranks share NVLink.
  std::shared_ptr<Workspace> workspace =
      Registry::Get().Find(std::move(devices), ranks, plan.channel, plan.flight, plan.rail.per_node);
  for (const Member& member : workspace->members()) {
    const int sms = CudaDevices().SmCount(member.ordinal);
    if (blocks > sms) {
      Refuse("KernelConfig.num_sms: " + std::to_string(blocks) + " thread blocks take an SM each, and GPU " +
             std::to_string(member.ordinal) + " has " + std::to_string(sms) + " SMs");
    }
  }
  workspace->EnsureCapacity(needs, plan.timeout_s);
  if (plan.masked) workspace->FailOnlyWhenNeeded();
  return workspace;
}

ffi::ErrorOr<const Member*> Enter(const Plan& plan, const Needs& needs, int32_t ordinal, cudaStream_t stream,
                                  int64_t run, std::shared_lock<std::shared_mutex>* launching) {
  if (plan.workspace == nullptr) {
    return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                                      "xen_moe_jax: the program was compiled in this process before JAX had GPUs here: "
                                      "compile or load it again"));
  }
  Workspace& workspace = *plan.workspace;
  const Member* member = workspace.Find(ordinal);
  if (member == nullptr) {
    return ffi::Unexpected(
        ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                   "xen_moe_jax: the program runs on GPU " + std::to_string(ordinal) +
                       " of this process, which is not in the mesh that it was lowered for. Lower it again under the "
                       "mesh that it runs on"));
  }
  // No error is returned while a graph is captured: it would spoil the executable. An error shows when the graph runs:
  // the kernels find the failure, or that they have no memory.
  const bool capturing = Capturing(stream);
  try {
    if (!workspace.HasCapacity(needs) && !capturing)
      workspace.EnsureCapacity(needs, plan.timeout_s);  // its xm.Buffer closed
    if (workspace.stale() && !capturing) workspace.ReclaimIfStale();
  } catch (const MemoryError& e) {
    return ffi::Unexpected(ToError(e));
  }
  const std::string failure = workspace.Admit(run);
  if (!failure.empty() && !capturing) {
    return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kAborted, failure));
  }
  workspace.launches.fetch_add(1, std::memory_order_relaxed);
  if (capturing) workspace.captured.fetch_add(1, std::memory_order_relaxed);
  *launching = workspace.Launch(needs);
  return member;
}

ffi::Error Launched(int32_t ordinal, int code) {
  if (code == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal("xen_moe_jax: kernel launch on GPU " + std::to_string(ordinal) + ": " +
                              cudaGetErrorString(static_cast<cudaError_t>(code)));
}

ffi::Error EndRun(int32_t ordinal, cudaStream_t stream, ffi::RunId run, const ffi::Error& error) {
  try {
    Flights::Get().Abandon(&CudaDevices(), ordinal, stream, run.run_id);
  } catch (const MemoryError&) {  // the GPU is lost; `error` says why
  }
  return error;
}

ffi::Error ToError(const MemoryError& e) {
  return e.exhausted ? ffi::Error(ffi::ErrorCode::kResourceExhausted, e.message)
                     : ffi::Error::InvalidArgument(e.message);
}

ffi::Error CheckBuffer(const char* name, ffi::DataType given, ffi::Span<const int64_t> given_dims, ffi::DataType dtype,
                       const std::vector<int64_t>& dims) {
  const bool same = given_dims.size() == dims.size() && std::equal(dims.begin(), dims.end(), given_dims.begin());
  if (same && given == dtype) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(std::string("xen_moe_jax: ") + name + " has dtype code " +
                                     std::to_string(static_cast<int>(given)) + " and shape " + Shape(given_dims) +
                                     "; this call needs dtype code " + std::to_string(static_cast<int>(dtype)) +
                                     " and shape " + Shape(ffi::Span<const int64_t>(dims.data(), dims.size())));
}

}  // namespace xen_moe
