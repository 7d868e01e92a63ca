#include "ffi/operation.h"

#include <algorithm>
#include <limits>

namespace xen_moe {

ffi::TypeId RoutingPlan::id = {};
ffi::TypeId ExchangePlan::id = {};

namespace {

constexpr int64_t kIntMax = std::numeric_limits<int32_t>::max();

uint64_t AlignUp(uint64_t x, uint64_t to) { return (x + to - 1) / to * to; }

[[noreturn]] void Reject(const std::string& message) { throw MemoryError{false, "xen_moe_jax: " + message}; }

ffi::DataType DtypeOf(int64_t code) {
  switch (code) {
    case 0:
      return ffi::DataType::BF16;
    case 1:
      return ffi::DataType::F16;
    case 2:
      return ffi::DataType::F32;
    case 3:
      return ffi::DataType::F8E4M3FN;
    case 4:
      return ffi::DataType::S8;
    default:
      return ffi::DataType::F8E5M2;
  }
}

}  // namespace

int64_t Attributes::Int(const char* name, int64_t low, int64_t high) const {
  ffi::ErrorOr<int64_t> value = lookup_(name);
  if (!value.has_value()) Reject(std::string("attribute ") + name + " is missing or not an int64");
  if (*value < low || *value > high) {
    Reject(std::string("attribute ") + name + " = " + std::to_string(*value) + ": must be in [" + std::to_string(low) +
           ", " + std::to_string(high) + "]");
  }
  return *value;
}

void DecodeRouting(const Attributes& a, RoutingPlan* plan) {
  Routing& r = plan->routing;
  r.ranks = static_cast<int>(a.Int("ranks", 1, kMaxRanks));
  r.tokens = static_cast<int>(a.Int("num_tokens", 1, 1 << 24));
  r.top_k = static_cast<int>(a.Int("top_k", 1, kMaxSlots));
  r.experts = static_cast<int>(a.Int("num_experts", 1, 4096));
  r.local_experts = (r.experts + r.ranks - 1) / r.ranks;
  r.hidden = static_cast<int>(a.Int("hidden", 1, 1 << 24));
  r.capacity = static_cast<int>(a.Int("capacity", 1, kIntMax));
  r.alignment = static_cast<int>(a.Int("alignment", 1, 1 << 20));
  r.layout = static_cast<Layout>(a.Int("layout", 0, 2));
  r.slots = r.layout == Layout::kRanked ? 1 : r.top_k;
  r.ranks_per_node = static_cast<int>(a.Int("ranks_per_node", 1, r.ranks));
  if (static_cast<int64_t>(r.ranks) * r.tokens * r.top_k > kIntMax) {
    Reject("num_tokens * top_k * ranks = " + std::to_string(static_cast<int64_t>(r.ranks) * r.tokens * r.top_k) +
           ": must be below 2^31; split the batch");
  }
  const int64_t dtype = a.Int("dtype", 0, 5);
  plan->dtype = DtypeOf(dtype);
  plan->element = dtype >= 3 ? Element::kByte : static_cast<Element>(dtype);
  plan->wire = static_cast<WireType>(a.Int("wire", 0, 2));
  plan->ue8m0 = a.Int("ue8m0", 0, 1) != 0;
  plan->scaled = a.Int("scaled", 0, 1) != 0;
  plan->weighted = a.Int("weighted", 0, 1) != 0;
  plan->known_positions = a.Int("known_positions", 0, 1) != 0;
  if (plan->element == Element::kByte && plan->wire != WireType::kNative)
    Reject("a one-byte dtype takes no wire format");

  Schedule& s = plan->schedule;
  s.blocks = static_cast<int>(a.Int("blocks", 1, kMaxBlocks));
  s.push_blocks = static_cast<int>(a.Int("push_blocks", 1, s.blocks));
  s.layout_blocks = static_cast<int>(a.Int("layout_blocks", 1, s.blocks));
  s.parts = static_cast<int>(a.Int("parts", 1, 64));
  s.part_elements = static_cast<int>(AlignUp((r.hidden + s.parts - 1) / s.parts, 256));
  s.segment_tokens = static_cast<int>(a.Int("segment_tokens", 1, 1 << 20));
  s.solo_layout = a.Int("solo_layout", 0, 1) != 0;
  if (s.solo_layout && SoloLayoutBytes(r, s) > SoloLayoutLimit()) {
    Reject("attribute solo_layout = 1: positions need " + std::to_string(SoloLayoutBytes(r, s)) +
           " bytes of shared memory; at most " + std::to_string(SoloLayoutLimit()));
  }
  s.timeout_ns = static_cast<uint64_t>(a.Int("timeout_ns", 0, std::numeric_limits<int64_t>::max()));

  Staging& m = plan->staging;
  const uint64_t pairs = static_cast<uint64_t>(r.ranks) * r.tokens;
  m.presence_flags = 0;
  m.row_flags = AlignUp(static_cast<uint64_t>(r.ranks) * kMaxBlocks * 4, 128);
  m.flag_bytes = AlignUp(m.row_flags + pairs * s.parts * 4, 256);
  const bool scales = plan->scaled || plan->wire != WireType::kNative;
  const uint64_t value_bytes = plan->wire == WireType::kNative ? ElementBytes(plan->element) : 1;
  m.scale_offset = AlignUp(r.hidden * value_bytes, 16);
  m.row_bytes = m.scale_offset + (scales ? AlignUp((r.hidden + kScaleBlock - 1) / kScaleBlock * 4, 16) : 0);
  m.topk_idx = 0;
  m.topk_weights = AlignUp(pairs * r.top_k * 4, 128);
  m.rows = AlignUp(m.topk_weights + pairs * r.top_k * 4, 128);
  m.data_bytes = AlignUp(m.rows + pairs * m.row_bytes, 256);
  plan->needs = {m.flag_bytes, m.data_bytes, DispatchScratchBytes(r, s)};
}

void DecodeExchange(const Attributes& a, ExchangePlan* plan) {
  ExchangeParams& p = plan->params;
  p.ranks = static_cast<int>(a.Int("ranks", 1, kMaxRanks));
  p.lanes = static_cast<int>(a.Int("lanes", 1, kMaxBlocks / 2));
  p.chunk_bytes = static_cast<uint64_t>(a.Int("chunk_bytes", 256, 1 << 24)) / 16 * 16;
  p.ring_chunks = static_cast<int>(a.Int("ring_chunks", 1, 1 << 20));
  p.timeout_ns = static_cast<uint64_t>(a.Int("timeout_ns", 0, std::numeric_limits<int64_t>::max()));
  p.unit_bytes = static_cast<uint64_t>(a.Int("unit_bytes", 1, int64_t{1} << 40));
  p.operand_units = static_cast<uint64_t>(a.Int("operand_units", 0, kIntMax));
  p.output_units = static_cast<uint64_t>(a.Int("output_units", 0, kIntMax));
  plan->ragged = a.Int("ragged", 0, 1) != 0;
  const uint64_t largest = (plan->ragged ? p.operand_units : p.operand_units / p.ranks) * p.unit_bytes;
  p.max_chunks = (largest + p.chunk_bytes * p.lanes - 1) / (p.chunk_bytes * p.lanes) + 1;
  const uint64_t ways = static_cast<uint64_t>(p.ranks) * p.lanes;
  p.presence_flags = 0;
  p.chunk_flags = 128;
  p.credit_flags = AlignUp(p.chunk_flags + ways * p.max_chunks * 4, 128);
  p.flag_bytes = AlignUp(p.credit_flags + ways * p.max_chunks * 4, 256);
  p.offsets = 0;
  p.ring = 256;
  p.data_bytes = AlignUp(p.ring + ways * p.ring_chunks * p.chunk_bytes, 256);
  plan->needs = {p.flag_bytes, p.data_bytes, 0};
}

std::shared_ptr<Workspace> PrepareWorkspace(std::vector<DeviceKey> devices, int ranks, int channel, const Needs& needs,
                                            int blocks) {
  std::shared_ptr<Workspace> workspace = Registry::Get().Find(std::move(devices), ranks, channel);
  for (DeviceKey key : workspace->devices()) {
    const int ordinal = static_cast<int>(key % kDevicesPerProcess);
    if (workspace->Find(ordinal) == nullptr) continue;
    int sms = 0;
    if (cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, ordinal) != cudaSuccess || blocks > sms) {
      Reject("KernelConfig.num_sms: " + std::to_string(blocks) + " thread blocks must run at once, and GPU " +
             std::to_string(ordinal) + " has " + std::to_string(sms) + " SMs");
    }
  }
  workspace->Serve(needs);
  return workspace;
}

ffi::Error RunOn(Workspace& workspace, const Needs& needs, int32_t ordinal, cudaStream_t stream,
                 const std::function<int(const Member&)>& launch) {
  Member* member = workspace.Find(ordinal);
  if (member == nullptr) {
    return ffi::Error(
        ffi::ErrorCode::kFailedPrecondition,
        "xen_moe_jax: the program runs on GPU " + std::to_string(ordinal) +
            " of this process, which is not in the mesh that it was lowered for. Lower it again under the mesh "
            "that it runs on");
  }
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const bool capturing = cudaStreamIsCapturing(stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone;
  try {
    if (!workspace.Serves(needs)) {  // its xm.Buffer was closed. Every rank comes by here before any of them launches.
      if (capturing) {
        return ffi::Error(
            ffi::ErrorCode::kFailedPrecondition,
            "xen_moe_jax: the program's xm.Buffer was closed, and memory cannot be made while a CUDA graph is "
            "captured. Open the buffer again");
      }
      workspace.Serve(needs);
    }
    const std::string failure = workspace.Admit(member, capturing);
    if (!failure.empty()) return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, failure);
  } catch (const MemoryError& e) {
    return ToError(e);
  }
  std::shared_lock<std::shared_mutex> lock(workspace.mutex());
  const int e = launch(*member);
  if (e != cudaSuccess) {
    return ffi::Error::Internal(std::string("xen_moe_jax: kernel launch on GPU ") + std::to_string(ordinal) + ": " +
                                cudaGetErrorString(static_cast<cudaError_t>(e)));
  }
  return ffi::Error::Success();
}

ffi::Error ToError(const MemoryError& e) {
  return e.exhausted ? ffi::Error(ffi::ErrorCode::kResourceExhausted, e.message)
                     : ffi::Error::InvalidArgument(e.message);
}

std::string Shape(ffi::AnyBuffer::Dimensions dims) {
  std::string out = "[";
  for (size_t i = 0; i < dims.size(); ++i) out += (i ? "," : "") + std::to_string(dims[i]);
  return out + "]";
}

ffi::Error CheckBuffer(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType dtype,
                       const std::vector<int64_t>& dims) {
  const auto given = buffer.dimensions();
  const bool same = given.size() == dims.size() && std::equal(dims.begin(), dims.end(), given.begin());
  if (same && buffer.element_type() == dtype) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(std::string("xen_moe_jax: ") + name + " has dtype code " +
                                     std::to_string(static_cast<int>(buffer.element_type())) + " and shape " +
                                     Shape(given) + "; this call needs dtype code " +
                                     std::to_string(static_cast<int>(dtype)) + " and shape " +
                                     Shape(ffi::AnyBuffer::Dimensions(dims.data(), dims.size())));
}

}  // namespace xen_moe
