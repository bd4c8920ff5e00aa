// Tensors as the core sees them: checked before anything moves.
#pragma once

#include <ATen/core/Tensor.h>

#include "base/dtype.h"

namespace ringlet {

/// Throws InvalidUsage for a dtype the core does not know.
DType dtype_of(const at::Tensor& tensor);
c10::ScalarType scalar_type_of(DType dtype) noexcept;

/// Throws InvalidUsage, naming `call` and `role`, unless the tensor is strided and in host memory or a GPU's.
void check_dense(const at::Tensor& tensor, const char* call, const char* role);
/// The same, and contiguous.
void check_tensor(const at::Tensor& tensor, const char* call, const char* role);

std::byte* data_of(const at::Tensor& tensor);

/// A contiguous tensor of registered memory, uninitialized. Throws SystemError when the heap is full.
at::Tensor empty_registered(c10::IntArrayRef sizes, c10::ScalarType dtype);

}  // namespace ringlet
