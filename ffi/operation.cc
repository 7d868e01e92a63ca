#include "ffi/operation.h"

#include <algorithm>
#include <limits>

namespace xen_moe {

ffi::TypeId DispatchPlan::id = {};
ffi::TypeId CombinePlan::id = {};
ffi::TypeId ExchangePlan::id = {};

namespace {

constexpr int64_t kIntMax = std::numeric_limits<int32_t>::max();
constexpr double kAgreementSeconds = 600.0;  // for other processes, where the operation itself would wait for ever

Routing DecodeRouting(const Attributes& a) {
  Routing r{};
  r.ranks = static_cast<int>(a.Int("ranks", 1, kMaxRanks));
  r.tokens = static_cast<int>(a.Int("num_tokens", 1, 1 << 24));
  r.top_k = static_cast<int>(a.Int("top_k", 1, kMaxSlots));
  r.experts = static_cast<int>(a.Int("num_experts", 1, kMaxExperts));
  r.local_experts = (r.experts + r.ranks - 1) / r.ranks;
  r.hidden = static_cast<int>(a.Int("hidden", 1, 1 << 24));
  r.capacity = static_cast<int>(a.Int("capacity", 1, kIntMax));
  r.alignment = static_cast<int>(a.Int("alignment", 1, 1 << 20));
  r.layout = static_cast<Layout>(a.Int("layout", 0, 2));
  r.slots = r.layout == Layout::kRanked ? 1 : r.top_k;
  r.ranks_per_node = static_cast<int>(a.Int("ranks_per_node", 1, r.ranks));
  if (static_cast<int64_t>(r.ranks) * r.tokens * r.top_k > kIntMax) {
    Refuse("num_tokens * top_k * ranks = " + std::to_string(static_cast<int64_t>(r.ranks) * r.tokens * r.top_k) +
           ": must be below 2^31; split the batch");
  }
  return r;
}

Schedule DecodeSchedule(const Attributes& a, const Routing& r) {
  Schedule s{};
  s.blocks = static_cast<int>(a.Int("blocks", 1, kMaxBlocks));
  s.push_blocks = static_cast<int>(a.Int("push_blocks", 1, s.blocks));
  s.layout_blocks = static_cast<int>(a.Int("layout_blocks", 1, s.blocks));
  s.parts = static_cast<int>(a.Int("parts", 1, kMaxParts));
  s.part_elements = ((r.hidden + s.parts - 1) / s.parts + 255) / 256 * 256;
  s.segment_tokens = static_cast<int>(a.Int("segment_tokens", 1, 1 << 20));
  s.solo_layout = a.Int("solo_layout", 0, 1) != 0;
  s.low_latency = a.Int("low_latency", 0, 1) != 0;
  s.bulk = a.Int("bulk", 0, 1) != 0;
  s.chunk_tokens = static_cast<int>(a.Int("chunk_tokens", 0, kChunkTokens));
  if (s.solo_layout && SoloLayoutBytes(r, s) > SoloLayoutLimit()) {
    Refuse("attribute solo_layout = 1: positions need " + std::to_string(SoloLayoutBytes(r, s)) +
           " bytes of shared memory; at most " + std::to_string(SoloLayoutLimit()));
  }
  return s;
}

// Between nodes: what crosses, and its memory.
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

// What dispatch and combine have in common.
template <class P>
int64_t DecodeShared(const Attributes& a, Operation operation, bool scaled, P* plan) {
  auto& p = plan->params;
  p.routing = DecodeRouting(a);
  p.schedule = DecodeSchedule(a, p.routing);
  const int64_t dtype = a.Int("dtype", 0, kNumDtypes - 1);
  plan->dtype = kDtypes[dtype];
  p.element = dtype > static_cast<int64_t>(Element::kF32) ? Element::kByte : static_cast<Element>(dtype);
  p.wire = static_cast<WireType>(a.Int("wire", 0, 2));
  p.ue8m0 = a.Int("ue8m0", 0, 1) != 0;
  plan->flight = a.Int("flight", 0, 1) != 0;
  if (p.element == Element::kByte && p.wire != WireType::kNative) Refuse("a one-byte dtype takes no wire format");
  if (p.schedule.low_latency) {
    if (const char* why = WhyNotLowLatency(p.routing, operation, p.element, p.wire, p.schedule.chunk_tokens)) {
      Refuse(std::string("attribute low_latency = 1: these kernels do not take this operation: ") + why);
    }
    p.staging = PlanLowLatency(p.routing, operation, p.element, scaled);
  } else {
    p.staging = PlanStaging(p.routing, p.schedule, p.element, p.wire, scaled);
  }
  p.call.timeout_ns = static_cast<uint64_t>(a.Int("timeout_ns", 0, std::numeric_limits<int64_t>::max()));
  plan->masked = a.Int("masked", 0, 1) != 0;
  if (p.schedule.chunk_tokens > 0) DecodeRail(operation, plan);
  return dtype;
}

double AgreementSeconds(uint64_t timeout_ns) {
  return timeout_ns == 0 ? kAgreementSeconds : static_cast<double>(timeout_ns) * 1e-9;
}

std::string Shape(ffi::Span<const int64_t> dims) {
  std::string out = "[";
  for (size_t i = 0; i < dims.size(); ++i) out += (i ? "," : "") + std::to_string(dims[i]);
  return out + "]";
}

bool Capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone;
}

}  // namespace

int64_t Attributes::Int(const char* name, int64_t low, int64_t high) const {
  ffi::ErrorOr<int64_t> value = lookup_(name);
  if (!value.has_value()) Refuse(std::string("attribute ") + name + " is missing or not an int64");
  if (*value < low || *value > high) {
    Refuse(std::string("attribute ") + name + " = " + std::to_string(*value) + ": must be in [" + std::to_string(low) +
           ", " + std::to_string(high) + "]");
  }
  return *value;
}

void Decode(const Attributes& a, DispatchPlan* plan) {
  plan->scaled = a.Int("scaled", 0, 1) != 0;
  plan->params.known_positions = a.Int("known_positions", 0, 1) != 0;
  const Operation operation = plan->params.known_positions ? Operation::kRedispatch : Operation::kDispatch;
  const int64_t dtype = DecodeShared(a, operation, plan->scaled, plan);
  Describe(&plan->params, plan->scaled, static_cast<uint32_t>(dtype), 0);
  plan->timeout_s = AgreementSeconds(plan->params.call.timeout_ns);
}

void Decode(const Attributes& a, CombinePlan* plan) {
  plan->weighted = a.Int("weighted", 0, 1) != 0;
  const int64_t dtype = DecodeShared(a, Operation::kCombine, false, plan);
  if (plan->params.element == Element::kByte) Refuse("combine takes bfloat16, float16 or float32 rows");
  if (plan->weighted && plan->params.routing.layout == Layout::kRanked) Refuse("the ranked layout takes weighted = 0");
  Describe(&plan->params, plan->weighted, static_cast<uint32_t>(dtype), 0);
  plan->timeout_s = AgreementSeconds(plan->params.call.timeout_ns);
}

void Decode(const Attributes& a, ExchangePlan* plan) {
  ExchangeParams& p = plan->params;
  p.ranks = static_cast<int>(a.Int("ranks", 1, kMaxRanks));
  p.lanes = static_cast<int>(a.Int("lanes", 1, kMaxBlocks / p.ranks));
  p.poison = static_cast<uint8_t>(a.Int("poison", 0, 255));
  p.chunk_bytes = static_cast<uint64_t>(a.Int("chunk_bytes", 256, 1 << 24)) / 16 * 16;
  p.ring_chunks = static_cast<int>(a.Int("ring_chunks", 1, 1 << 20));
  p.unit_bytes = static_cast<uint64_t>(a.Int("unit_bytes", 1, int64_t{1} << 40));
  p.operand_units = static_cast<uint64_t>(a.Int("operand_units", 0, kIntMax));
  p.output_units = static_cast<uint64_t>(a.Int("output_units", 0, kIntMax));
  p.call.timeout_ns = static_cast<uint64_t>(a.Int("timeout_ns", 0, std::numeric_limits<int64_t>::max()));
  plan->ragged = a.Int("ragged", 0, 1) != 0;
  PlanExchange(&p, plan->ragged);
  Describe(&p, plan->ragged, 0, 0);
  plan->timeout_s = AgreementSeconds(p.call.timeout_ns);
}

uint32_t NextCallId() {
  static std::atomic<uint32_t> next{1};
  uint32_t id = next++;
  return id != 0 ? id : next++;
}

void NameSite(const Attributes& attributes, const Workspace& workspace, int ranks, Call* call) {
  const uint32_t given = static_cast<uint32_t>(attributes.Int("site", 0, std::numeric_limits<uint32_t>::max()));
  call->descriptor.site = static_cast<int>(workspace.members().size()) == ranks ? call->call_id : given;
  call->signature = Signature(call->descriptor);
}

std::shared_ptr<Workspace> PrepareWorkspace(const Attributes& attributes, std::vector<DeviceKey> devices, int ranks,
                                            int ranks_per_node, const Needs& needs, int blocks, double seconds,
                                            bool flight, bool masked) {
  const int channel = static_cast<int>(attributes.Int("channel", 0, kMaxChannels - 1));
  std::shared_ptr<Workspace> workspace =
      Registry::Get().Find(std::move(devices), ranks, channel, flight, ranks_per_node);
  for (const Member& member : workspace->members()) {
    const int sms = CudaDevices().SmCount(member.ordinal);
    if (blocks > sms) {
      Refuse("KernelConfig.num_sms: " + std::to_string(blocks) + " thread blocks take an SM each, and GPU " +
             std::to_string(member.ordinal) + " has " + std::to_string(sms) + " SMs");
    }
  }
  workspace->Serve(needs, seconds);
  if (masked) workspace->LeaveOutTheDead();
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
  // While a graph is captured nothing is refused: it would spoil the executable. What is wrong shows when it runs: the
  // kernels find the failure, or that they have no memory.
  const bool capturing = Capturing(stream);
  try {
    if (!workspace.Serves(needs) && !capturing) workspace.Serve(needs, plan.timeout_s);  // its xm.Buffer closed
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
  *launching = std::shared_lock<std::shared_mutex>(workspace.launching());
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
