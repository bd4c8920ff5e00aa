// C++ errors as ringlet.errors' classes.
#pragma once

#include "base/error.h"

namespace ringlet {

/// Sets the Python error of the class that belongs to the kind, unless a signal is pending whose handler raises. Needs the
/// GIL.
void set_python_error(const Error& error);

}  // namespace ringlet
