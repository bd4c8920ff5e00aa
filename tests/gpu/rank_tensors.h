// Collective calls on the device: the cases to run, what must come out of them, and a rank's tensors for one.
//
// Contract: contract_cases() lists what an engine is to be shown on; those that share inputs and results follow each
// other. An Expectation holds a case's inputs and what they come to. RankTensors are a rank's input and output in
// guarded memory, one in the other where the case says so (as collective_cases.h's Tensors); difference() compares all
// of it.
// Ownership: RankTensors own their memory, which is kept for the next case: no kernel may use it then.
// Thread safety: one thread at a time for each object.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "arena.h"
#include "collective_cases.h"

namespace gpu_check {

using collective_cases::Case;

class Expectation {
 public:
  /// With the inputs of collective_cases.h, or with others.
  explicit Expectation(const Case& c) : Expectation(c, numbers_of(c)) {}
  Expectation(const Case& c, std::vector<Bytes> inputs)
      : shape_(c), inputs_(std::move(inputs)), total_(collective_cases::total_of(c, inputs_)) {}

  /// Whether it serves that case as well.
  bool fits(const Case& c) const {
    return c.algorithm->collective == shape_.algorithm->collective && c.world == shape_.world &&
           c.count == shape_.count && c.dtype == shape_.dtype && c.op == shape_.op && c.root() == shape_.root();
  }
  const Bytes& input(int rank) const { return inputs_[static_cast<size_t>(rank)]; }
  Bytes output(int rank) const { return expected(shape_, rank, inputs_, total_); }
  const Case& shape() const { return shape_; }

 private:
  static std::vector<Bytes> numbers_of(const Case& c) {
    std::vector<Bytes> all;
    for (int q = 0; q < c.world; ++q) {
      all.push_back(numbers(c, q, input_elements(call_of(c, q), q, c.world)));
    }
    return all;
  }

  const Case shape_;
  const std::vector<Bytes> inputs_;
  const Bytes total_;
};

class RankTensors {
 public:
  /// The rank's call of the case, with its tensors filled and the output spoilt.
  Call place(const Case& c, int rank, const Bytes& given) {
    Call call = call_of(c, rank);
    const size_t size = element_size(c.dtype), own = static_cast<size_t>(rank) * c.count * size;
    const size_t input = given.size(), output = output_elements(call, rank, c.world) * size;
    arena_.clear();
    // In place the two are one: the larger, of which the smaller is this rank's block.
    const bool within_input = c.in_place && input >= output, within_output = c.in_place && !within_input;
    input_ = arena_.place(within_output ? 0 : input, c.offset);
    output_ = arena_.place(within_input ? 0 : output, c.offset);
    result_ = within_input ? part(input_, input > output ? own : 0, output) : output_;
    const Arena::Piece source = within_output ? part(output_, own, input) : input_;
    in_place_ = c.in_place;
    arena_.expect(source, given);
    arena_.write(input_, output_);
    call.input = arena_.address(source);
    call.output = arena_.address(result_);
    return call;
  }

  /// Of what a call of that case left from what it was to leave.
  std::string difference(const Bytes& wanted) {
    if (result_.bytes > 0) arena_.expect(result_, wanted);
    if (!in_place_) return arena_.difference(input_, output_);
    // What is not the result may have served as scratch; guards are left alone.
    const std::string wrong = arena_.difference(result_, result_);
    if (!wrong.empty()) return wrong;
    for (const Arena::Piece& piece : {input_, output_}) {
      for (const Arena::Piece& guard : {before(piece), behind(piece)}) {
        if (std::string lost = arena_.difference(guard, guard); !lost.empty()) return "guards: " + lost;
      }
    }
    return "";
  }

  /// Spoils the output, between two calls on the same tensors.
  void spoil() {
    arena_.expect_nothing(result_);
    arena_.write(result_, result_);
  }

 private:
  static Arena::Piece part(const Arena::Piece& of, size_t at, size_t bytes) {
    return {of.at + at, of.at + at, bytes, of.at + at + bytes};
  }
  static Arena::Piece before(const Arena::Piece& piece) { return {piece.begin, piece.begin, 0, piece.at}; }
  static Arena::Piece behind(const Arena::Piece& piece) {
    return {piece.at + piece.bytes, piece.at + piece.bytes, 0, piece.end};
  }

  Arena arena_;
  Arena::Piece input_{}, output_{}, result_{};
  bool in_place_ = false;
};

/// What an engine is to be shown on in a world of that size. `named`: the all-reduces that every dtype and operation
/// goes through.
std::vector<Case> contract_cases(int world, const std::vector<const char*>& named, const Options& options);

}  // namespace gpu_check
