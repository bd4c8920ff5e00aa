#include "base/process.h"

#include <pthread.h>
#include <unistd.h>

namespace ringlet {

std::atomic<int> process_number = [] {
  ::pthread_atfork(nullptr, nullptr, [] { process_number.store(::getpid(), std::memory_order_relaxed); });
  return ::getpid();
}();

}  // namespace ringlet
