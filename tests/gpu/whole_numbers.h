// Random float32 that are whole numbers: their sums over up to eight ranks are exact in any order, and their bits are
// as many as those of real data, since a device moves zeros faster.
//
// Thread safety: pure functions.
#pragma once

#include <random>
#include <vector>

#include "reduce_reference.h"

namespace gpu_check {

/// By rank.
inline std::vector<reduce_reference::Bytes> whole_numbers(int world, size_t count) {
  std::mt19937 random(static_cast<unsigned>(world));
  std::vector<reduce_reference::Bytes> all;
  for (int q = 0; q < world; ++q) {
    reduce_reference::Bytes bytes(count * sizeof(float));
    for (size_t i = 0; i < count; ++i) {
      reduce_reference::put(bytes, i, static_cast<float>(static_cast<int>(random() % (1 << 21)) - (1 << 20)));
    }
    all.push_back(std::move(bytes));
  }
  return all;
}

}  // namespace gpu_check
