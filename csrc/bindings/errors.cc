#include "bindings/errors.h"

#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include <new>
#include <string>
#include <system_error>

#include "base/error.h"
#include "bindings/module.h"

namespace py = pybind11;

namespace ringlet {
namespace {

void raise(ErrorKind kind, const std::string& message, bool reported = false) {
  // Ctrl-C in a terminal reaches all ranks. This rank's own interrupt says more than the report that others ended.
  if (PyErr_CheckSignals() != 0) return;
  const py::object type = py::module_::import("ringlet.errors").attr(name(kind));
  const py::object error = type(message);
  if (reported) error.attr("reported") = true;
  PyErr_SetObject(type.ptr(), error.ptr());
}

/// Translates the errors that any code may throw. pybind11 handles the other ones.
void set_own_error(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    raise(error.kind(), error.what(), error.reported());
  } catch (const std::bad_alloc&) {
    raise(ErrorKind::resource_error, "out of memory: check the limits on memory (ulimit -v, or the container's limit)");
  } catch (const std::system_error& error) {
    raise(ErrorKind::resource_error, error.what());
  } catch (const c10::OutOfMemoryError& error) {
    raise(ErrorKind::device_error, error.what_without_backtrace());
  } catch (const c10::Error& error) {
    raise(ErrorKind::resource_error, std::string("torch failed: ") + error.what_without_backtrace());
  }
}

}  // namespace

void set_python_error(const std::exception_ptr& thrown) {
  try {
    set_own_error(thrown);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

void bind_errors(py::module_&) {
  // For all modules: torch's own call this library as a backend.
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const Error& error) {
      raise(error.kind(), error.what(), error.reported());
    }
  });
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    if (thrown) set_own_error(thrown);
  });
}

}  // namespace ringlet
