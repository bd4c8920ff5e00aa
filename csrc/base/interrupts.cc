#include "base/interrupts.h"

#include <atomic>

namespace ringlet {

constinit thread_local const RuntimeHooks* runtime_hooks = nullptr;

namespace {

using Clock = std::chrono::steady_clock;

std::atomic<void (*)()> interrupt_check{nullptr};
thread_local Clock::time_point next_check{};
thread_local int checks = 0;  // nested: a signal handler that waits checks, too
thread_local int uninterrupted = 0;

}  // namespace

void set_interrupt_check(void (*check)()) noexcept { interrupt_check.store(check, std::memory_order_release); }

void check_interrupts() {
  void (*const check)() = interrupt_check.load(std::memory_order_acquire);
  if (check == nullptr || uninterrupted > 0) return;
  const auto now = Clock::now();
  if (now < next_check) return;
  next_check = now + kInterruptCheckEvery;
  struct Mark {
    Mark() { ++checks; }
    ~Mark() { --checks; }
  } mark;
  check();
}

bool checking_interrupts() noexcept { return checks > 0; }

Uninterrupted::Uninterrupted() noexcept { ++uninterrupted; }
Uninterrupted::~Uninterrupted() { --uninterrupted; }

}  // namespace ringlet
