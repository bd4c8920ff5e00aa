// Collective calls for the tests of the GPU's engines: inputs, a rank's tensors, and what must come out.
//
// Inputs are numbers whose sums and products every type holds exactly, so that results do not depend on the order.
// Ownership: Tensors owns its memory. Thread safety: none.
#pragma once

#include <cstring>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "engine/call.h"
#include "reduce_cases.h"

namespace collective_cases {

using namespace ringlet;
using namespace reduce_reference;

struct Case {
  const Algorithm* algorithm;
  int world;
  size_t count;
  DType dtype = DType::int32;
  ReduceOp op = ReduceOp::sum;
  bool in_place = false;
  size_t scratch_bytes = size_t{1} << 20;
  unsigned seed = 0;
  size_t offset = 0;  // of tensors, in bytes past a line
  int root() const { return has_root(algorithm->collective) ? static_cast<int>(seed) % world : 0; }
};

inline void put_number(DType dtype, Bytes& bytes, size_t i, int value, int imaginary) {
  switch (dtype) {
    case DType::float64: return put(bytes, i, static_cast<double>(value));
    case DType::float32: return put(bytes, i, static_cast<float>(value));
    case DType::float16: return put(bytes, i, static_cast<uint16_t>(encode(kFloat16, value)));
    case DType::bfloat16: return put(bytes, i, static_cast<uint16_t>(encode(kBFloat16, value)));
    case DType::float8_e4m3fn: return put(bytes, i, static_cast<uint8_t>(encode(kE4m3fn, value)));
    case DType::float8_e5m2: return put(bytes, i, static_cast<uint8_t>(encode(kE5m2, value)));
    case DType::int64: return put(bytes, i, static_cast<int64_t>(value));
    case DType::int32: return put(bytes, i, value);
    case DType::int16: return put(bytes, i, static_cast<int16_t>(value));
    case DType::int8:
    case DType::uint8: return put(bytes, i, static_cast<uint8_t>(value));
    case DType::boolean: return put(bytes, i, static_cast<uint8_t>(value & 1));
    case DType::complex64:
      return put(bytes, i, std::complex<float>(static_cast<float>(value), static_cast<float>(imaginary)));
    case DType::complex128: return put(bytes, i, std::complex<double>(value, imaginary));
    case DType::uint16: return put(bytes, i, static_cast<uint16_t>(value));
    case DType::uint32: return put(bytes, i, static_cast<uint32_t>(value));
    case DType::uint64: return put(bytes, i, static_cast<uint64_t>(value));
  }
}

/// Numbers whose sums and products every type holds exactly, in any order of up to eight.
inline Bytes numbers(const Case& c, int rank, size_t elements) {
  Bytes bytes(elements * element_size(c.dtype));
  const bool factors = c.op == ReduceOp::product;
  for (size_t i = 0; i < elements; ++i) {
    const int k = static_cast<int>((i * 7 + static_cast<size_t>(rank) * 5 + i / 11) % 3);
    // A complex product's zeros have signs that depend on the order, so there factors are positive and real.
    const int last = is_complex(c.dtype) ? 1 : -1;
    put_number(c.dtype, bytes, i, factors ? (k == 0 ? 2 : k == 1 ? 1 : last) : k - 1, factors ? 0 : 1 - k);
  }
  return bytes;
}

inline double scale_of(int rank) { return rank % 2 == 0 ? 2.0 : -1.0; }

inline Call call_of(const Case& c, int rank) {
  Call call;
  call.collective = c.algorithm->collective;
  call.algorithm = c.algorithm;
  call.dtype = c.dtype;
  call.op = c.op;
  call.root = c.root();
  call.count = c.count;
  call.scale = scale_of(rank);
  call.timeout = std::chrono::seconds(60);
  return call;
}

inline Bytes block(const Bytes& bytes, size_t index, size_t size) {
  const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(index * size);
  return {begin, begin + static_cast<std::ptrdiff_t>(size)};
}

inline Bytes reduced(const Case& c, std::vector<Bytes> inputs) {
  if (inputs[0].empty()) return {};
  for (size_t q = 0; c.op == ReduceOp::premul_sum && q < inputs.size(); ++q) {
    inputs[q] = reference(c.dtype, c.op, {inputs[q]}, {0, scale_of(static_cast<int>(q)), 1});
  }
  return reference(c.dtype, c.op, inputs, {-1, 1, c.op == ReduceOp::avg ? c.world : 1});
}

/// What all ranks' inputs come to where the collective reduces; made once, it serves expected() of every rank.
inline Bytes total_of(const Case& c, const std::vector<Bytes>& inputs) {
  return is_reduction(c.algorithm->collective) ? reduced(c, inputs) : Bytes();
}

inline Bytes expected(const Case& c, int rank, const std::vector<Bytes>& inputs, const Bytes& total) {
  const size_t size = c.count * element_size(c.dtype);
  const auto at = static_cast<size_t>(rank);
  Bytes all;
  switch (c.algorithm->collective) {
    case Collective::all_reduce:
    case Collective::reduce: return total;
    case Collective::reduce_scatter: return block(total, at, size);
    case Collective::broadcast: return inputs[static_cast<size_t>(c.root())];
    case Collective::scatter: return block(inputs[static_cast<size_t>(c.root())], at, size);
    case Collective::all_gather:
    case Collective::gather:
      for (const Bytes& input : inputs) all.insert(all.end(), input.begin(), input.end());
      return all;
    case Collective::all_to_all:
      for (const Bytes& input : inputs) {
        const Bytes mine = block(input, at, size);
        all.insert(all.end(), mine.begin(), mine.end());
      }
      return all;
    case Collective::barrier: break;
  }
  return all;
}

inline std::vector<Bytes> all_numbers(const Case& c) {
  std::vector<Bytes> all;
  for (int q = 0; q < c.world; ++q) all.push_back(numbers(c, q, input_elements(call_of(c, q), q, c.world)));
  return all;
}

/// Where the inputs are numbers().
inline Bytes expected(const Case& c, int rank) {
  const std::vector<Bytes> inputs = all_numbers(c);
  return expected(c, rank, inputs, total_of(c, inputs));
}

/// One rank's tensors, guarded, and what a program does with them around a call.
struct Tensors {
  Tensors(const Case& c, int rank)
      : Tensors(c, rank, numbers(c, rank, input_elements(call_of(c, rank), rank, c.world))) {}
  Tensors(const Case& c, int rank, Bytes values)
      : rank(rank),
        call(call_of(c, rank)),
        given(std::move(values)),
        input(given.size(), c.offset),
        output(output_elements(call, rank, c.world) * element_size(c.dtype), c.offset),
        in_place(c.in_place),
        seen(output.size) {
    const size_t own = static_cast<size_t>(rank) * c.count * element_size(c.dtype);
    call.input = input.data;
    call.output = result = output.data;
    // In place the two are one: the larger, of which the smaller is this rank's block.
    if (in_place && input.size >= output.size) {
      call.output = result = input.data + (input.size > output.size ? own : 0);
    } else if (in_place) {
      call.input = output.data + own;
    }
  }

  void write_input() {
    if (!given.empty()) std::memcpy(const_cast<std::byte*>(call.input), given.data(), given.size());
  }
  void read_output() {
    if (!seen.empty()) std::memcpy(seen.data(), result, seen.size());
    untouched = untouched && (in_place || given.empty() || std::memcmp(call.input, given.data(), given.size()) == 0);
  }
  void spoil_input() {
    if (!given.empty()) std::memset(const_cast<std::byte*>(call.input), 0x55, given.size());
  }
  bool good(const Bytes& wanted) const {
    return (seen.empty() || seen == wanted) && untouched && input.guards_intact() && output.guards_intact();
  }

  int rank;
  Call call;
  Bytes given;
  Buffer input, output;
  bool in_place;
  std::byte* result = nullptr;
  Bytes seen;  // of the result
  bool untouched = true;
};

/// Whether input and output can be one in the way of Tensors.
inline bool has_place(const Case& c) {
  const Collective k = c.algorithm->collective;
  return !c.in_place || k == Collective::all_reduce || k == Collective::reduce_scatter || k == Collective::all_gather ||
         k == Collective::broadcast;
}

inline std::string describe_case(const Case& c) {
  std::ostringstream text;
  text << c.algorithm->name << " " << name(c.algorithm->collective) << " world " << c.world << " count " << c.count
       << " " << name(c.dtype) << " " << name(c.op) << (c.in_place ? " in place" : "") << " scratch " << c.scratch_bytes
       << " offset " << c.offset << " seed " << c.seed;
  return text.str();
}

}  // namespace collective_cases
