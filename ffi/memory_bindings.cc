#include "ffi/memory_bindings.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "ffi/registry.h"

namespace nb = nanobind;

namespace xen_moe {
namespace {

// Wraps a Python function (key, said, seconds, without_dead) -> (ticket, [message of each process], [processes that are
// left out]), with the meaning of ffi/agreement.h.
Agree AgreeThrough(nb::object function) {
  // Never destroyed: at exit the interpreter may end first.
  auto* kept = new nb::object(std::move(function));
  return [kept](const std::string& key, const std::string& said, double seconds, bool without_dead) {
    nb::gil_scoped_acquire gil;
    try {
      nb::object answer = (*kept)(key, nb::bytes(said.data(), said.size()), seconds, without_dead);
      Agreed agreed;
      agreed.ticket = nb::cast<uint64_t>(answer[0]);
      for (nb::handle one : nb::cast<nb::list>(answer[1])) {
        const nb::bytes text = nb::cast<nb::bytes>(one);
        agreed.said.emplace_back(text.c_str(), text.size());
      }
      for (nb::handle one : nb::cast<nb::list>(answer[2])) agreed.gone.push_back(nb::cast<int>(one));
      return agreed;
    } catch (nb::python_error& e) {
      throw MemoryError{false, nb::cast<std::string>(nb::str(e.value()))};
    }
  };
}

// Wraps two Python functions. `describe`: () -> bool, whether this process has GPUs; if so, it has called `configure`.
// `start_memory`: () -> None.
JobSetup SetUpThrough(nb::object describe, nb::object start_memory) {
  // Never destroyed: at exit the interpreter may end first.
  auto* kept = new std::pair<nb::object, nb::object>(std::move(describe), std::move(start_memory));
  const auto call = [](const nb::object& function) {
    nb::gil_scoped_acquire gil;
    try {
      nb::object answer = function();
      return answer.is_none() || nb::cast<bool>(answer);
    } catch (nb::python_error& e) {
      Refuse(nb::cast<std::string>(nb::str(e.value())));
    }
  };
  return {[kept, call] { return call(kept->first); }, [kept, call] { call(kept->second); }};
}

}  // namespace

void BindMemory(nb::module_& m, Devices* gpus, const LinkKernels* link) {
  m.attr("devices_per_process") = kDevicesPerProcess;
  m.def("configure", [gpus, link](int process, int num_processes, std::vector<int64_t> devices) {
    Job job;
    job.process = process;
    job.num_processes = num_processes;
    job.devices = std::move(devices);
    job.gpus = gpus;
    job.link = link;
    Registry::Get().Configure(std::move(job));
  });
  m.def("set_up_job", [](nb::object describe, nb::object start_memory) {
    Registry::Get().SetUp(SetUpThrough(std::move(describe), std::move(start_memory)));
  });
  m.def("set_provider", [](nb::capsule table) {
    Registry::Get().SetProvider(static_cast<const MemoryProvider*>(table.data(kMemoryProviderCapsule)));
  });
  m.def("set_agreement", [](nb::object function) { Registry::Get().SetAgree(AgreeThrough(std::move(function))); });
  // Keeps the symmetric memory of an axis on a channel as long as the Python object lives.
  nb::class_<Workspace>(m, "Workspace")
      .def("reserve",
           [](Workspace& w, uint64_t bytes, double seconds) { WithoutGil([&] { w.Reserve(bytes, seconds); }); })
      .def("release", [](Workspace& w, double seconds) { WithoutGil([&] { w.Release(seconds); }); });
  // `ranks_per_node`: 0 stands for all ranks.
  m.def(
      "workspace",
      [](std::vector<int64_t> devices, int ranks, int channel, int ranks_per_node) {
        return WithoutGil(
            [&] { return Registry::Get().Find(std::move(devices), ranks, channel, false, ranks_per_node); });
      },
      nb::arg("devices"), nb::arg("ranks"), nb::arg("channel"), nb::arg("ranks_per_node") = 0);
  m.def("reset", [](double seconds) { WithoutGil([&] { Registry::Get().ResetAll(seconds); }); });
  m.def("mark_dead", [](int process, bool clean) { WithoutGil([&] { Registry::Get().MarkDead(process, clean); }); });
  m.def("renumber", [](uint32_t epoch) {
    WithoutGil([&] {
      for (const auto& workspace : Registry::Get().All()) workspace->SetEpochForTest(epoch);
    });
  });
  m.def("gone", [] {
    const std::set<int> gone = Registry::Get().Gone();
    return std::vector<int>(gone.begin(), gone.end());
  });
  m.def("failure", [] { return Registry::Get().Failure(); });
  m.def("workspaces", [] {
    nb::list out;
    for (const auto& workspace : Registry::Get().All()) {
      if (workspace->for_flights() && workspace->generation() == 0) continue;  // no operation has been started
      nb::dict d;
      d["ranks"] = workspace->ranks();
      d["ranks_per_node"] = workspace->ranks_per_node();
      d["channel"] = workspace->channel();
      d["flights"] = workspace->for_flights();
      d["devices"] = workspace->devices();
      d["staging_bytes"] = workspace->staging_bytes();
      d["scratch_bytes"] = workspace->scratch_bytes();
      d["generation"] = workspace->generation();
      d["generations_held"] = workspace->held();
      d["memory"] = workspace->memory();
      d["launches"] = workspace->launches.load();
      d["captured"] = workspace->captured.load();
      out.append(d);
    }
    return out;
  });
}

}  // namespace xen_moe
