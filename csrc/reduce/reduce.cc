#include "reduce/reduce.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/error.h"
#include "reduce/level.h"

#if defined(RINGLET_X86_LEVELS)
#include <cpuid.h>
#endif

namespace ringlet {
namespace {

constexpr const char* kVariable = "RINGLET_CPU_KERNELS";

}  // namespace

std::vector<const Level*> available_levels() {
  std::vector<const Level*> levels;
#if defined(RINGLET_X86_LEVELS)
  __builtin_cpu_init();
  unsigned eax, ebx, ecx = 0, edx;  // older compilers cannot ask for f16c by name
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  const bool avx2 = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx2 && avx512) levels.push_back(&avx512_level());
  if (avx2) levels.push_back(&avx2_level());
#endif
  levels.push_back(&portable_level());
  return levels;
}

namespace {

/// Chosen at first use, without a lock: a child forked meanwhile would wait for it.
const Level& chosen_level() noexcept {
  static constinit std::atomic<const Level*> chosen{nullptr};
  const Level* level = chosen.load(std::memory_order_relaxed);
  if (level != nullptr) [[likely]]
    return *level;
  try {
    level = &choose_level(std::getenv(kVariable));
  } catch (const InvalidUsage&) {
    level = available_levels().front();  // check_cpu_kernels() tells the user
  }
  chosen.store(level, std::memory_order_relaxed);
  return *level;
}

}  // namespace

const Level& choose_level(const char* wanted) {
  const auto levels = available_levels();
  if (wanted == nullptr || *wanted == '\0') return *levels.front();
  std::string names;
  for (const Level* level : levels) {
    if (std::strcmp(level->name, wanted) == 0) return *level;
    names += names.empty() ? level->name : std::string(", ") + level->name;
  }
  throw InvalidUsage(std::string(kVariable) + "=\"" + wanted + "\" is not one of " + names +
                     ", which this processor and build support: set one of these, or unset it to get " +
                     levels.front()->name);
}

void check_cpu_kernels() { choose_level(std::getenv(kVariable)); }

ReduceKernel reduce_kernel(DType dtype, ReduceOp op) noexcept {
  return supports(dtype, op) ? chosen_level().kernel(dtype, op) : nullptr;
}

void copy_bytes(std::byte* dst, const std::byte* src, size_t bytes, NextReader next) noexcept {
  if (next == NextReader::self) {
    if (bytes != 0) std::memcpy(dst, src, bytes);
    return;
  }
  chosen_level().copy({.dst = dst, .srcs = &src, .n = 1, .count = bytes, .next = next});
}

const char* cpu_kernels() noexcept { return chosen_level().name; }

}  // namespace ringlet
