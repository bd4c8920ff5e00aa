// Float32 of a rank, and the calls that tests of groups make of them: each rank's are the same everywhere.
#pragma once

#include <cstddef>
#include <vector>

#include "engine/call.h"
#include "engine/p2p.h"

struct Floats {
  explicit Floats(size_t count = 1000, float value = 1.0f) : values(count, value) {}

  std::byte* bytes() { return reinterpret_cast<std::byte*>(values.data()); }
  /// Of all ranks', in place.
  ringlet::Call sum() {
    return {.collective = ringlet::Collective::all_reduce,
            .dtype = ringlet::DType::float32,
            .count = values.size(),
            .input = bytes(),
            .output = bytes()};
  }
  ringlet::Message message(int peer, bool sending) {
    return {peer, sending, ringlet::DType::float32, values.size(), bytes(), {}};
  }

  std::vector<float> values;
};
