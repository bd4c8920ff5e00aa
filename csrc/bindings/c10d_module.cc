// What Python sees of the torch.distributed backend.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/c10d_backend.h"
#include "bindings/module.h"
#include "bindings/registered_allocator.h"

namespace py = pybind11;

namespace ringlet {

void bind_c10d(py::module_& m) {
  py::module_::import("torch.distributed");  // its classes must be registered before ours names one as its base
  using Options = C10dBackend::GroupOptions;
  py::class_<Options, c10::intrusive_ptr<Options>, c10d::Backend::Options>(
      m, "BackendOptions",
      "What `pg_options=` of init_process_group and new_group takes. algorithm: of all-reduces, by name.")
      .def(py::init<std::string>(), py::arg("algorithm") = "auto")
      .def_readwrite("algorithm", &Options::algorithm);
  py::class_<C10dBackend, c10::intrusive_ptr<C10dBackend>, c10d::Backend>(m, "Backend")
      .def_property("algorithm", &C10dBackend::algorithm, &C10dBackend::set_algorithm,
                    "All-reduce algorithm by name; \"auto\" lets the selector choose by size and world.")
      .def_property_readonly("options", &C10dBackend::getBackendOptions)
      .def_property_readonly(
          "bytes_received", [](const C10dBackend& backend) { return backend.group().bytes_received(); },
          "Bytes that this rank's collectives read out of peers' memory, ever.")
      .def(
          "get_error", [](C10dBackend& backend) { return static_cast<int>(backend.getError()); },
          "0: well, 1: Timeout, 2: another failure, 3: PeerLost; of the error that poisoned the group.");
  m.def("make_backend", &make_backend, py::arg("store"), py::arg("name"), py::arg("rank"), py::arg("size"),
        py::arg("timeout"), py::call_guard<py::gil_scoped_release>());
  m.def("use_registered_allocator", &use_registered_allocator, py::arg("enabled"));
  m.def("registered_allocator_cache_bytes", &registered_allocator_cache_bytes);
}

}  // namespace ringlet
