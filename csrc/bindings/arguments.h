// Converts the arguments of Python's calls. If an argument has the wrong type or an impossible value, each function
// throws InvalidUsage, which names the parameter.
//
// Thread safety: the caller holds the GIL.
#pragma once

#include <Python.h>

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

#include "base/dtype.h"
#include "engine/call.h"
#include "schedule/collective.h"

namespace ringlet {

/// A view of the string object's own text.
std::string_view text_of(PyObject* object, const char* call, const char* parameter);

ReduceOp parse_op(PyObject* object, const char* call);

/// A rank as an integer. Refuses floats, and integers that do not fit into an int.
int integer_of(PyObject* object, const char* call, const char* parameter);

/// InvalidUsage for a call on the host's tensors whose algorithm only GPUs have.
void check_on_host(const Call& call);

double number_of(PyObject* object, const char* call, const char* parameter);

bool truth_of(PyObject* object);

/// Converts seconds or a datetime.timedelta; none for None. A positive timeout becomes at least 1 ms, and at most
/// kLongestTimeout. InvalidUsage for NaN, for negative numbers, and for zero unless `may_be_zero`.
std::optional<std::chrono::milliseconds> timeout_of(PyObject* object, bool may_be_zero = false);
/// The same, and None is refused.
std::chrono::milliseconds required_timeout_of(PyObject* object);

/// Throws InvalidUsage, which names all collectives, for another name.
Collective checked_collective(const std::string& name);

}  // namespace ringlet
