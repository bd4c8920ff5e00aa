// System calls of which a signal must change nothing. Any handled signal ends a call early with EINTR, also one that
// does not wait: that says nothing about a peer, a socket or a file.
//
// Contract: the core makes every call that can fail so through repeated() (tests/tools/test_house.py looks), except
// sleeps whose callers look again whatever ended them. Thread safety: any.
#pragma once

#include <poll.h>
#include <time.h>

#include <cerrno>
#include <chrono>

namespace ringlet {

/// What `call` returns, once it returns anything but EINTR.
template <typename SystemCall>
auto repeated(const SystemCall& call) noexcept {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

/// Sleeps so long, however many signals come. std::this_thread::sleep_for goes on for what the kernel says is left, to
/// which the kernel adds its timer slack (50 us) each time: while signals come faster than that, it never ends.
inline void sleep_for(std::chrono::nanoseconds time) noexcept {
  timespec until{};
  ::clock_gettime(CLOCK_MONOTONIC, &until);
  const long long end = until.tv_nsec + time.count();
  until.tv_sec += static_cast<time_t>(end / 1'000'000'000);
  until.tv_nsec = static_cast<long>(end % 1'000'000'000);
  while (::clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) == EINTR) {
  }
}

/// Whether an error of a call on a socket or file says only that nothing can be done now: no bytes, or no memory.
inline bool is_passing(int code) noexcept {
  return code == EAGAIN || code == EWOULDBLOCK || code == EINTR || code == ENOMEM || code == ENOBUFS;
}

/// Which of `events` are true of the descriptor now, or its end (POLLERR, POLLHUP). 0 where poll() cannot tell: it fails,
/// or other code of this program has closed the descriptor.
inline short events_now(int descriptor, short events) noexcept {
  pollfd watched{descriptor, events, 0};
  if (repeated([&] { return ::poll(&watched, 1, 0); }) < 0) return 0;
  return static_cast<short>(watched.revents & ~POLLNVAL);
}

}  // namespace ringlet
