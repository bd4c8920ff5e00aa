// Blocks that lie apart and differ in length, or are empty, and what must come of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "engine/call.h"

namespace uneven_blocks {

using namespace ringlet;

using Values = std::vector<int32_t>;

inline std::byte* bytes(Values& values) { return reinterpret_cast<std::byte*>(values.data()); }

/// What rank `from` has for rank `to`; of an all-gather for all, of a reduce-scatter as long as any's for `to`.
struct Shape {
  Collective which;
  size_t unit = 100;  // of lengths, in elements

  bool exchange() const { return which == Collective::all_to_all; }
  size_t length(int from, int to) const {
    if (which == Collective::all_gather) to = 0;
    if (which == Collective::reduce_scatter) from = 0;
    return static_cast<size_t>((from * 5 + to * 3) % 7) * unit;
  }
  Values values(int from, int to) const {
    Values all(length(from, to));
    if (which == Collective::all_gather) to = 0;
    for (size_t i = 0; i < all.size(); ++i) all[i] = from * 1000 + to * 100 + static_cast<int32_t>(i % 97);
    return all;
  }
};

/// A rank's blocks, and what must come out.
struct UnevenRank {
  UnevenRank(const Shape& shape, int rank, int world) {
    for (int q = 0; q < (shape.which == Collective::all_gather ? 1 : world); ++q) in.push_back(shape.values(rank, q));
    for (int q = 0; q < world; ++q) {
      const Values part = shape.values(q, rank);
      if (shape.which != Collective::reduce_scatter || q == 0) {
        wanted.push_back(part);
      } else {
        for (size_t i = 0; i < part.size(); ++i) wanted[0][i] += part[i];
      }
    }
    for (int q = 0; shape.exchange() && q < world; ++q) blocks.counts.push_back(shape.length(rank, q));
    for (int q = 0; q < world; ++q) {
      blocks.counts.push_back(shape.which == Collective::reduce_scatter ? shape.length(0, q) : shape.length(q, rank));
    }
    for (const Values& one : wanted) out.emplace_back(one.size());
    for (Values& one : in) blocks.inputs.push_back(bytes(one));
    for (Values& one : out) blocks.outputs.push_back(bytes(one));
    blocks.longest = *std::max_element(blocks.counts.begin(), blocks.counts.end());
    blocks.uneven = true;
  }

  std::vector<Values> in, out, wanted;
  Blocks blocks;
};

}  // namespace uneven_blocks
