#include "transport/transport.h"

#include <sched.h>

namespace ringlet {

void Transport::find_oversubscription() {
  cpu_set_t processors;
  oversubscribed_ = ::sched_getaffinity(0, sizeof processors, &processors) == 0 && CPU_COUNT(&processors) < world_;
}

}  // namespace ringlet
