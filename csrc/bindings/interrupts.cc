// Runs Python's signal handlers and asynchronous exceptions when a Python thread waits in the core.
#include "base/interrupts.h"

#include <pthread.h>
#include <pybind11/eval.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <thread>

#include "bindings/module.h"

namespace py = pybind11;

namespace ringlet {
namespace {

/// A Python exception that passes through the core.
class PythonInterrupt final : public py::error_already_set, public Interrupted {
 public:
  PythonInterrupt() : Interrupted(py::str(type().attr("__name__"))) {}
};

// When the interpreter ends, it ends a thread that asks for the GIL at once, in the middle of the core.
std::atomic<bool> ending{false};
std::atomic<int> checking{0};

PyObject* nothing = nullptr;  // a Python function: a thread takes asynchronous exceptions when it starts one

struct Check {
  Check()
      : counted((checking.fetch_add(1), !ending.load())), state(counted ? PyGILState_Ensure() : PyGILState_UNLOCKED) {}
  ~Check() {
    if (counted) PyGILState_Release(state);
    checking.fetch_sub(1);
  }
  Check(const Check&) = delete;
  Check& operator=(const Check&) = delete;
  const bool counted;
  const PyGILState_STATE state;
};

/// Signal handlers run in the main thread only; PyThreadState_SetAsyncExc reaches any.
void check_python() {
  if (PyGILState_GetThisThreadState() == nullptr) return;  // a thread of the core's own
  const Check check;
  if (!check.counted) return;
  if (PyErr_CheckSignals() != 0) throw PythonInterrupt();
  const py::object done = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(nothing));
  if (!done) throw PythonInterrupt();
}

}  // namespace

void bind_interrupts(py::module_& m) {
  nothing = py::eval("lambda: None").release().ptr();
  // In a forked child the threads that were in a check do not exist.
  ::pthread_atfork(nullptr, nullptr, [] { checking = 0; });
  set_interrupt_check(&check_python);
  m.def(
      "end_interrupt_checks",
      [] {
        ending = true;
        const py::gil_scoped_release unlocked;
        while (checking.load() > 0) std::this_thread::yield();
      },
      "Before the interpreter ends: threads that still wait leave it alone from here on.");
}

}  // namespace ringlet
