#include "bindings/tensors.h"

#include <ATen/ops/from_blob.h>

#include <sstream>
#include <string_view>

#include "base/error.h"
#include "bindings/gpu_memory.h"
#include "bindings/on_device.h"
#include "gpu/gpu_heap.h"
#include "memory/heap.h"

namespace ringlet {
namespace {

struct Row {
  c10::ScalarType scalar_type;
  DType dtype;
};
constexpr Row kRows[] = {
    {c10::ScalarType::Float, DType::float32},
    {c10::ScalarType::BFloat16, DType::bfloat16},
    {c10::ScalarType::Half, DType::float16},
    {c10::ScalarType::Double, DType::float64},
    {c10::ScalarType::Float8_e4m3fn, DType::float8_e4m3fn},
    {c10::ScalarType::Float8_e5m2, DType::float8_e5m2},
    {c10::ScalarType::Long, DType::int64},
    {c10::ScalarType::Int, DType::int32},
    {c10::ScalarType::Short, DType::int16},
    {c10::ScalarType::Char, DType::int8},
    {c10::ScalarType::Byte, DType::uint8},
    {c10::ScalarType::Bool, DType::boolean},
    {c10::ScalarType::ComplexFloat, DType::complex64},
    {c10::ScalarType::ComplexDouble, DType::complex128},
    {c10::ScalarType::UInt16, DType::uint16},
    {c10::ScalarType::UInt32, DType::uint32},
    {c10::ScalarType::UInt64, DType::uint64},
};

}  // namespace

DType dtype_of(const at::Tensor& tensor) {
  for (const Row& row : kRows) {
    if (row.scalar_type == tensor.scalar_type()) return row.dtype;
  }
  throw InvalidUsage(std::string("ringlet does not support dtype ") + c10::toString(tensor.scalar_type()) +
                     ": view the tensor as one of float64/32/16, bfloat16, float8_e4m3fn, float8_e5m2, int64/32/16/8, "
                     "uint64/32/16/8, bool, complex64, complex128");
}

namespace {

/// Whether all of a tensor's elements lie in memory.
bool is_in_memory(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return true;
  if (!tensor.has_storage()) return false;
  const c10::Storage& storage = tensor.storage();
  int64_t span = tensor.numel();
  if (!tensor.is_contiguous()) {
    span = 1;
    for (int64_t d = 0; d < tensor.dim(); ++d) span += (tensor.size(d) - 1) * tensor.stride(d);
  }
  int64_t end = 0;
  if (__builtin_add_overflow(tensor.storage_offset(), span, &end)) return false;
  if (__builtin_mul_overflow(end, static_cast<int64_t>(tensor.itemsize()), &end)) return false;
  return storage.data() != nullptr && static_cast<size_t>(end) <= storage.nbytes();
}

}  // namespace

void check_dense(const at::Tensor& tensor, const char* call, const char* role) {
  const auto refuse = [&](const std::string& why) {
    throw InvalidUsage(std::string(call) + ": the " + role + " tensor " + why);
  };
  if (!tensor.defined()) refuse("is undefined");
  if (tensor.layout() != c10::kStrided) refuse("has the layout " + c10::str(tensor.layout()) + ": make it dense first");
  if (tensor.is_nested() && !tensor.is_contiguous()) refuse("is nested and not contiguous: pass .contiguous()");
  if (tensor.key_set().has_any(c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative}))) {
    const char* bit = tensor.is_conj() ? "conj" : "neg";
    refuse(std::string("is a ") + bit + " view, and its memory holds other values: pass .resolve_" + bit + "()");
  }
  if (!tensor.is_cpu() && !is_served(tensor.device())) {
    refuse("must be in host memory or on a CUDA device, got " + tensor.device().str());
  }
  if (tensor._fw_grad(0).defined()) {
    refuse("has a tangent of forward-mode differentiation, which calls do not carry: pass .detach()");
  }
  if (!is_in_memory(tensor)) {
    refuse("has no memory for its elements (it is a fake, vmap or zero tensor, or its storage was resized)");
  }
}

void check_tensor(const at::Tensor& tensor, const char* call, const char* role) {
  check_dense(tensor, call, role);
  if (tensor.is_contiguous()) return;
  const bool written = std::string_view(role) == "output" || std::string_view(call).starts_with("recv");
  std::ostringstream text;
  text << call << ": the " << role << " tensor is not contiguous (sizes " << tensor.sizes() << ", strides "
       << tensor.strides()
       << "): " << (written ? "pass a contiguous tensor, and copy the result from it" : "pass .contiguous()");
  throw InvalidUsage(text.str());
}

void check_dtype(const at::Tensor& tensor, DType dtype, const char* call) {
  if (dtype_of(tensor) == dtype) return;
  throw InvalidUsage(std::string(call) + ": all tensors of a call must have one dtype, got " + name(dtype) + " and " +
                     name(dtype_of(tensor)));
}

void refuse_elements(const char* call, const char* role, const at::Tensor& tensor, size_t expected, int world) {
  throw InvalidUsage(std::string(call) + ": the " + role + " tensor must have " + std::to_string(expected) +
                     " elements for " + std::to_string(world) + " ranks, got " + std::to_string(tensor.numel()));
}

std::byte* data_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.mutable_data_ptr()); }

void mark_written(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

at::Tensor empty_registered(c10::IntArrayRef sizes, c10::ScalarType dtype, c10::Device device) {
  auto bytes = static_cast<int64_t>(c10::elementSize(dtype));
  for (const int64_t size : sizes) {
    if (size < 0) throw InvalidUsage("empty: sizes must be 0 or more, got " + std::to_string(size));
    if (!__builtin_mul_overflow(bytes, size, &bytes)) continue;
    std::ostringstream text;
    text << "empty: a tensor of sizes " << sizes << " and " << c10::toString(dtype) << " is larger than any memory";
    throw InvalidUsage(text.str());
  }
  const auto options = at::TensorOptions().dtype(dtype);
  if (!device.is_cpu()) return empty_on_gpu(sizes, options.device(device), static_cast<size_t>(bytes));
  const std::shared_ptr<Heap> heap = Heap::process();
  std::byte* memory = heap->allocate(static_cast<size_t>(bytes));
  return at::from_blob(memory, sizes, [heap](void* pointer) { heap->free(static_cast<std::byte*>(pointer)); }, options);
}

bool is_registered(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return Heap::process()->locate(tensor.const_data_ptr(), tensor.nbytes()).has_value();
  const GpuHeap* heap = heap_of(tensor.device());
  return heap != nullptr && heap->holds(tensor.const_data_ptr(), tensor.nbytes());
}

bool has_registered(const c10::Device& device) { return device.is_cpu() || heap_of(device) != nullptr; }

}  // namespace ringlet
