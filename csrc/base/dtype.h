// Element types and reduction operations, and which of them go together.
//
// float8 follows torch: e4m3fn (no infinity, NaN = 0x7f/0xff) and e5m2 (IEEE-like). bool is one byte, 0 or 1.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringlet {

enum class DType : uint8_t {
  float64,
  float32,
  float16,
  bfloat16,
  float8_e4m3fn,
  float8_e5m2,
  int64,
  int32,
  int16,
  int8,
  uint8,
  boolean,
  complex64,
  complex128,
  uint16,
  uint32,
  uint64,
};
inline constexpr int kDTypes = 17;

enum class ReduceOp : uint8_t { sum, avg, product, min, max, band, bor, bxor, premul_sum };
inline constexpr int kReduceOps = 9;

size_t element_size(DType dtype) noexcept;
const char* name(DType dtype) noexcept;  ///< torch's names: "float32", "bfloat16", "bool", ...
const char* name(ReduceOp op) noexcept;  ///< "sum", "avg", "product", ...

bool is_floating(DType dtype) noexcept;  ///< float64 down to float8; not complex
bool is_integral(DType dtype) noexcept;  ///< signed and unsigned; not bool
bool is_complex(DType dtype) noexcept;

/// Whether `op` is defined on `dtype`. sum and product: on all dtypes (on bool they are or and and). avg: on all but
/// bool; integers truncate towards zero. min and max: on all but complex. band, bor and bxor: on integers and bool.
/// premul_sum: on floating and complex dtypes. uint16, uint32 and uint64 have no operation: they are only copied.
bool supports(DType dtype, ReduceOp op) noexcept;

}  // namespace ringlet
