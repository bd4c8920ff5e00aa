#include "bindings/arguments.h"

#include <datetime.h>
#include <pybind11/pybind11.h>

#include <cmath>
#include <limits>
#include <string>

#include "base/deadline.h"
#include "base/error.h"

namespace py = pybind11;

namespace ringlet {
namespace {

using std::chrono::milliseconds;

std::string shown(PyObject* object) {
  PyErr_Clear();
  const auto text = py::reinterpret_steal<py::object>(PyObject_Repr(object));
  if (text) return text.cast<std::string>();
  PyErr_Clear();
  return std::string("a ") + Py_TYPE(object)->tp_name;
}

/// Infinite if Python's integer is too large for a double; none if the object is not a number.
std::optional<double> as_number(PyObject* object) {
  const double number = PyFloat_AsDouble(object);
  if (number != -1.0 || PyErr_Occurred() == nullptr) return number;
  const bool large = PyErr_ExceptionMatches(PyExc_OverflowError) && PyLong_Check(object);
  PyErr_Clear();
  if (!large) return std::nullopt;
  const double infinity = std::numeric_limits<double>::infinity();
  return PyObject_RichCompareBool(object, Py_False, Py_GT) == 1 ? infinity : -infinity;
}

/// The seconds of a timedelta or a number; none for any other object.
std::optional<double> seconds_of(PyObject* object) {
  if (PyDateTimeAPI == nullptr) PyDateTime_IMPORT;
  if (PyDateTimeAPI == nullptr) throw py::error_already_set();
  if (!PyDelta_Check(object)) return as_number(object);
  return PyDateTime_DELTA_GET_DAYS(object) * 86400.0 + PyDateTime_DELTA_GET_SECONDS(object) +
         PyDateTime_DELTA_GET_MICROSECONDS(object) * 1e-6;
}

[[noreturn]] void refuse(const char* call, const std::string& parameter_must, const std::string& got) {
  throw InvalidUsage(std::string(call) + ": " + parameter_must + ", got " + got);
}

[[noreturn]] void refuse_timeout(PyObject* object, bool may_be_zero) {
  throw InvalidUsage(std::string("timeout must be seconds ") + (may_be_zero ? "from 0 on" : "above 0") +
                     " or a timedelta, got " + shown(object));
}

}  // namespace

std::string_view text_of(PyObject* object, const char* call, const char* parameter) {
  Py_ssize_t length = 0;
  const char* text = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, &length) : nullptr;
  if (text == nullptr) refuse(call, std::string(parameter) + " must be a string", shown(object));
  return {text, static_cast<size_t>(length)};
}

ReduceOp parse_op(PyObject* object, const char* call) {
  static PyObject* const sum = PyUnicode_InternFromString(name(ReduceOp::sum));  // as Python does with literals
  if (object == sum) [[likely]]
    return ReduceOp::sum;
  const std::string_view text = text_of(object, call, "op");
  std::string known;
  for (int i = 0; i < kReduceOps; ++i) {
    const auto op = static_cast<ReduceOp>(i);
    if (text == name(op)) return op;
    known += std::string(i ? ", " : "") + name(op);
  }
  refuse(call, "op must be one of " + known, '"' + std::string(text) + '"');
}

int integer_of(PyObject* object, const char* call, const char* parameter) {
  const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(object));
  if (!index) refuse(call, std::string(parameter) + " must be an integer", shown(object));
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow == 0 && value >= std::numeric_limits<int>::min() && value <= std::numeric_limits<int>::max()) {
    return static_cast<int>(value);
  }
  refuse(call, std::string(parameter) + " must be a rank of the group", shown(index.ptr()));
}

double number_of(PyObject* object, const char* call, const char* parameter) {
  const std::optional<double> number = as_number(object);
  if (!number) refuse(call, std::string(parameter) + " must be a number", shown(object));
  return *number;
}

bool truth_of(PyObject* object) {
  const int truth = PyObject_IsTrue(object);
  if (truth < 0) throw py::error_already_set();
  return truth != 0;
}

std::optional<milliseconds> timeout_of(PyObject* object, bool may_be_zero) {
  if (object == Py_None) return std::nullopt;
  const std::optional<double> seconds = seconds_of(object);
  if (may_be_zero && seconds == 0.0) return milliseconds(0);
  if (!seconds || std::isnan(*seconds) || *seconds <= 0) refuse_timeout(object, may_be_zero);
  const auto longest = static_cast<double>(kLongestTimeout.count());
  return milliseconds(std::max(1LL, std::llround(std::min(*seconds * 1000, longest))));
}

milliseconds required_timeout_of(PyObject* object) {
  const std::optional<milliseconds> timeout = timeout_of(object);
  if (!timeout) refuse_timeout(object, /*may_be_zero=*/false);
  return *timeout;
}

Collective checked_collective(const std::string& name) {
  const std::optional<Collective> found = parse_collective(name);
  if (!found) throw InvalidUsage("collective must be one of " + collective_names() + ", got \"" + name + "\"");
  return *found;
}

void check_on_host(const Call& call) {
  if (!is_nccls_own(call.algorithm)) return;
  throw InvalidUsage(std::string(name(call.collective)) +
                     ": the algorithm nccl takes tensors on a GPU; for tensors on the host choose auto, or one of " +
                     algorithm_names(call.collective));
}

}  // namespace ringlet
