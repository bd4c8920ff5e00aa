// Runs Python's signal handlers and asynchronous exceptions when a Python thread waits in the core.
#include "base/interrupts.h"

#include <pybind11/eval.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/gil.h"
#include "bindings/module.h"

namespace py = pybind11;

namespace ringlet {
namespace {

/// A Python exception that passes through the core.
class PythonInterrupt final : public py::error_already_set, public Interrupted {
 public:
  PythonInterrupt() : Interrupted(py::str(type().attr("__name__"))) {}
};

PyObject* nothing = nullptr;  // a Python function: a thread takes asynchronous exceptions when it starts one

/// Signal handlers run in the main thread only; PyThreadState_SetAsyncExc reaches any.
void check_python() {
  if (PyGILState_GetThisThreadState() == nullptr) return;  // a thread of the core's own
  const AskForGil ask;                                     // until the handlers have run
  if (!ask.granted) return;
  const GilTaken taken(ask);
  if (PyErr_CheckSignals() != 0) throw PythonInterrupt();
  const py::object done = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(nothing));
  if (!done) throw PythonInterrupt();
}

}  // namespace

void bind_interrupts(py::module_& m) {
  nothing = py::eval("lambda: None").release().ptr();
  set_interrupt_check(&check_python);
  m.def("python_ends", &python_ends, "Before the interpreter ends: other threads leave it alone from here on.");
}

}  // namespace ringlet
