// Contiguous stand-ins for tensors that are not: an input is read from a copy, an output is written to one and copied
// back.
//
// Contract: contiguous tensors stand for themselves. `collect` comes right before the call and `deliver` right after
// it, in its turn: an asynchronous call before it may still write to the same tensors. Thread safety: none; handed over
// whole.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace ringlet {

class Staging {
 public:
  /// What the call reads, once `collect` has copied the tensor to it.
  at::Tensor readable(const at::Tensor& tensor);
  /// What the call writes; `deliver` copies it to the tensor.
  at::Tensor writable(const at::Tensor& tensor);
  /// What a call works on in place.
  at::Tensor in_place(const at::Tensor& tensor);

  void collect() const;
  void deliver() const;
  /// Copies `from` to `to` in `deliver`.
  void add(at::Tensor from, at::Tensor to) { delivered_.emplace_back(std::move(from), std::move(to)); }

  bool collects() const { return !collected_.empty(); }
  bool empty() const { return collected_.empty() && delivered_.empty(); }
  /// The tensors that are stood in for.
  std::vector<at::Tensor> originals() const;

 private:
  using Copies = std::vector<std::pair<at::Tensor, at::Tensor>>;  // from, to

  Copies collected_;
  Copies delivered_;
};

/// Throws InvalidUsage, naming `call`, where two elements of the outputs lie at one place: what came last would stand
/// there.
void check_apart(const std::vector<at::Tensor>& outputs, const char* call);

}  // namespace ringlet
