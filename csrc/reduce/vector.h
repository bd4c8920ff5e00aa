// Vectors of any width in the compiler's vector notation, and loads and stores of whole and part vectors.
//
// Contract: addresses need no alignment. A part load fills the rest with zeros and touches no byte outside its range; a
// part store writes only its range. A `Machine` describes a level: kBytes, the width; load_part, store_part, stream
// (address aligned to kBytes), fence, widen_half and narrow_half. Its own and demote are hints on the line at an
// address: this core will write it, another core will read it. The anonymous namespace is deliberate: each level
// compiles these headers with other flags, and with external linkage the linker would keep one level's code for all.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringlet {
namespace {

template <class T, int kBytes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kBytes)));
};
template <class T, int kBytes>
using Vector = typename VectorOf<T, kBytes>::Type;

/// The memory image of one vector. Every element type is a whole number of lanes, or an equal part of a lane.
template <class Machine>
using Words = Vector<uint32_t, Machine::kBytes>;
template <class Machine>
using Floats = Vector<float, Machine::kBytes>;

template <class T>
inline T read(const std::byte* p) {
  T value;
  __builtin_memcpy(&value, p, sizeof value);
  return value;
}

template <class T>
inline void write(std::byte* p, T value) {
  __builtin_memcpy(p, &value, sizeof value);
}

using Half16 = Vector<uint64_t, 16>;  // 16 bytes as two little-endian words

/// 0 to 16 bytes, read as overlapping integers: a byte loop or a stack buffer would cost several times more.
inline Half16 load_up_to_16(const std::byte* p, size_t bytes) {
  if (bytes >= 8) {
    const uint64_t high = bytes > 8 ? read<uint64_t>(p + bytes - 8) >> (8 * (16 - bytes)) : 0;
    return Half16{read<uint64_t>(p), high};
  }
  if (bytes >= 4) {
    return Half16{read<uint32_t>(p) | uint64_t{read<uint32_t>(p + bytes - 4)} << (8 * (bytes - 4)), 0};
  }
  if (bytes == 0) return Half16{0, 0};
  const auto byte = [p](size_t i) { return static_cast<uint64_t>(p[i]) << (8 * i); };
  return Half16{byte(0) | byte(bytes / 2) | byte(bytes - 1), 0};
}

/// 0 to 15 bytes.
inline void store_up_to_15(std::byte* p, Half16 value, size_t bytes) {
  const uint64_t low = value[0];
  if (bytes >= 8) {
    write(p, low);
    if (bytes > 8) write(p + bytes - 8, low >> (8 * (bytes - 8)) | value[1] << (8 * (16 - bytes)));
  } else if (bytes >= 4) {
    write(p, static_cast<uint32_t>(low));
    write(p + bytes - 4, static_cast<uint32_t>(low >> (8 * (bytes - 4))));
  } else {
    for (size_t i = 0; i < bytes; ++i) p[i] = static_cast<std::byte>(low >> (8 * i));
  }
}

}  // namespace
}  // namespace ringlet
