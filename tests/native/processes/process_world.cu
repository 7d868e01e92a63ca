#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

#include "ffi/nccl_memory.h"
#include "tests/native/processes/process_world.h"

namespace native {
namespace {

// Before CUDA and NCCL look at it.
void SetEnvironment(const ProcessOptions& o) {
  auto set = [](const char* name, const std::string& value) { setenv(name, value.c_str(), 1); };
  if (!o.plugin.empty()) {
    set("NCCL_HOSTID", "virtual-node-" + std::to_string(o.rank / o.per_node));
    set("NCCL_RMA_PLUGIN", o.plugin);
    set("XEN_MOE_RMA", o.faults);
    set("NCCL_GIN_TYPE", "2");
    set("NCCL_IB_DISABLE", "1"), set("NCCL_SOCKET_IFNAME", "lo");
    set("NCCL_NVLS_ENABLE", "0"), set("NCCL_MNNVL_ENABLE", "0");
  }
  if (o.gpus < o.per_node) set("NCCL_MULTI_RANK_GPU_ENABLE", "1");  // 2.30 and later know it
  set("CUDA_MODULE_LOADING", "EAGER");
  if (!o.log.empty()) {
    set("NCCL_DEBUG", "INFO"), set("NCCL_DEBUG_SUBSYS", "INIT,ENV,NET,REG");
    set("NCCL_DEBUG_FILE", o.log + "/nccl-rank" + std::to_string(o.rank) + ".log");
  }
}

}  // namespace

ProcessWorld::ProcessWorld(const ProcessOptions& options, Rendezvous* rendezvous)
    : options_(options), rendezvous_(rendezvous) {
  const ProcessOptions& o = options_;
  SetEnvironment(o);
  rendezvous->ShowStep("starting CUDA");
  state.rank = o.rank, state.device = o.rank % o.gpus;
  NATIVE_CHECK(cudaSetDevice(state.device));
  NATIVE_CHECK(cudaFree(nullptr));
  Preload<NcclLink>();
  for (cudaStream_t& stream : state.stream) NATIVE_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  NATIVE_CHECK(cudaStreamCreateWithFlags(&state.side, cudaStreamNonBlocking));
  state.control = reinterpret_cast<Control*>(Device(sizeof(Control)));
  state.wrong = reinterpret_cast<uint32_t*>(Device(sizeof(uint32_t)));
  expected_ = reinterpret_cast<uint64_t*>(Device(kRailSignals * 8));
  NATIVE_CHECK(cudaHostAlloc(&state.error, sizeof(ErrorRecord), cudaHostAllocMapped | cudaHostAllocPortable));
  std::memset(static_cast<void*>(state.error), 0, sizeof(ErrorRecord));

  rendezvous->ShowStep("starting NCCL's communicator");
  const double before = Now();
  const int version = LoadNccl(o.nccl);
  std::string id(kNcclUniqueIdBytes, '\0');
  if (o.rank == 0) id = NewNcclId();
  rendezvous->Broadcast(id.data(), id.size(), o.limit_s);
  StartNccl(&CudaDevices(), state.device, o.rank, o.ranks, id, StartSeconds());
  const double communicator = Now();
  ncclCommProperties_t has{};
  has.size = sizeof(has), has.magic = NCCL_API_MAGIC, has.version = NCCL_VERSION_CODE;
  std::string bytes(reinterpret_cast<const char*>(&has), sizeof(has));
  QueryNccl(&bytes);
  std::memcpy(&has, bytes.data(), sizeof(has));
  started_ =
      Text("NCCL %d (headers %d), device interface %d, puts of kind %d (rails %d), %d domains of loads and stores",
           version, NCCL_VERSION_CODE, has.deviceApiSupport, static_cast<int>(has.ginType),
           static_cast<int>(has.railedGinType), has.nLsaTeams);

  rendezvous->ShowStep("making a window");
  mailbox_ = state.mailbox = reinterpret_cast<Mailbox*>(Window(sizeof(Mailbox)));
  const double windows = Now();
  rendezvous->ShowStep("making the device communicator");
  const ncclDevCommRequirements_t wanted = NcclRequirements(o.ranks, o.ranks / o.per_node);
  const std::string made =
      JoinNcclDevices({reinterpret_cast<const char*>(&wanted), sizeof(wanted)}, sizeof(ncclDevComm), StartSeconds());
  std::memcpy(static_cast<void*>(&link.comm), made.data(), sizeof(link.comm));
  Expect(link.comm.rank == o.rank && link.comm.nRanks == o.ranks && link.comm.lsaSize == o.per_node,
         started_ + Text(": the device communicator has rank %d of %d and %d ranks a node", link.comm.rank,
                         link.comm.nRanks, link.comm.lsaSize));
  link.table = reinterpret_cast<WindowTable*>(Device(sizeof(WindowTable)));
  started_ += Text("; communicator %.2f s, window %.2f s, device communicator %.2f s, %zu bytes", communicator - before,
                   windows - communicator, Now() - windows, sizeof(ncclDevComm));

  rendezvous->ShowStep("preparing operations");
  if (o.plugin.empty()) return;
  if (void* const library = dlopen(o.plugin.c_str(), RTLD_NOW | RTLD_NOLOAD)) {
    traffic_ = reinterpret_cast<decltype(traffic_)>(dlsym(library, "xen_moe_rma_traffic"));
    kill_ = reinterpret_cast<decltype(kill_)>(dlsym(library, "xen_moe_rma_kill"));
  }
  Expect(traffic_ != nullptr && kill_ != nullptr, "NCCL has not loaded " + o.plugin);
}

char* ProcessWorld::Device(uint64_t bytes) {
  char* p = nullptr;
  NATIVE_CHECK(cudaMalloc(&p, bytes ? bytes : 16));
  NATIVE_CHECK(cudaMemset(p, 0, bytes ? bytes : 16));
  return p;
}

char* ProcessWorld::Window(uint64_t bytes) {
  const MemoryProvider& nccl = *NcclProvider();
  void* const own = nccl.allocate(bytes);
  Expect(own != nullptr, std::string("no memory from NCCL: ") + (own ? "" : nccl.reason()));
  NATIVE_CHECK(cudaMemset(own, 0, bytes));
  NATIVE_CHECK(cudaDeviceSynchronize());
  AllGather();
  if (!nccl.join(own, StartSeconds())) throw std::runtime_error(nccl.reason());
  for (int r = 0; r < options_.ranks; ++r) {
    if (r / options_.per_node != options_.rank / options_.per_node) continue;
    Expect(nccl.peer(own, r) != nullptr, Text("no pointer to rank %d of the same node", r));
  }
  return static_cast<char*>(own);
}

ProcessOperation ProcessWorld::Add(Problem problem, int chunk_tokens, double timeout_s) {
  problem.chunk_tokens = chunk_tokens;
  const std::vector<RankCase> cases = Reference(problem);
  ProcessOperation out;
  for (const RankCase& c : cases) {
    const Bytes& topk = c.inputs[problem.operation == Operation::kCombine ? 1 : 2];
    out.experts.emplace_back(topk.size() / 4);
    if (!topk.empty()) std::memcpy(out.experts.back().data(), topk.data(), topk.size());
  }
  const uint64_t ns = static_cast<uint64_t>(timeout_s * options_.patience * 1e9);
  prepared_.push_back(std::make_unique<Prepared>(problem, cases[options_.rank], state, next_call_++, ns));
  out.operation.prepared = prepared_.back().get();
  out.operation.Plan(expected_);
  const Needs& n = prepared_.back()->needs();
  needs_.flag_bytes = std::max(needs_.flag_bytes, n.flag_bytes);
  needs_.data_bytes = std::max(needs_.data_bytes, n.data_bytes);
  needs_.scratch_bytes = std::max(needs_.scratch_bytes, n.scratch_bytes);
  return out;
}

void ProcessWorld::Start() {
  const ProcessOptions& o = options_;
  staging_bytes_ = 2 * (needs_.flag_bytes + needs_.data_bytes);
  for (uint64_t bytes : AllGather(staging_bytes_)) Expect(bytes == staging_bytes_, "ranks need different memory");
  staging_ = Window(staging_bytes_);
  const MemoryProvider& nccl = *NcclProvider();
  Control control{};
  WindowTable table{};
  MemoryTable memory{};
  memory.scratch = Device(needs_.scratch_bytes);
  memory.flag_bytes = needs_.flag_bytes, memory.data_bytes = needs_.data_bytes;
  memory.scratch_bytes = needs_.scratch_bytes, memory.generation = 1;
  for (int r = 0; r < o.ranks; ++r) {
    if (r / o.per_node != o.rank / o.per_node) continue;  // no pointers to other nodes
    control.mailbox[r] = static_cast<Mailbox*>(nccl.peer(mailbox_, r));
    memory.staging[r] = static_cast<char*>(nccl.peer(staging_, r));
  }
  control.error = state.error, control.newest = memory.generation, control.current = memory;
  control.memory[memory.generation % kGenerations] = memory;
  table.mailbox = NcclWindowOf(mailbox_), table.ranks = o.ranks;
  for (void*& window : table.staging) window = NcclWindowOf(staging_);
  for (int r = 0; r < o.ranks; ++r) table.process[r] = r;
  NATIVE_CHECK(cudaMemcpy(state.control, &control, sizeof(control), cudaMemcpyHostToDevice));
  NATIVE_CHECK(cudaMemcpy(link.table, &table, sizeof(table), cudaMemcpyHostToDevice));
  Synchronize();
  AllGather();
}

void ProcessWorld::Launch(const ProcessOperation& o, bool poisoned) {
  rendezvous_->ShowStep(Text("operation %d", ++launched_).c_str());
  LaunchUnchecked(o);
  o.operation.prepared->Verify(state.stream[0], poisoned);
}
void ProcessWorld::LaunchUnchecked(const ProcessOperation& o) {
  NATIVE_CHECK(LaunchOne(o.operation, link, state.stream[0], (state.rank + launched_) % 2));
}
void ProcessWorld::Synchronize() { NATIVE_CHECK(cudaDeviceSynchronize()); }
uint32_t ProcessWorld::Wrong() {
  uint32_t wrong = 0;
  Synchronize();
  NATIVE_CHECK(cudaMemcpy(&wrong, state.wrong, 4, cudaMemcpyDeviceToHost));
  NATIVE_CHECK(cudaMemset(state.wrong, 0, 4));
  return wrong;
}
RmaTraffic ProcessWorld::Sent(int target) const {
  RmaTraffic out{};
  if (counts()) traffic_(options_.rank, target, &out);
  return out;
}
void ProcessWorld::Cut() const { kill_(options_.rank); }

}  // namespace native
