#include "base/environment.h"

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/error.h"

namespace ringlet {

size_t bytes_from_environment(const char* variable, size_t unit, size_t least, size_t fallback) {
  const char* given = std::getenv(variable);
  if (given == nullptr || *given == '\0') return fallback;
  size_t number = 0;
  const char* end = given + std::strlen(given);
  const auto read = std::from_chars(given, end, number);
  if (read.ec != std::errc() || read.ptr != end || number < least || number > SIZE_MAX / unit) {
    const std::string counted = unit == 1 ? "bytes" : "MiB";
    throw InvalidUsage(std::string(variable) + "=\"" + given + "\" is not a number of " + counted +
                       (least == 0 ? "" : " from " + std::to_string(least) + " up"));
  }
  return number * unit;
}

}  // namespace ringlet
