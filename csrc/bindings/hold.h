// Keeps the memory of tensors where it is while a call reads or writes it.
//
// Contract: while a hold lives, its tensors' storages live, even if a tensor gets another storage (set_, .data =), and
// torch refuses to resize them. Nothing prevents share_memory_(), which exchanges a storage's memory: that is an error
// of the caller, and the log reports it. Several holds of one storage nest. Holds are for host memory only: on a GPU
// the stream keeps the memory. Thread safety: different holds from any thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <initializer_list>
#include <vector>

namespace ringlet {

class MemoryHold {
 public:
  explicit MemoryHold(const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) add(tensor);
  }
  /// A null tensor is ignored.
  explicit MemoryHold(std::initializer_list<const at::Tensor*> tensors) {
    for (const at::Tensor* tensor : tensors) {
      if (tensor != nullptr) add(*tensor);
    }
  }
  ~MemoryHold();
  MemoryHold(MemoryHold&&) = default;
  MemoryHold& operator=(MemoryHold&&) = delete;

  /// A tensor on a device is ignored.
  void add(const at::Tensor& tensor);

 private:
  struct Held {
    c10::Storage storage;
    const void* memory;
    bool counted;
  };
  c10::SmallVector<Held, 2> held_;
};

}  // namespace ringlet
