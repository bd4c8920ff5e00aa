// Which processor this is, and which processors a thread may use. Thread safety: any.
#pragma once

#include <sched.h>

#include <string>
#include <vector>

namespace ringlet {

/// Vendor, family and model in one word, "GenuineIntel-6-207", as /proc/cpuinfo has them; "unknown" where it has none.
const std::string& processor_model();

/// The processors that this thread may run on; none if they cannot be told (there are more than CPU_SETSIZE).
cpu_set_t usable_processors() noexcept;

/// Whether there is a processor of its own for the owner of each set.
bool one_processor_each(const std::vector<cpu_set_t>& usable);

}  // namespace ringlet
