// What Python hands to the calls, as C++: InvalidUsage, naming the argument, for what has the wrong type or no meaning.
//
// Thread safety: all need the GIL.
#pragma once

#include <Python.h>

#include <chrono>
#include <optional>
#include <string_view>

#include "base/dtype.h"
#include "engine/call.h"

namespace ringlet {

/// A view of the object's own text.
std::string_view text_of(PyObject* object, const char* what);

ReduceOp parse_op(PyObject* object);

/// InvalidUsage for a call on the host's tensors whose algorithm only GPUs have.
void check_on_host(const Call& call);

/// An integer, such as a rank: no float, nothing that does not fit.
int integer_of(PyObject* object, const char* what);

double number_of(PyObject* object, const char* what);

bool truth_of(PyObject* object);

/// Seconds or datetime.timedelta; none for None. At least 1 ms where it is positive; infinity and what is too long for
/// a clock mean kLongestTimeout. InvalidUsage for NaN, what is negative, and zero unless `may_be_zero`.
std::optional<std::chrono::milliseconds> timeout_of(PyObject* object, bool may_be_zero = false);

}  // namespace ringlet
