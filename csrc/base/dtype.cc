#include "base/dtype.h"

namespace ringlet {

size_t element_size(DType dtype) noexcept {
  static constexpr size_t kSizes[kDTypes] = {8, 4, 2, 2, 1, 1, 8, 4, 2, 1, 1, 1, 8, 16, 2, 4, 8};
  return kSizes[static_cast<int>(dtype)];
}

const char* name(DType dtype) noexcept {
  static constexpr const char* kNames[kDTypes] = {
      "float64", "float32", "float16", "bfloat16",  "float8_e4m3fn", "float8_e5m2", "int64",  "int32", "int16",
      "int8",    "uint8",   "bool",    "complex64", "complex128",    "uint16",      "uint32", "uint64"};
  return kNames[static_cast<int>(dtype)];
}

const char* name(ReduceOp op) noexcept {
  static constexpr const char* kNames[kReduceOps] = {"sum",  "avg", "product", "min",       "max",
                                                     "band", "bor", "bxor",    "premul_sum"};
  return kNames[static_cast<int>(op)];
}

bool is_floating(DType dtype) noexcept { return dtype <= DType::float8_e5m2; }
bool is_integral(DType dtype) noexcept {
  return (dtype >= DType::int64 && dtype <= DType::uint8) || dtype >= DType::uint16;
}
bool is_complex(DType dtype) noexcept { return dtype == DType::complex64 || dtype == DType::complex128; }

bool supports(DType dtype, ReduceOp op) noexcept {
  if (dtype >= DType::uint16) return false;
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::product: return true;
    case ReduceOp::avg: return dtype != DType::boolean;
    case ReduceOp::min:
    case ReduceOp::max: return !is_complex(dtype);
    case ReduceOp::band:
    case ReduceOp::bor:
    case ReduceOp::bxor: return is_integral(dtype) || dtype == DType::boolean;
    case ReduceOp::premul_sum: return is_floating(dtype) || is_complex(dtype);
  }
  return false;
}

}  // namespace ringlet
