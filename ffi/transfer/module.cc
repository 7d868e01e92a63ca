// xen_moe_jax.transfer._native: the posting loop and the copies below it, for Python. Addresses are passed as integers.
// Python keeps a link, a key and the memory that they name alive for as long as a posting uses them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <stdexcept>

#include "ffi/transfer/posting.h"

namespace nb = nanobind;

namespace xen_moe::transfer {
namespace {

using Runs = nb::ndarray<const int64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;

std::vector<Run> ToRuns(const Runs& runs) {
  const Run* first = reinterpret_cast<const Run*>(runs.data());
  return {first, first + runs.shape(0)};
}

template <class Function>
void SetAddress(Function& function, uint64_t address) {
  function = reinterpret_cast<Function>(address);
}

void* Pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

// Copies that end sooner than another thread could take the GIL keep it.
using MaybeRelease = std::optional<nb::gil_scoped_release>;

void UseUcx(Link& link, const std::vector<uint64_t>& calls, uint64_t worker, uint64_t endpoint,
            const std::vector<uint64_t>& parameters, uint64_t flush_parameters) {
  if (calls.size() != 6 || parameters.size() != 2) throw std::invalid_argument("six functions, two parameters");
  SetAddress(link.put, calls[0]);
  SetAddress(link.get, calls[1]);
  SetAddress(link.flush, calls[2]);
  SetAddress(link.progress, calls[3]);
  SetAddress(link.check, calls[4]);
  SetAddress(link.release, calls[5]);
  link.worker = Pointer(worker);
  link.endpoint = Pointer(endpoint);
  link.parameters[0] = Pointer(parameters[0]);
  link.parameters[1] = Pointer(parameters[1]);
  link.flush_parameters = Pointer(flush_parameters);
}

Driver ToDriver(const std::vector<uint64_t>& calls, uint64_t context, uint64_t stream) {
  if (calls.size() != 8) throw std::invalid_argument("eight functions");
  Driver driver{};
  SetAddress(driver.copy, calls[0]);
  SetAddress(driver.event_create, calls[1]);
  SetAddress(driver.event_record, calls[2]);
  SetAddress(driver.event_query, calls[3]);
  SetAddress(driver.event_destroy, calls[4]);
  SetAddress(driver.push, calls[5]);
  SetAddress(driver.pop, calls[6]);
  SetAddress(driver.batch, calls[7]);
  driver.context = Pointer(context);
  driver.stream = Pointer(stream);
  return driver;
}

}  // namespace

NB_MODULE(_native, module) {
  nb::set_leak_warnings(false);  // An engine may be open when Python ends.
  nb::class_<Posting>(module, "Posting")
      .def("advance", &Posting::Advance, nb::arg("is_open"), nb::arg("polls"), nb::call_guard<nb::gil_scoped_release>())
      .def("spin", &Posting::Spin, nb::arg("nanoseconds"), nb::call_guard<nb::gil_scoped_release>())
      .def("stop", &Posting::Stop)
      .def_prop_ro("bytes_posted", &Posting::bytes_posted)
      .def_prop_ro("status", &Posting::status);

  nb::class_<Link>(module, "Link")
      .def(
          "__init__",
          [](Link* link, int64_t slice_host, int64_t slice_gpu, int64_t pieces) {
            new (link) Link();
            link->slice[0] = slice_host;
            link->slice[1] = slice_gpu;
            link->pieces = pieces;
          },
          nb::arg("slice_host"), nb::arg("slice_gpu"), nb::arg("pieces"))
      .def("use_ucx", &UseUcx, nb::arg("calls"), nb::arg("worker"), nb::arg("endpoint"), nb::arg("parameters"),
           nb::arg("flush_parameters"))
      .def("use_driver", &UseDriver, nb::arg("copies"), nb::keep_alive<1, 2>())
      .def("use_process", &UseProcess, nb::arg("process"), nb::keep_alive<1, 2>())
      .def(
          "start",
          [](const Link& link, bool is_get, uint64_t key, int memory, const Runs& runs, int polls, bool keeps_gil) {
            std::vector<Run> copied = ToRuns(runs);
            MaybeRelease release;
            if (!keeps_gil) release.emplace();
            return Start(link, is_get, Pointer(key), memory, std::move(copied), polls);
          },
          nb::arg("is_get"), nb::arg("key"), nb::arg("memory"), nb::arg("runs"), nb::arg("polls"), nb::arg("keeps_gil"),
          nb::keep_alive<0, 1>());

  nb::class_<Prepared>(module, "Prepared")
      .def(
          "__init__",
          [](Prepared* prepared, const Link& link, uint64_t key, int memory, const Runs& runs, int polls) {
            new (prepared) Prepared(link, Pointer(key), memory, ToRuns(runs), polls);
          },
          nb::arg("link"), nb::arg("key"), nb::arg("memory"), nb::arg("runs"), nb::arg("polls"), nb::keep_alive<1, 2>())
      .def("start", &Prepared::Start, nb::arg("local"), nb::call_guard<nb::gil_scoped_release>(),
           nb::keep_alive<0, 1>())
      .def("start_short", &Prepared::Start, nb::arg("local"), nb::keep_alive<0, 1>());

  nb::class_<PeerMemory>(module, "PeerMemory")
      .def(
          "__init__",
          [](PeerMemory* memory, uint64_t remote, uint64_t bytes, uint64_t here) {
            new (memory) PeerMemory{remote, bytes, here};
          },
          nb::arg("remote"), nb::arg("nbytes"), nb::arg("here"))
      .def_rw("here", &PeerMemory::here)
      .def_ro("nbytes", &PeerMemory::bytes)
      .def_prop_ro("address", [](const PeerMemory& memory) { return reinterpret_cast<uint64_t>(&memory); });

  nb::class_<DriverCopies>(module, "DriverCopies")
      .def(
          "__init__",
          [](DriverCopies* copies, const std::vector<uint64_t>& calls, uint64_t context, uint64_t stream) {
            new (copies) DriverCopies(ToDriver(calls, context, stream));
          },
          nb::arg("calls"), nb::arg("context"), nb::arg("stream"))
      .def("close", &DriverCopies::Close)
      .def_ro("error", &DriverCopies::error);

  nb::class_<PeerProcess>(module, "PeerProcess")
      .def(
          "__init__",
          [](PeerProcess* process, int32_t id, int32_t descriptor) { new (process) PeerProcess{id, descriptor}; },
          nb::arg("id"), nb::arg("descriptor"));
}

}  // namespace xen_moe::transfer
