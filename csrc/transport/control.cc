#include "transport/control.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <bit>
#include <cstdio>

namespace ringlet {
namespace {

// A futex is 32 bits: of a 64-bit counter, the half that changes.
const uint32_t* low_half(const std::atomic<uint64_t>& word) {
  static_assert(std::atomic<uint64_t>::is_always_lock_free);
  const auto* halves = reinterpret_cast<const uint32_t*>(&word);
  return halves + (std::endian::native == std::endian::little ? 0 : 1);
}

void futex_sleep(const uint32_t* word, uint32_t seen, int64_t nanoseconds) {
  const timespec limit{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
  ::syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, nullptr, 0);  // every return means: look again
}

void futex_wake(const uint32_t* word) { ::syscall(SYS_futex, word, FUTEX_WAKE, 0x7fffffff, nullptr, nullptr, 0); }

}  // namespace

void Control::fail(ErrorKind kind, const char* text) noexcept {
  if (failed.load(std::memory_order_relaxed) != 0) return;
  std::snprintf(message, kMessageBytes, "%s", text);
  failed.store(1 + static_cast<uint32_t>(kind), std::memory_order_release);
}

void sleep_on(const std::atomic<uint64_t>& word, uint64_t seen, int64_t nanoseconds) noexcept {
  futex_sleep(low_half(word), static_cast<uint32_t>(seen), nanoseconds);
}
void sleep_on(const std::atomic<uint32_t>& word, uint32_t seen, int64_t nanoseconds) noexcept {
  futex_sleep(reinterpret_cast<const uint32_t*>(&word), seen, nanoseconds);
}
void wake_all(const std::atomic<uint64_t>& word) noexcept { futex_wake(low_half(word)); }
void wake_all(const std::atomic<uint32_t>& word) noexcept { futex_wake(reinterpret_cast<const uint32_t*>(&word)); }

}  // namespace ringlet
