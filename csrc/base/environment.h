// Numbers in environment variables. Thread safety: as getenv.
#pragma once

#include <cstddef>

namespace ringlet {

/// The value of `variable` in bytes; `fallback` if the variable is not set or is empty. The variable counts units of
/// `unit` bytes, for example 1 << 20. Throws InvalidUsage if it is not a whole number, is less than `least`, or is more
/// than an address space has.
size_t bytes_from_environment(const char* variable, size_t unit, size_t least, size_t fallback);

}  // namespace ringlet
