#include "transport/control.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <iterator>

namespace ringlet {
namespace {

// A futex has 32 bits. This is the half of the 64-bit counter that changes with every step.
const uint32_t* low_half(const std::atomic<uint64_t>& word) {
  static_assert(std::atomic<uint64_t>::is_always_lock_free);
  const auto* halves = reinterpret_cast<const uint32_t*>(&word);
  return halves + (std::endian::native == std::endian::little ? 0 : 1);
}

void futex_sleep(const uint32_t* word, uint32_t seen, int64_t nanoseconds) {
  const timespec limit{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
  ::syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, nullptr, 0);  // whatever it returns, the caller looks again
}

void futex_wake(const uint32_t* word) { ::syscall(SYS_futex, word, FUTEX_WAKE, 0x7fffffff, nullptr, nullptr, 0); }

}  // namespace

void SharedText::set(std::string_view text) noexcept {
  uint64_t copy[std::size(words_)] = {};
  text.copy(reinterpret_cast<char*>(copy), sizeof copy - 1);
  for (size_t i = 0; i < std::size(words_); ++i) words_[i].store(copy[i], std::memory_order_relaxed);
}

std::string SharedText::get() const {
  uint64_t copy[std::size(words_) + 1] = {};
  for (size_t i = 0; i < std::size(words_); ++i) copy[i] = words_[i].load(std::memory_order_relaxed);
  return reinterpret_cast<const char*>(copy);
}

void Control::fail(ErrorKind kind, int origin, std::string_view text) noexcept {
  if (failed.load(std::memory_order_relaxed) != 0) return;
  message[text.copy(message, kMessageBytes - 1)] = '\0';
  failed.store(static_cast<uint32_t>(origin) << 8 | (1 + static_cast<uint32_t>(kind)), std::memory_order_release);
}

void sleep_on(const std::atomic<uint64_t>& word, uint64_t seen, int64_t nanoseconds) noexcept {
  futex_sleep(low_half(word), static_cast<uint32_t>(seen), nanoseconds);
}
void sleep_on_any(const std::vector<Watched>& words, int64_t nanoseconds) noexcept {
  timespec until{};
  ::clock_gettime(CLOCK_MONOTONIC, &until);
  const int64_t end = until.tv_nsec + nanoseconds;
  until = {until.tv_sec + end / 1'000'000'000, end % 1'000'000'000};
#ifdef SYS_futex_waitv
  struct futex_waitv waiters[FUTEX_WAITV_MAX] = {};
  const size_t n =
      std::min<size_t>(words.size(), FUTEX_WAITV_MAX);  // the sleep is short: the caller then looks at the others
  for (size_t i = 0; i < n; ++i) {
    waiters[i].val = words[i].seen;
    waiters[i].uaddr = reinterpret_cast<uintptr_t>(words[i].word);
    waiters[i].flags = FUTEX_32;
  }
  if (n > 0 &&
      (::syscall(SYS_futex_waitv, waiters, n, 0, &until, CLOCK_MONOTONIC) >= 0 || (errno != ENOSYS && errno != EPERM)))
    return;
#endif
  // Before Linux 5.16, or where a container's filter forbids it, a thread cannot sleep on several words, nor on an empty list: it sleeps briefly and looks again.
  constexpr int64_t kGlance = 100'000;
  const timespec glance{0, std::min(nanoseconds, kGlance)};
  ::nanosleep(&glance, nullptr);
}

void wake_all(const std::atomic<uint64_t>& word) noexcept { futex_wake(low_half(word)); }
void wake_all(const std::atomic<uint32_t>& word) noexcept { futex_wake(reinterpret_cast<const uint32_t*>(&word)); }

}  // namespace ringlet
