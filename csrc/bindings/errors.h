// Converts C++ errors into the classes of ringlet.errors.
#pragma once

#include <exception>

namespace ringlet {

/// Sets the Python error for the exception that a call threw: the class of its kind for an Error, ResourceError if
/// memory or another resource ran out or torch failed. A Python error stays as it is. If the handler of a pending
/// signal raises, that exception comes first. Needs the GIL.
void set_python_error(const std::exception_ptr& thrown);

}  // namespace ringlet
