// The arithmetic of a reduction on the host: n inputs, one or two outputs, one pass.
//
// Contract: dst[i] = finish(src[0][i] op src[1][i] op ... op src[n-1][i]), combined left to right, accumulated in
// float32 for float16, bfloat16 and float8 and in the element type otherwise, rounded once. dst may be one of the
// sources (same address). dst2, if given, gets the same values. Apart from that, nothing overlaps. A pointer needs only
// the alignment of its element. Integers wrap. NaN in any input of min or max gives NaN. n == 1 is a copy (with scale
// and finish). Thread safety: pure functions. The kernel table depends on the processor (or
// RINGLET_CPU_KERNELS=portable|avx2|avx512), is chosen once per process, and is then constant.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "reduce/copy.h"

namespace ringlet {

struct ReduceArgs {
  std::byte* dst;
  std::byte* dst2 = nullptr;     ///< optional second copy of the result
  const std::byte* const* srcs;  ///< n pointers
  int n;
  size_t count;            ///< elements
  int scaled_source = -1;  ///< index of the one source that is scaled, and rounded, as it is read; -1 = none
  double scale = 1.0;      ///< premul_sum's factor (real, also for complex)
  int divisor = 1;         ///< avg: the finished value is divided by this (a power of two multiplies exactly)
  NextReader next = NextReader::self;
};

using ReduceKernel = void (*)(const ReduceArgs&);

/// The kernel of a dtype and an operation; avg and premul_sum use that of sum. Null if supports() is false.
ReduceKernel reduce_kernel(DType dtype, ReduceOp op) noexcept;

/// The level in use: "avx512", "avx2" or "portable".
const char* cpu_kernels() noexcept;

}  // namespace ringlet
