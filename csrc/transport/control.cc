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
  static_assert(std::atomic<uint64_t>::is_always_lock_free && std::endian::native == std::endian::little);
  return reinterpret_cast<const uint32_t*>(&word);
}

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
  const timespec limit{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
  // Whatever it returns, the caller looks again.
  ::syscall(SYS_futex, low_half(word), FUTEX_WAIT, static_cast<uint32_t>(seen), &limit, nullptr, 0);
}

void wake_all(const std::atomic<uint64_t>& word) noexcept {
  ::syscall(SYS_futex, low_half(word), FUTEX_WAKE, 0x7fffffff, nullptr, nullptr, 0);
}

}  // namespace ringlet
