// Checks torch tensors before anything moves, and gives the core their memory.
#pragma once

#include <ATen/core/Tensor.h>

#include "base/dtype.h"

namespace ringlet {

/// Throws InvalidUsage for a dtype that the core does not support.
DType dtype_of(const at::Tensor& tensor);

/// Throws InvalidUsage, naming `call` and `role`, unless the tensor is strided and in host or GPU memory.
void check_dense(const at::Tensor& tensor, const char* call, const char* role);
/// The same; also refuses a tensor that is not contiguous.
void check_tensor(const at::Tensor& tensor, const char* call, const char* role);

std::byte* data_of(const at::Tensor& tensor);

/// Refuses a tensor of another dtype than the call's other tensors.
void check_dtype(const at::Tensor& tensor, DType dtype, const char* call);
/// Throws InvalidUsage, because `tensor` does not have the `expected` number of elements.
[[noreturn]] void refuse_elements(const char* call, const char* role, const at::Tensor& tensor, size_t expected,
                                  int world);

/// Tells autograd of the write, as torch's in-place operations do. A backward that saved the old values raises.
void mark_written(const at::Tensor& tensor);

/// An uninitialized contiguous tensor of registered memory. The end of a GPU's tensor waits for the device.
/// Throws ResourceError if the heap is full, InvalidUsage if the device has no registered memory.
at::Tensor empty_registered(c10::IntArrayRef sizes, c10::ScalarType dtype, c10::Device device = c10::kCPU);

/// Whether peers can read the tensor in place.
bool is_registered(const at::Tensor& tensor);
/// Whether a device has registered memory.
bool has_registered(const c10::Device& device);

}  // namespace ringlet
