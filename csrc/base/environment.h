// Numbers that the environment gives.
//
// Thread safety: that of getenv.
#pragma once

#include <cstddef>

namespace ringlet {

/// `fallback` where the variable is not set or empty; InvalidUsage where it is no whole number, is less than `least`,
/// or is more than an address space has. `unit`, in bytes, is what is counted, e.g. 1 << 20; the result is in bytes.
size_t bytes_from_environment(const char* variable, size_t unit, size_t least, size_t fallback);

}  // namespace ringlet
