#include "transport/transport.h"

#include <sched.h>

namespace ringlet {

void Transport::count_processors() {
  cpu_set_t processors;
  if (::sched_getaffinity(0, sizeof processors, &processors) != 0) return;
  oversubscribed_ = CPU_COUNT(&processors) < world_;
  spare_ = CPU_COUNT(&processors) >= 2 * world_;
}

}  // namespace ringlet
