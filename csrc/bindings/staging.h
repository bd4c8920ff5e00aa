// Contiguous copies of tensors that are not contiguous: a call reads an input from a copy, and writes an output to a
// copy, which `deliver` copies back.
//
// Contract: a contiguous tensor is used itself. `collect` runs right before the call and `deliver` right after it, in
// the call's turn, because an earlier asynchronous call may still write to the same tensors. Thread safety: none; one
// thread fills it and hands it over.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>

#include <utility>
#include <vector>

namespace ringlet {

/// The caller's inference mode, for another thread that goes on with the call: tensors that were made in that mode can
/// be written only in it.
class TorchMode {
 public:
  c10::InferenceMode enter() const { return c10::InferenceMode(inference_); }

 private:
  bool inference_ = c10::InferenceMode::is_enabled();
};

class Staging {
 public:
  /// The tensor that the call reads, after `collect` has filled it.
  at::Tensor readable(const at::Tensor& tensor);
  /// The tensor that the call writes; `deliver` copies it back.
  at::Tensor writable(const at::Tensor& tensor);
  /// The tensor that an in-place call reads and writes.
  at::Tensor in_place(const at::Tensor& tensor);

  void collect() const;
  void deliver() const;
  /// Copies `from` to `to` in `collect`.
  void add_input(at::Tensor from, at::Tensor to) { collected_.emplace_back(std::move(from), std::move(to)); }
  /// Copies `from` to `to` in `deliver`.
  void add_output(at::Tensor from, at::Tensor to) { delivered_.emplace_back(std::move(from), std::move(to)); }

  bool collects() const { return !collected_.empty(); }
  bool empty() const { return collected_.empty() && delivered_.empty(); }
  /// The tensors that have a copy.
  std::vector<at::Tensor> originals() const;

 private:
  using Copies = std::vector<std::pair<at::Tensor, at::Tensor>>;  // from, to

  Copies collected_;
  Copies delivered_;
};

/// Throws InvalidUsage, naming `call`, if two elements of the outputs share memory, so that one result would overwrite
/// the other, or if torch would not let a copy be written back.
void check_apart(const std::vector<at::Tensor>& outputs, const char* call);

}  // namespace ringlet
