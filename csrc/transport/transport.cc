#include "transport/transport.h"

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
  spare_ = CPU_COUNT(&all) >= 2 * world_ && CPU_COUNT(&usable[static_cast<size_t>(rank_)]) >= 2;
}

}  // namespace ringlet
