// C++ errors as ringlet.errors' classes.
#pragma once

#include <exception>

namespace ringlet {

/// Sets the Python error for what a call of ringlet's own threw: the class of its kind for an Error, SystemError where
/// memory or another thing of the system ran out or torch failed; a Python error stays what it is. A pending signal
/// whose handler raises comes first. Needs the GIL.
void set_python_error(const std::exception_ptr& thrown);

}  // namespace ringlet
