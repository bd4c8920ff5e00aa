// One processor level's kernels, and the choice among levels.
//
// Contract: every level gives the same bits for every dtype, operation and input. To keep that true whatever the order
// of operands and the machine, a computed NaN is always the positive quiet NaN (0x7fc00000, bfloat16 0x7fc0, float16
// 0x7e00, float8 0x7f), and min(-0, +0) is -0, max(-0, +0) is +0. A plain copy (n == 1) keeps every bit.
// Ownership: constants. Thread safety: everything here may be called from any thread.
#pragma once

#include <cstddef>
#include <vector>

#include "reduce/reduce.h"

namespace ringlet {

/// From this size on a kernel's pass is several passes side by side, a vector of each in turn: more lines are under way
/// at once.
inline constexpr size_t kSideBySideBytes = 32 << 10;

struct Level {
  const char* name;
  ReduceKernel (*kernel)(DType dtype, ReduceOp op);  ///< null where supports() is false
  void (*copy)(const ReduceArgs& args);              ///< n == 1, count in bytes
};

const Level& portable_level() noexcept;
const Level& avx2_level() noexcept;    ///< x86-64 builds only
const Level& avx512_level() noexcept;  ///< x86-64 builds only

/// The levels this processor can run, the best first; "portable" is always the last.
const std::vector<const Level*>& available_levels();

/// The level called `wanted`, or the best where `wanted` is null or empty. InvalidUsage where the name is unknown or
/// the processor cannot run it.
const Level& choose_level(const char* wanted);

/// InvalidUsage where RINGLET_CPU_KERNELS asks for what is not there; to be called once before the first group. The
/// functions of reduce.h cannot throw, and take the best level in that case.
void check_cpu_kernels();

}  // namespace ringlet
