#include "transport/transport.h"

#include <algorithm>

#include "base/processor.h"

namespace ringlet {

void Transport::count_processors(const std::vector<cpu_set_t>& usable) {
  cpu_set_t all;
  CPU_ZERO(&all);
  for (const cpu_set_t& each : usable) {
    if (CPU_COUNT(&each) == 0) return;  // not known
    CPU_OR(&all, &all, &each);
  }
  oversubscribed_ = !one_processor_each(usable);
  const bool all_have_two =
      std::all_of(usable.begin(), usable.end(), [](const cpu_set_t& each) { return CPU_COUNT(&each) >= 2; });
  spare_ = CPU_COUNT(&all) >= 2 * world_ && all_have_two;
}

}  // namespace ringlet
