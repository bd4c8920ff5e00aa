// The cases that the pull and the message engine are shown on.
#include <algorithm>

#include "rank_tensors.h"

namespace gpu_check {
namespace {

/// Of each collective the first algorithm that is no ring, and rings.
bool among_few(const Algorithm& algorithm) {
  if (algorithm.name == std::string("ring")) return true;
  for (const Algorithm& other : algorithms()) {
    if (other.collective == algorithm.collective && other.name != std::string("ring")) return &other == &algorithm;
  }
  return false;
}

bool among_few(DType dtype) {
  return dtype == DType::float32 || dtype == DType::float16 || dtype == DType::uint8 || dtype == DType::complex64;
}

}  // namespace

std::vector<Case> contract_cases(int world, const std::vector<const char*>& named, const Options& options) {
  std::vector<Case> cases;
  const auto add = [&](Case c, bool in_place) {
    c.in_place = in_place;
    if (has_place(c)) cases.push_back(c);
  };
  const auto some = static_cast<size_t>(world + 1);
  const std::vector<size_t> counts =
      options.few ? std::vector<size_t>{1, 1237} : std::vector<size_t>{1, some, size_t{123567}};
  for (const size_t count : counts) {
    for (const Algorithm& algorithm : algorithms()) {
      if (options.few && !among_few(algorithm)) continue;
      Case c{&algorithm, world, algorithm.collective == Collective::barrier ? 0 : count};
      c.offset = 4 * (count % 3);
      c.seed = static_cast<unsigned>(count) % 11;
      for (const bool in_place : {false, true}) add(c, in_place);
    }
  }
  for (int d = 0; d < kDTypes; ++d) {
    for (int o = 0; o < kReduceOps; ++o) {
      const auto dtype = static_cast<DType>(d);
      const auto op = static_cast<ReduceOp>(o);
      if (!supports(dtype, op) || (options.few && !among_few(dtype))) continue;
      for (const char* name : named) {
        Case c{find_algorithm(Collective::all_reduce, name), world, 1237, dtype, op};
        c.offset = element_size(dtype);
        add(c, (d + o) % 2 == 1);
      }
    }
  }
  return cases;
}

}  // namespace gpu_check
