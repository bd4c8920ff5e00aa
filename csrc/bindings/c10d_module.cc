// What Python sees of the torch.distributed backend.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/c10d_backend.h"
#include "bindings/gil.h"
#include "bindings/log.h"
#include "bindings/module.h"
#include "bindings/registered_allocator.h"
#include "engine/call_label.h"

namespace py = pybind11;

namespace ringlet {

namespace {

void bind_options(py::module_& m) {
  using Options = C10dBackend::GroupOptions;
  py::class_<Options, c10::intrusive_ptr<Options>, c10d::Backend::Options>(
      m, "BackendOptions",
      "What `pg_options=` of init_process_group and new_group takes. algorithm: of all-reduces, by name. transport: "
      "\"auto\" (shared memory inside hosts, TCP between them), \"shared_memory\" or \"tcp\". max_ctas: how many of a "
      "GPU's "
      "processors calls take at most; 0: no limit.")
      .def(py::init<std::string, std::string, int64_t>(), py::arg("algorithm") = "auto", py::arg("transport") = "auto",
           py::arg("max_ctas") = 0)
      .def_readwrite("algorithm", &Options::algorithm)
      .def_readwrite("transport", &Options::transport)
      .def_readwrite("max_ctas", &Options::max_ctas)
      .def("__repr__",
           [](const Options& options) {
             return "<ringlet.BackendOptions: algorithm '" + options.algorithm + "', transport '" + options.transport +
                    "', max_ctas " + std::to_string(options.max_ctas) + ">";
           })
      // split_group copies its parent's.
      .def("__deepcopy__",
           [](const Options& options, const py::dict&) { return c10::make_intrusive<Options>(options); });
}

}  // namespace

void bind_c10d(py::module_& m) {
  py::module_::import("torch.distributed");  // its classes must be registered before ours names one as its base
  bind_options(m);
  m.def("make_call_labels", &make_call_labels, py::arg("texts"),
        "A number for each text, for set_call_label(). Ranks that give the same texts get the same numbers.");
  m.def("set_call_label", &set_call_label, py::arg("label"),
        "What the calls of torch.distributed that this thread makes next are for; 0: not said. Ranks compare it.");
  py::class_<C10dBackend, c10::intrusive_ptr<C10dBackend>, c10d::Backend>(m, "Backend")
      .def_property("algorithm", &C10dBackend::algorithm, &C10dBackend::set_algorithm,
                    "All-reduce algorithm by name; \"auto\" lets the selector choose by size and world.")
      .def_property(
          "max_ctas", [](const C10dBackend& backend) { return backend.group().max_ctas(); }, &C10dBackend::set_max_ctas)
      .def_property_readonly("options", &C10dBackend::getBackendOptions)
      // If the default group is bound to a GPU, new_group calls this on the ranks outside the new group. The members
      // make the group without them.
      .def(
          "perform_nocolor_split", [](const C10dBackend&, const py::object&) {}, py::arg("device"))
      .def_property_readonly(
          "bytes_received", [](const C10dBackend& backend) { return backend.group().bytes_received(); },
          "Bytes that this rank's collectives took in from peers, ever.")
      .def("fail", &C10dBackend::fail, py::arg("reason"), py::call_guard<GilReleased>(),
           "Poisons the group: ranks that wait in a call, and later calls, raise InvalidUsage with `reason`.")
      .def(
          "calls", [](const C10dBackend& backend) { return past_calls(backend.group()); },
          "This rank's last 16 calls, the oldest first; see ringlet.Group.calls.")
      .def(
          "tell_made", [](const C10dBackend& backend, double seconds) { backend.group().tell_made(seconds); },
          py::arg("seconds"))
      .def_property_readonly("transport", [](const C10dBackend& backend) { return backend.group().transport(); })
      .def_property_readonly("overlaps", [](const C10dBackend& backend) { return backend.group().overlaps(); })
      .def_property_readonly("hosts", [](const C10dBackend& backend) { return backend.group().host_of_rank(); })
      .def(
          "get_error", [](C10dBackend& backend) { return static_cast<int>(backend.getError()); },
          "0: well, 1: Timeout, 2: another failure, 3: PeerLost; of the error that poisoned the group.");
  m.def(
      "make_backend",
      [](const c10::intrusive_ptr<c10d::Store>& store, const std::string& name, int rank, int size,
         std::chrono::milliseconds timeout, const std::string& transport) {
        return make_backend(store, name, {rank, size}, parse_carrier(transport), timeout);
      },
      py::arg("store"), py::arg("name"), py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("transport"),
      py::call_guard<GilReleased>());
  m.def("close_backends", &close_backends, py::call_guard<GilReleased>());
  m.def("use_registered_allocator", &use_registered_allocator, py::arg("enabled"));
  m.def("begin_registered_tensors", &begin_registered_tensors);
  m.def("end_registered_tensors", &end_registered_tensors);
  m.def("registered_allocator_cache_bytes", &registered_allocator_cache_bytes);
}

}  // namespace ringlet
