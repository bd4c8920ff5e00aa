#include "transport/transport.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

#include "base/error.h"
#include "base/processor.h"
#include "base/system_call.h"

namespace ringlet {

Descriptor make_wakeup() {
  Descriptor wakeup(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!wakeup.valid()) throw_errno("eventfd");
  return wakeup;
}

void signal_wakeup(int wakeup) noexcept {
  const uint64_t one = 1;
  // The write fails only if the counter is full, and then the sleeper wakes anyway.
  [[maybe_unused]] const ssize_t written = repeated([&] { return ::write(wakeup, &one, sizeof one); });
}

void drain_wakeup(int wakeup) noexcept {
  uint64_t rung;
  // The read fails if no peer has signalled.
  [[maybe_unused]] const ssize_t read = repeated([&] { return ::read(wakeup, &rung, sizeof rung); });
}

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
