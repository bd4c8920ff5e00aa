// Collective calls on the device: what must come out of them, and a rank's tensors for one.
//
// Contract: An Expectation holds a case's inputs and what they come to. RankTensors are collective_cases.h's Tensors with
// their twins on the device.
// Ownership: RankTensors own their memory, which is kept for the next case: no kernel may use it then.
// Thread safety: one thread at a time for each object.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "collective_cases.h"
#include "device_memory.h"

namespace gpu_check {

using collective_cases::Case;

class Expectation {
 public:
  /// With the inputs of collective_cases.h, or with others.
  explicit Expectation(const Case& c) : Expectation(c, collective_cases::all_numbers(c)) {}
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
  const Case shape_;
  const std::vector<Bytes> inputs_;
  const Bytes total_;
};

class RankTensors {
 public:
  /// The rank's call of the case, with its tensors filled and the output spoilt.
  Call place(const Case& c, int rank, const Bytes& given) {
    host_.emplace(c, rank, given);
    host_->write_input();
    twins_[0].upload(host_->input);
    twins_[1].upload(host_->output);
    Call call = host_->call;
    call.input = on_device(twins_, host_->call.input);
    call.output = result_ = on_device(twins_, host_->result);
    return call;
  }

  /// Of what a call of that case left from what it was to leave.
  std::string difference(const Bytes& wanted) {
    for (Twin& twin : twins_) twin.download();
    host_->read_output();
    if (host_->good(wanted)) return "";
    const std::string wrong =
        gpu_check::difference(host_->seen.data(), wanted.data(), std::min(wanted.size(), host_->seen.size()));
    return wrong.empty() ? "the input or a guard has changed" : wrong;
  }

  /// Spoils the output, between two calls on the same tensors.
  void spoil() {
    const Bytes spoilt(host_->seen.size(), reduce_reference::Buffer::kFill);
    if (!spoilt.empty()) ok(device().upload(result_, spoilt.data(), spoilt.size(), beside()), "filling memory");
  }

 private:
  std::optional<collective_cases::Tensors> host_;
  std::array<Twin, 2> twins_;
  std::byte* result_ = nullptr;
};

/// Lays the case's tensors out on all ranks of a world.
template <class Ranks>
void place_all(Ranks& ranks, const Case& c, const Expectation& expectation, std::chrono::milliseconds timeout) {
  for (size_t q = 0; q < ranks.size(); ++q) {
    const auto rank = static_cast<int>(q);
    ranks[q]->call = ranks[q]->tensors.place(c, rank, expectation.input(rank));
    ranks[q]->call.timeout = timeout;
  }
}

template <class Ranks>
std::string difference_of_all(Ranks& ranks, const Expectation& expectation) {
  std::string all;
  for (size_t q = 0; q < ranks.size(); ++q) {
    const std::string wrong = ranks[q]->tensors.difference(expectation.output(static_cast<int>(q)));
    if (!wrong.empty()) all += (all.empty() ? "rank " : "; rank ") + std::to_string(q) + ": " + wrong;
  }
  return all;
}

/// Random float32 that are whole numbers, by rank: their sums over up to eight ranks are exact in any order, and their
/// bits are as many as those of real data, since a device moves zeros faster.
inline std::vector<Bytes> whole_numbers(int world, size_t count) {
  std::mt19937 random(static_cast<unsigned>(world));
  std::vector<Bytes> all;
  for (int q = 0; q < world; ++q) {
    Bytes& bytes = all.emplace_back(count * sizeof(float));
    for (size_t i = 0; i < count; ++i) {
      reduce_reference::put(bytes, i, static_cast<float>(static_cast<int>(random() % (1 << 21)) - (1 << 20)));
    }
  }
  return all;
}

}  // namespace gpu_check
