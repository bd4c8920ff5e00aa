// Inputs, guarded memory and scales for the tests of reductions, on the host and as a GPU does them.
//
// Ownership: a Buffer owns its storage. Thread safety: none.
#pragma once

#include <cstring>
#include <random>
#include <vector>

#include "reduce_reference.h"

namespace reduce_reference {

/// Random bits: so every kind of number, NaN, infinity and denormal. `tame` keeps floats near one instead.
inline Bytes random_input(DType dtype, size_t count, bool tame, std::mt19937_64& random) {
  Bytes bytes(count * element_size(dtype));
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  if (dtype == DType::boolean) {
    for (std::byte& byte : bytes) byte &= std::byte{1};
  }
  if (!tame) return bytes;
  const auto small = [&] { return (static_cast<double>(random() % 4001) - 2000) / 700; };
  const bool single = dtype == DType::float32 || dtype == DType::complex64;
  const bool wide = dtype == DType::float64 || dtype == DType::complex128;
  for (size_t i = 0; single && i < bytes.size() / 4; ++i) put(bytes, i, static_cast<float>(small()));
  for (size_t i = 0; wide && i < bytes.size() / 8; ++i) put(bytes, i, small());
  for (size_t i = 0; dtype == DType::float16 && i < count; ++i) put(bytes, i, uint16_t(encode(kFloat16, small())));
  for (size_t i = 0; dtype == DType::bfloat16 && i < count; ++i) put(bytes, i, uint16_t(encode(kBFloat16, small())));
  return bytes;
}

/// `bytes` at `offset` bytes past a 64-byte line, with guards around.
struct Buffer {
  static constexpr size_t kGuard = 128;
  static constexpr std::byte kFill{0xa5};
  Bytes storage;
  std::byte* data;
  size_t size;

  Buffer(size_t bytes, size_t offset) : storage(bytes + 3 * kGuard + offset, kFill), size(bytes) {
    const auto start = reinterpret_cast<uintptr_t>(storage.data()) + kGuard;
    data = storage.data() + kGuard + (-start % 64) + offset;
  }
  void fill(const Bytes& from) { std::memcpy(data, from.data(), size); }
  bool holds(const Bytes& expected) const { return std::memcmp(data, expected.data(), size) == 0; }
  bool guards_intact() const {
    for (const std::byte* p = storage.data(); p < data; ++p) {
      if (*p != kFill) return false;
    }
    for (const std::byte* p = data + size; p < storage.data() + storage.size(); ++p) {
      if (*p != kFill) return false;
    }
    return true;
  }
};

inline std::vector<Finish> finishes(ReduceOp op, int n) {
  std::vector<Finish> all = {{}};
  if (op == ReduceOp::avg) {
    for (int divisor : {2, 3, 8}) all.push_back({-1, 1, divisor});
  }
  if (op == ReduceOp::premul_sum) {
    for (int divisor : {1, 3}) all.push_back({n - 1, 0.3, divisor});
    all.push_back({0, -2.0, 1});
  }
  return all;
}

}  // namespace reduce_reference
