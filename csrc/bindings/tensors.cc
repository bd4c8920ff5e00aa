#include "bindings/tensors.h"

#include <ATen/ops/from_blob.h>

#include <sstream>

#include "base/error.h"
#include "bindings/on_device.h"
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
};

}  // namespace

DType dtype_of(const at::Tensor& tensor) {
  for (const Row& row : kRows) {
    if (row.scalar_type == tensor.scalar_type()) return row.dtype;
  }
  throw InvalidUsage(
      std::string("ringlet has no dtype ") + c10::toString(tensor.scalar_type()) +
      "; view the tensor as one it has (float64/32/16, bfloat16, float8_e4m3fn, float8_e5m2, int64/32/16/8, "
      "uint8, bool, complex64, complex128)");
}

c10::ScalarType scalar_type_of(DType dtype) noexcept {
  for (const Row& row : kRows) {
    if (row.dtype == dtype) return row.scalar_type;
  }
  return c10::ScalarType::Undefined;
}

void check_dense(const at::Tensor& tensor, const char* call, const char* role) {
  const auto refuse = [&](const std::string& why) {
    throw InvalidUsage(std::string(call) + ": the " + role + " tensor " + why);
  };
  if (!tensor.defined()) refuse("is undefined");
  if (tensor.layout() != c10::kStrided) refuse("is sparse; make it dense first");
  if (!tensor.is_cpu() && !is_served(tensor.device())) {
    refuse("is on " + tensor.device().str() + "; ringlet moves host memory and CUDA tensors");
  }
}

void check_tensor(const at::Tensor& tensor, const char* call, const char* role) {
  check_dense(tensor, call, role);
  if (tensor.is_contiguous()) return;
  std::ostringstream text;
  text << call << ": the " << role << " tensor is not contiguous (sizes " << tensor.sizes() << ", strides "
       << tensor.strides() << "); pass .contiguous()";
  throw InvalidUsage(text.str());
}

std::byte* data_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(const_cast<void*>(tensor.const_data_ptr()));
}

at::Tensor empty_registered(c10::IntArrayRef sizes, c10::ScalarType dtype) {
  size_t bytes = c10::elementSize(dtype);
  for (const int64_t size : sizes) {
    if (size < 0) throw InvalidUsage("empty: negative size " + std::to_string(size));
    bytes *= static_cast<size_t>(size);
  }
  const std::shared_ptr<Heap> heap = Heap::process();
  std::byte* memory = heap->allocate(bytes);
  return at::from_blob(
      memory, sizes, [heap](void* pointer) { heap->free(static_cast<std::byte*>(pointer)); },
      at::TensorOptions().dtype(dtype));
}

}  // namespace ringlet
