// Which processor this is. Thread safety: any.
#pragma once

#include <string>

namespace ringlet {

/// Vendor, family and model in one word, "GenuineIntel-6-207", as /proc/cpuinfo has them; "unknown" where it has none.
const std::string& processor_model();

}  // namespace ringlet
