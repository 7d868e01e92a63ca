// Python bindings of ffi/ipc_memory.h. xen_moe_jax/backends/cuda/members.py decides when processes show each other
// their memory.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <set>
#include <string>
#include <vector>

#include "ffi/ipc_memory.h"
#include "ffi/memory_bindings.h"
#include "ffi/registry.h"

namespace nb = nanobind;

namespace xen_moe {
namespace {

// The name of a workspace, the same in every process of its group.
std::string NameOf(const Workspace& workspace) {
  return std::to_string(workspace.ranks()) + " ranks, channel " + std::to_string(workspace.channel()) +
         (workspace.for_flights() ? ", flights" : "");
}

nb::bytes Bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }

}  // namespace

void BindIpc(nb::module_& m) {
  m.def("ipc_start", [](int process, int num_processes, int ordinal) {
    WithoutGil([&] { Registry::Get().SetProvider(StartIpc(process, num_processes, ordinal)); });
  });
  // Returns, for each workspace that has memory, (name, handle of its mailbox, handle of its staging memory or b"",
  // bytes of the staging memory's flags, bytes of its data, latest epoch).
  m.def("ipc_show", [] {
    nb::list out;
    for (const auto& workspace : Registry::Get().All()) {
      Needs needs;
      std::string handles[2];
      uint32_t epoch = 0;
      // The calls wait for the driver, and may throw MemoryError, which becomes a RuntimeError here.
      const bool made = WithoutGil([&] {
        const auto shown = workspace->Shown(&needs);
        if (shown.first == nullptr) return false;
        handles[0] = ShowIpc(shown.first);
        if (shown.second != nullptr) handles[1] = ShowIpc(shown.second);
        epoch = workspace->NewestEpoch();
        return true;
      });
      if (!made) continue;
      out.append(nb::make_tuple(NameOf(*workspace), Bytes(handles[0]), Bytes(handles[1]), needs.flag_bytes,
                                needs.data_bytes, epoch));
    }
    return out;
  });
  m.def("ipc_quiet", [](double seconds) {
    WithoutGil([&] {
      for (const auto& workspace : Registry::Get().All()) workspace->Interrupt(seconds);
      for (const auto& workspace : Registry::Get().All()) workspace->Quiet(seconds);
    });
  });
  m.def("ipc_interrupt", [](double seconds) {
    WithoutGil([&] {
      for (const auto& workspace : Registry::Get().All()) workspace->Interrupt(seconds);
    });
  });
  // Maps the memory of the workspace `name` and starts it again. `mailboxes`, `stagings`: the handles of all processes,
  // b"" for a process that is absent.
  m.def("ipc_adopt", [](const std::string& name, nb::list mailboxes, nb::list stagings, uint32_t epoch,
                        uint32_t generation, double seconds) {
    std::vector<std::string> handles[2];
    for (nb::handle one : mailboxes) handles[0].emplace_back(nb::cast<nb::bytes>(one).c_str(), nb::len(one));
    for (nb::handle one : stagings) handles[1].emplace_back(nb::cast<nb::bytes>(one).c_str(), nb::len(one));
    std::set<int> gone;
    for (size_t p = 0; p < handles[0].size(); ++p) {
      if (handles[0][p].empty()) gone.insert(static_cast<int>(p));
    }
    WithoutGil([&] {
      for (const auto& workspace : Registry::Get().All()) {
        Needs needs;
        const auto own = workspace->Shown(&needs);
        if (own.first == nullptr || NameOf(*workspace) != name) continue;
        workspace->Adopt(
            gone, epoch, generation,
            [&] {
              for (size_t p = 0; p < handles[0].size(); ++p) {
                ReachIpc(own.first, static_cast<int>(p), handles[0][p]);
                if (own.second != nullptr) ReachIpc(own.second, static_cast<int>(p), handles[1][p]);
              }
            },
            seconds);
      }
    });
  });
}

}  // namespace xen_moe
