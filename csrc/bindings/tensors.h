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

/// Refuses a tensor of another dtype than the call's other tensors.
void check_dtype(const at::Tensor& tensor, DType dtype, const char* call);
/// Throws InvalidUsage: `tensor` does not have the elements that the call's other tensor and the world ask for.
[[noreturn]] void refuse_elements(const char* call, const char* role, const at::Tensor& tensor, size_t expected,
                                  int world);

/// Tells autograd, as torch's operations in place do: a backward that saved the values of before raises.
void mark_written(const at::Tensor& tensor);

/// A contiguous tensor of registered memory, uninitialized: of the host's, or a GPU's, whose end waits for the device.
/// Throws SystemError when the heap is full, InvalidUsage where the device has none.
at::Tensor empty_registered(c10::IntArrayRef sizes, c10::ScalarType dtype, c10::Device device = c10::kCPU);

/// Whether peers can read it where it lies.
bool is_registered(const at::Tensor& tensor);
/// Whether a device has registered memory.
bool has_registered(const c10::Device& device);

}  // namespace ringlet
