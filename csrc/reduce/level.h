// The kernels of a processor level, and the choice among levels.
//
// Contract: every level gives the same bits for every dtype, operation and input. So that this does not depend on the
// order of operands or the machine, a computed NaN is always the positive quiet NaN (0x7fc00000, bfloat16 0x7fc0,
// float16 0x7e00, float8 0x7f), and min(-0, +0) is -0, max(-0, +0) is +0. A plain copy (n == 1) keeps every bit.
// Ownership: constants. Thread safety: everything here may be called from any thread.
#pragma once

#include <cstddef>
#include <vector>

#include "reduce/reduce.h"

namespace ringlet {

/// From this size on a kernel makes several passes side by side, one vector of each in turn: more cache lines are under
/// way at once.
inline constexpr size_t kSideBySideBytes = 32 << 10;  ///< from this size on, a reduction or copy goes over several
                                                      ///< parts at once

struct Level {
  const char* name;
  ReduceKernel (*kernel)(DType dtype, ReduceOp op);  ///< null if supports() is false
  void (*copy)(const ReduceArgs& args);              ///< n == 1, count in bytes
};

const Level& portable_level() noexcept;
const Level& avx2_level() noexcept;    ///< only with RINGLET_X86_LEVELS
const Level& avx512_level() noexcept;  ///< only with RINGLET_X86_LEVELS

/// The levels that this processor can run, the best first; "portable" is the last.
std::vector<const Level*> available_levels();

/// The level called `wanted`; the best level if `wanted` is null or empty. Throws InvalidUsage if the name is unknown
/// or the processor cannot run that level.
const Level& choose_level(const char* wanted);

/// Throws InvalidUsage if RINGLET_CPU_KERNELS names a level that cannot be used. Call it before the first group: the
/// functions of reduce.h cannot throw, and would take the best level.
void check_cpu_kernels();

}  // namespace ringlet
