// Reductions for the tests of their kernels, of the host and of a GPU: inputs, guarded memory, scales, and what must
// come out.
//
// Ownership: a Buffer owns its storage. Thread safety: none.
#pragma once

#include <cstring>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "reduce/reduce.h"
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

/// An element's scalars, which its address is a multiple of.
inline size_t alignment(DType dtype) { return element_size(dtype) / (ringlet::is_complex(dtype) ? 2 : 1); }

/// Every code of a small type in turn; scaled, they make ties, denormals and overflow.
inline Bytes all_codes(DType dtype) {
  const size_t size = element_size(dtype), codes = size_t{1} << (8 * size);
  Bytes bytes(codes * size);
  for (size_t code = 0; code < codes; ++code) {
    size == 1 ? put(bytes, code, static_cast<uint8_t>(code)) : put(bytes, code, static_cast<uint16_t>(code));
  }
  return bytes;
}
inline constexpr DType kSmallFloats[] = {DType::float16, DType::bfloat16, DType::float8_e4m3fn, DType::float8_e5m2};
inline constexpr float kRoundingScales[] = {1.0f,        0.75f,   0.5f,       1.5f,    1.0625f,
                                            1.00390625f, 0x1p-9f, 0x1.8p-10f, 0x1p12f, 1.0009765625f};

/// Into one of the sources, into other memory, or into two.
enum class Into { source, other, both };

struct Reduction {
  DType dtype;
  ReduceOp op;
  const std::vector<Bytes>& srcs;  // of at least `count` elements
  Finish finish;
  size_t count;
  size_t offset = 0;  // of the output, in bytes past a line ...
  size_t apart = 0;   // ... and how much further each source lies
  Into into = Into::other;
  ringlet::NextReader next = ringlet::NextReader::self;
};

/// What is wrong after `launch(args, buffers)`, whose args point into the buffers; "" where nothing is.
template <class Launch>
std::string wrong_after(const Reduction& c, const Bytes& expected, Launch launch) {
  const size_t bytes = c.count * element_size(c.dtype), n = c.srcs.size();
  std::vector<Buffer> buffers;  // the sources, and two outputs
  for (size_t i = 0; i < n; ++i) {
    buffers.emplace_back(bytes, c.offset + c.apart * i);
    if (bytes > 0) buffers.back().fill(c.srcs[i]);
  }
  std::vector<const std::byte*> srcs;
  for (const Buffer& buffer : buffers) srcs.push_back(buffer.data);
  for (const size_t offset : {c.offset, c.offset + c.apart}) buffers.emplace_back(bytes, offset);
  const size_t result = c.into == Into::source ? c.count % n : n;
  ringlet::ReduceArgs args{
      .dst = buffers[result].data, .srcs = srcs.data(), .n = static_cast<int>(n), .count = c.count};
  args.dst2 = c.into == Into::both ? buffers[n + 1].data : nullptr;
  args.scaled_source = c.finish.scaled_source;
  args.scale = c.finish.scale;
  args.divisor = c.finish.divisor;
  args.next = c.next;
  launch(args, buffers);
  std::string wrong;
  for (size_t i = 0; i < buffers.size(); ++i) {
    const bool written = i == result || (i == n + 1 && args.dst2 != nullptr);
    if (!buffers[i].guards_intact()) wrong += " guards of " + std::to_string(i);
    if (bytes > 0 && (written || i < n) && !buffers[i].holds(written ? expected : c.srcs[i]))
      wrong += " content of " + std::to_string(i);
  }
  if (wrong.empty()) return wrong;
  std::ostringstream what;
  what << name(c.dtype) << " " << name(c.op) << " n=" << n << " count=" << c.count << " offset=" << c.offset
       << " apart=" << c.apart << " into=" << static_cast<int>(c.into) << " divisor=" << c.finish.divisor
       << " scaled_source=" << c.finish.scaled_source << ": wrong:" << wrong;
  return what.str();
}

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
