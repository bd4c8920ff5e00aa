// The only remainder arithmetic: it divides `count` elements into `parts` contiguous ranges. Their sizes differ by at
// most one, and the larger ranges come first. 10 elements in 4 ranges: [0,3) [3,6) [6,8) [8,10).
#pragma once

#include <cstddef>

namespace ringlet {

class Partition {
 public:
  Partition(size_t count, size_t parts) : size_(count / parts), larger_(count % parts) {}

  /// First element of range `index`; index == parts gives `count`.
  size_t offset(size_t index) const { return index * size_ + (index < larger_ ? index : larger_); }
  size_t size(size_t index) const { return size_ + (index < larger_ ? 1 : 0); }

 private:
  size_t size_;
  size_t larger_;  // the first `larger_` ranges have one element more
};

inline size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }
inline size_t round_up(size_t a, size_t unit) { return ceil_div(a, unit) * unit; }

}  // namespace ringlet
