// _memory_test: workspaces over host memory, and a stand-in for the kernels that use them. Only tests build and use
// this module; it needs neither CUDA nor a GPU.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>

#include "ffi/failure_text.h"
#include "ffi/flights.h"
#include "ffi/memory_bindings.h"
#include "ffi/nccl_memory.h"
#include "ffi/registry.h"
#include "tests/native/fakes/fake_devices.h"

namespace nb = nanobind;

namespace xen_moe {
namespace {

Mailbox& MailboxOf(const Member& member) { return *member.mailbox; }

template <class T>
T ReadWord(const Member& member, const T* at) {
  T word{};
  FakeDevices::Get().Read(member.ordinal, &word, at, sizeof(word));
  return word;
}
template <class T>
void WriteWord(const Member& member, T* at, T word) {
  FakeDevices::Get().Write(member.ordinal, at, &word, sizeof(word));
}

// Stands in for a chunk between nodes, which carries its sender's generation from this rank to the other ranks of its
// rail.
int ChunkSignal(const Workspace& workspace, int rank) {
  return ChunkSignals(SourcesOf(workspace.ranks())) + rank / workspace.ranks_per_node() * kMaxChunks;
}
uint64_t* ExpectedOfMember(const Workspace& workspace, const Member& member) {
  return ExpectedOf(member.rail, workspace.ranks(), workspace.ranks() / workspace.ranks_per_node());
}
bool OnRail(const Workspace& workspace, int a, int b) {
  const int per_node = workspace.ranks_per_node();
  return a % per_node == b % per_node && a != b;
}
void SendChunks(Workspace& workspace, const Member& member, uint32_t generation) {
  const PeerTable& peers = member.rail->peers;
  for (int rank = 0; rank < workspace.ranks(); ++rank) {
    if (!OnRail(workspace, member.rank, rank)) continue;
    char* const staging = peers.staging[generation % kGenerations][rank];
    if (staging == nullptr) Refuse("no memory behind the link");
    const int place = 64 + 8 * member.rank;
    WriteWord(member, reinterpret_cast<uint32_t*>(staging + place), generation);
    uint64_t* const counter = peers.counters[rank] + ChunkSignal(workspace, member.rank);
    WriteWord(member, counter, ReadWord(member, counter) + 1);
  }
}
// Returns whether every expected chunk has arrived, no other one, and all from the same generation.
bool AwaitChunks(Workspace& workspace, const Member& member, uint32_t generation) {
  bool good = true;
  for (int rank = 0; rank < workspace.ranks(); ++rank) {
    if (!OnRail(workspace, member.rank, rank)) continue;
    const int signal = ChunkSignal(workspace, rank);
    uint64_t* const expected = ExpectedOfMember(workspace, member) + signal;
    const uint64_t wanted = ReadWord(member, expected) + 1;
    const char* const staging = member.rail->peers.staging[generation % kGenerations][member.rank];
    good = good && ReadWord(member, member.rail->peers.counters[member.rank] + signal) == wanted &&
           ReadWord(member, reinterpret_cast<const uint32_t*>(staging + 64 + 8 * rank)) == generation;
    WriteWord(member, expected, wanted);
  }
  return good;
}

// Runs one operation on every rank of a process's group, as the kernels do: announce, choose the generation, complete.
// Returns, for each rank, whether its results are good.
std::vector<bool> RunOperation(Workspace& workspace, const Needs& needs, uint32_t signature) {
  const auto launching = workspace.Launch(needs);
  const auto& members = workspace.members();
  std::vector<bool> good;
  std::vector<uint32_t> generations;  // used by each rank
  for (const Member& member : members) {
    Control& control = *member.control;
    const uint32_t epoch = NextEpoch(control.epoch);
    for (int rank = 0; rank < workspace.ranks(); ++rank) {
      if (control.mailbox[rank] == nullptr) continue;  // a rank of another node
      control.mailbox[rank]->announcements[epoch & 1][member.rank] = PackAnnouncement(epoch, signature, control.newest);
    }
  }
  for (const Member& member : members) {
    Control& control = *member.control;
    const uint32_t epoch = NextEpoch(control.epoch);
    uint32_t least = control.newest;
    bool all = true;
    for (int rank = 0; rank < workspace.ranks(); ++rank) {
      if (control.mailbox[rank] == nullptr) continue;
      const uint64_t word = member.mailbox->announcements[epoch & 1][rank];
      all = all && AnnouncedEpoch(word) == epoch && AnnouncedSignature(word) == (signature & 0xFFFFFF);
      if (OlderGeneration(AnnouncedGeneration(word), least)) least = AnnouncedGeneration(word);
    }
    const MemoryTable& agreed = control.memory[least % kGenerations];
    const MemoryTable used = Suffices(control.current, needs) ? control.current : agreed;
    const bool enough = Suffices(used, needs);
    if (enough) {  // all memory that an operation may touch must be allocated
      const uint64_t half = used.flag_bytes + used.data_bytes;
      for (int rank = 0; rank < workspace.ranks(); ++rank) {
        const uint32_t word = epoch;
        if (control.mailbox[rank] == nullptr) continue;
        char* at = used.staging[rank] + (epoch & 1) * half;
        uint32_t flag = 0;
        FakeDevices::Get().Read(member.ordinal, &flag, at, sizeof(flag));
        if (flag != 0 && EpochBefore(epoch, flag)) Refuse("a flag from the future");
        FakeDevices::Get().Write(member.ordinal, at, &word, sizeof(word));
        FakeDevices::Get().Write(member.ordinal, at + half - needs.data_bytes, &word, sizeof(word));
      }
    }
    const bool failed = MailboxOf(member).failure != 0 || !all || !enough;
    if (failed && member.record->failure == 0) {
      member.record->failure = MailboxOf(member).failure != 0
                                   ? MailboxOf(member).failure
                                   : PackFailure({all ? Cause::kMemory : Cause::kMismatch, Operation::kDispatch,
                                                  Step::kArrival, member.rank, member.rank, epoch});
    }
    good.push_back(!failed);
    generations.push_back(used.generation);
    if (member.rail != nullptr && enough) SendChunks(workspace, member, used.generation);
    control.current = agreed;
    control.epoch = epoch;
    member.record->generation = used.generation & 0xFF;
  }
  for (size_t i = 0; i < members.size(); ++i) {
    if (members[i].rail != nullptr && good[i]) good[i] = AwaitChunks(workspace, members[i], generations[i]);
  }
  return good;
}

// Tells FakeDevices about NCCL's memory: a process may touch its own from `allocate` on, and that of another process
// once it is mapped.
class WatchedNccl {
 public:
  static const MemoryProvider* Provider() {
    static const MemoryProvider provider{
        "NCCL",
        0,
        Allocate,
        [](void* own, double seconds) { return NcclProvider()->join(own, seconds); },
        Discard,
        Release,
        Peer,
        [] { return NcclProvider()->reason(); },
        [](int process) { NcclProvider()->lost(process); },
        NcclProvider()->connect,
        NcclProvider()->window,
    };
    return &provider;
  }

 private:
  struct Sizes {
    uint64_t bytes = 0;
    std::set<void*> peers;
  };
  static std::map<void*, Sizes>& All() {
    static auto* all = new std::map<void*, Sizes>;
    return *all;
  }
  static std::mutex& Lock() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static void* Allocate(uint64_t bytes) {
    void* own = NcclProvider()->allocate(bytes);
    if (own == nullptr) return nullptr;
    std::lock_guard<std::mutex> lock(Lock());
    FakeDevices::Get().Adopt(static_cast<char*>(own), bytes);
    All()[own].bytes = bytes;
    return own;
  }
  static void Forget(void* own) {
    std::lock_guard<std::mutex> lock(Lock());
    FakeDevices::Get().Forget(static_cast<char*>(own));
    for (void* peer : All().at(own).peers) FakeDevices::Get().Forget(static_cast<char*>(peer));
    All().erase(own);
  }
  static void Discard(void* own) {
    Forget(own);
    NcclProvider()->discard(own);
  }
  static void Release(void* own) {
    Forget(own);
    NcclProvider()->release(own);
  }
  static void* Peer(void* own, int process) {
    void* const theirs = NcclProvider()->peer(own, process);
    std::lock_guard<std::mutex> lock(Lock());
    Sizes& sizes = All().at(own);
    if (theirs != nullptr && theirs != own && sizes.peers.insert(theirs).second)
      FakeDevices::Get().Adopt(static_cast<char*>(theirs), sizes.bytes);
    return theirs;
  }
};

// Stands in for the kernels' half of puts over NCCL: tests check the order of the host's calls and the table.
struct FakeLink {
  static inline std::vector<uint64_t> settled;  // `time` of each call
  static inline std::vector<int> gone;          // ranks left out in the last call
  static inline bool late = false;

  static std::string Request(int ranks, int nodes) {
    const uint64_t words[] = {24, uint64_t{23203} << 32 | 0xcafebeef,
                              static_cast<uint64_t>(RailSignals(ranks, nodes)) << 8 | nodes};
    return {reinterpret_cast<const char*>(words), sizeof(words)};
  }
  static void Settle(int ordinal, const std::string&, RailMemory* rail, int rank, int ranks, int,
                     const uint64_t* without, uint64_t time, double) {
    if (late) Refuse("reset: puts between nodes were still under way, to or from rank " + std::to_string(rank));
    settled.push_back(time), gone.clear();
    for (int other = 0; other < kMaxRanks; ++other) {
      if (without[other / 64] >> other % 64 & 1) gone.push_back(other);
    }
    const uint64_t base = 1000 * time;
    uint64_t* const to = ranks <= kSmallGroup ? rail->windows.base : LargeGroupBase(&rail->windows);
    FakeDevices::Get().Write(ordinal, to, &base, sizeof(base));
  }
  static const LinkKernels* Kernels() {
    static const LinkKernels kernels{Request, 64, [](int, int) {}, Settle};
    return &kernels;
  }
};

const Member& At(Workspace& workspace, size_t i) { return workspace.members().at(i); }

ErrorRecord RecordOf(nb::dict d) {
  const auto number = [&](const char* name) -> int64_t { return d.contains(name) ? nb::cast<int64_t>(d[name]) : 0; };
  const auto descriptor = [&](const char* name) {
    Descriptor out{};
    if (!d.contains(name)) return out;
    nb::dict from = nb::cast<nb::dict>(d[name]);
    const std::pair<const char*, uint32_t*> fields[] = {{"operation", &out.operation},
                                                        {"dtype", &out.dtype},
                                                        {"wire", &out.wire},
                                                        {"layout", &out.layout},
                                                        {"flags", &out.flags},
                                                        {"ranks", &out.ranks},
                                                        {"tokens", &out.routed.tokens},
                                                        {"top_k", &out.routed.top_k},
                                                        {"experts", &out.routed.experts},
                                                        {"hidden", &out.routed.hidden},
                                                        {"capacity", &out.routed.capacity},
                                                        {"alignment", &out.routed.alignment},
                                                        {"operand_units", &out.exchange.operand_units},
                                                        {"output_units", &out.exchange.output_units},
                                                        {"unit_bytes_low", &out.exchange.unit_bytes_low},
                                                        {"unit_bytes_high", &out.exchange.unit_bytes_high}};
    for (const auto& [field, to] : fields) {
      if (from.contains(field)) *to = nb::cast<uint32_t>(from[field]);
    }
    return out;
  };
  ErrorRecord record{};
  record.failure = PackFailure({static_cast<Cause>(number("cause")), static_cast<Operation>(number("operation")),
                                static_cast<Step>(number("step")), static_cast<int>(number("rank")),
                                static_cast<int>(number("other")), static_cast<uint32_t>(number("epoch"))});
  record.waited_ns = static_cast<uint64_t>(number("waited_ns"));
  record.of_rank = descriptor("of_rank");
  record.of_other = descriptor("of_other");
  return record;
}

}  // namespace
}  // namespace xen_moe

NB_MODULE(_memory_test, m) {
  using namespace xen_moe;
  BindMemory(m, &FakeDevices::Get(), FakeLink::Kernels());
  BindNccl(m, &FakeDevices::Get(), WatchedNccl::Provider());
  m.def("fake_provider", [] { return nb::capsule(FakeProvider(), kMemoryProviderCapsule); });
  m.def("fail_after", [](int calls) { FakeDevices::Get().FailAfter(calls); });
  m.def("set_busy", [](bool busy) { FakeDevices::Get().SetBusy(busy); });
  m.def("calls", [] { return FakeDevices::Get().calls(); });
  m.def("held", [] { return FakeDevices::Get().held(); });
  m.def("clear", [] {
    Registry::Get().Clear();
    TicketOrder::Get().Clear();
  });
  m.def("serve", [](Workspace& w, uint64_t flags, uint64_t data, uint64_t scratch, double seconds) {
    nb::gil_scoped_release nogil;
    try {
      w.EnsureCapacity({flags, data, scratch}, seconds);
    } catch (const MemoryError& e) {
      throw std::runtime_error(e.message);
    }
  });
  m.def("serves", [](Workspace& w, uint64_t flags, uint64_t data, uint64_t scratch) {
    return w.HasCapacity({flags, data, scratch});
  });
  m.def("run", [](Workspace& w, uint64_t flags, uint64_t data, uint64_t scratch, uint32_t signature) {
    try {
      return RunOperation(w, {flags, data, scratch}, signature);
    } catch (const MemoryError& e) {
      throw std::runtime_error(e.message);
    }
  });
  // Writes a word into the staging area of a rank, as member 0 has it mapped, at a byte offset of the newest
  // generation.
  m.def("put", [](Workspace& w, int rank, uint64_t offset, uint32_t word) {
    const Control& control = *At(w, 0).control;
    char* to = control.memory[control.newest % kGenerations].staging[rank] + offset;
    FakeDevices::Get().Write(At(w, 0).ordinal, to, &word, sizeof(word));
  });
  m.def("staging_address", [](Workspace& w, int rank) {
    const Control& control = *At(w, 0).control;
    return reinterpret_cast<uintptr_t>(control.memory[control.newest % kGenerations].staging[rank]);
  });
  m.def("get", [](Workspace& w, int rank, uint64_t offset) {
    const Control& control = *At(w, 0).control;
    const char* from = control.memory[control.newest % kGenerations].staging[rank] + offset;
    uint32_t word = 0;
    FakeDevices::Get().Read(At(w, 0).ordinal, &word, from, sizeof(word));
    return word;
  });
  // Returns the ranks to whose mailbox, and to whose newest staging area, member `i` has pointers: in its own tables,
  // and in the table of its link.
  m.def("pointers", [](Workspace& w, size_t i) {
    const Member& member = At(w, i);
    const Control& control = *member.control;
    const int entry = control.newest % kGenerations;
    std::vector<std::vector<int>> out(5);
    for (int rank = 0; rank < w.ranks(); ++rank) {
      if (control.mailbox[rank] != nullptr) out[0].push_back(rank);
      if (control.memory[entry].staging[rank] != nullptr) out[1].push_back(rank);
      if (member.rail == nullptr) continue;
      if (member.rail->peers.mailbox[rank] == At(w, rank).mailbox) out[2].push_back(rank);
      const char* const theirs = At(w, rank).control->memory[entry].staging[rank];
      if (theirs != nullptr && member.rail->peers.staging[entry][rank] == theirs) out[3].push_back(rank);
      if (member.rail->peers.counters[rank] == At(w, rank).rail->peers.counters[rank]) out[4].push_back(rank);
    }
    return out;
  });
  // Returns the table of the link of member 0: the newest window, the mailbox's window, the ranks' processes, the
  // connection.
  m.def("windows", [](Workspace& w) {
    const Member& member = At(w, 0);
    const WindowTable table = ReadWord(member, &member.rail->windows);
    std::vector<int> processes(table.process, table.process + table.ranks);
    const auto* const made = reinterpret_cast<const int*>(member.connection->data());
    nb::dict d;
    d["staging"] = reinterpret_cast<uintptr_t>(table.staging[member.control->newest % kGenerations]);
    d["mailbox"] = reinterpret_cast<uintptr_t>(table.mailbox);
    d["processes"] = processes;
    d["connection"] = std::vector<int>{made[0], made[1]};
    d["base"] = w.ranks() <= kSmallGroup ? table.base[0] : ReadWord(member, LargeGroupBase(&member.rail->windows));
    d["expected"] = ReadWord(member, ExpectedOfMember(w, member));
    return d;
  });
  // Returns the ranks to whose mailbox, and to whose newest staging area, member 0 has pointers.
  m.def("pointers_across", [](Workspace& w) {
    const Control& control = *At(w, 0).control;
    std::vector<std::vector<int>> out(2);
    for (int rank = 0; rank < w.ranks(); ++rank) {
      if (control.mailbox[rank] != nullptr) out[0].push_back(rank);
      if (control.memory[control.newest % kGenerations].staging[rank] != nullptr) out[1].push_back(rank);
    }
    return out;
  });
  // Starts again with other members, as ffi/ipc_bindings.cc has it. Returns how often their memory was mapped.
  m.def("adopt", [](Workspace& w, std::vector<int> gone, uint32_t epoch, uint32_t generation) {
    int mapped = 0;
    try {
      w.Quiet(1.0);
      w.Adopt({gone.begin(), gone.end()}, epoch, generation, [&] { ++mapped; }, 1.0);
    } catch (const MemoryError& e) {
      throw std::runtime_error(e.message);
    }
    return mapped;
  });
  // Returns the ranks that member 0's kernels take for dead.
  m.def("dead", [](Workspace& w) {
    std::vector<int> dead;
    for (int rank = 0; rank < w.ranks(); ++rank) {
      if (At(w, 0).mailbox->dead[rank / 32] >> rank % 32 & 1) dead.push_back(rank);
    }
    return dead;
  });
  m.def("settled", [] { return FakeLink::settled; });
  m.def("settled_without", [] { return FakeLink::gone; });
  m.def("settle_late", [](bool late) { FakeLink::late = late; });
  // Sends a chunk that no rank awaits, as an operation does that has failed on another rank.
  m.def("stray_chunk", [](Workspace& w, size_t i, int rank) {
    uint64_t* const counter = At(w, i).rail->peers.counters[rank] + ChunkSignal(w, At(w, i).rank);
    WriteWord(At(w, i), counter, ReadWord(At(w, i), counter) + 1);
  });
  m.def("reclaim", [](Workspace& w) { w.ReclaimIfStale(); });
  // Counts the flag words that are not zero, in the memory that operations of these needs use.
  m.def("flags_up", [](Workspace& w, uint64_t flags) {
    size_t up = 0;
    for (const Member& member : w.members()) {
      const MemoryTable& table = member.control->current;
      for (int half = 0; half < 2; ++half) {
        const char* at = table.staging[member.rank] + half * (table.flag_bytes + table.data_bytes);
        for (uint64_t i = 0; i < flags / 4; ++i) up += reinterpret_cast<const uint32_t*>(at)[i] != 0;
      }
    }
    return up;
  });
  m.def(
      "flights",
      [](std::vector<int64_t> devices, int ranks, int channel, int ranks_per_node) {
        return Registry::Get().Find(std::move(devices), ranks, channel, true, ranks_per_node);
      },
      nb::arg("devices"), nb::arg("ranks"), nb::arg("channel"), nb::arg("ranks_per_node") = 0);
  // Flights, named by the address of a result. A stream is any number.
  m.def("start_flight", [](int ordinal, uintptr_t result, int64_t run) {
    try {
      const void* const name = reinterpret_cast<const void*>(result);
      const Takeoff takeoff = Flights::Get().Fork(&FakeDevices::Get(), ordinal, nullptr, name, run);
      Flights::Get().Started(&FakeDevices::Get(), ordinal, nullptr, name, run, takeoff);
    } catch (const MemoryError& e) {
      throw std::runtime_error(e.message);
    }
  });
  m.def("land_flight", [](int ordinal, uintptr_t result) {
    return Flights::Get().Land(&FakeDevices::Get(), ordinal, reinterpret_cast<const void*>(result), nullptr);
  });
  m.def("abandon_flights",
        [](int ordinal, int64_t run) { Flights::Get().Abandon(&FakeDevices::Get(), ordinal, nullptr, run); });
  m.def("open_flights", [] { return Flights::Get().open(); });
  m.def("marks", [] { return FakeDevices::Get().marks(); });
  m.def("held_back", [] { return FakeDevices::Get().held_back(); });
  m.def("admit", [](Workspace& w, int64_t run) { return w.Admit(run); });
  m.def("epoch", [](Workspace& w, size_t i) { return At(w, i).control->epoch; });
  m.def("set_epoch", [](Workspace& w, size_t i, uint32_t epoch) { At(w, i).control->epoch = epoch; });
  m.def("fail", [](Workspace& w, size_t i, nb::dict record) {
    const ErrorRecord from = RecordOf(record);
    const Member& member = At(w, i);
    member.mailbox->failure = from.failure;
    const uint32_t generation = member.record->generation;
    *member.record = from;
    member.record->generation = generation;
  });
  m.def("leave_out_the_dead", [](Workspace& w) { w.FailOnlyWhenNeeded(); });
  m.def("mailbox_dead", [](Workspace& w, size_t i) { return At(w, i).mailbox->dead; });
  m.def("mailbox_failure", [](Workspace& w, size_t i) { return At(w, i).mailbox->failure; });
  // `scope`: 0, 1 or 2, in the order of `Scope`.
  m.def("failure_text", [](nb::dict record, int channel, int scope) {
    const bool masked = record.contains("masked") && nb::cast<bool>(record["masked"]);
    return FailureText(RecordOf(record), channel, static_cast<Scope>(scope), masked,
                       [](int rank) { return "GPU " + std::to_string(rank); });
  });
}
