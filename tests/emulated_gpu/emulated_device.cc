// The emulated GPU (emulated_gpu.cc) as a device of torch's, under the name that torch keeps for others: PrivateUse1.
//
// Tensors lie in host memory. torch's own operations wait for the current stream, and only for it, then run at once on
// the host: so what has not been made to wait for a stream reads what was there before.
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <thread>
#include <vector>

#include "cuda/device_library.h"

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

const RingletCudaDevice& device() { return *ringlet_cuda_device(); }
void* handle_of(c10::StreamId id) { return reinterpret_cast<void*>(id); }

/// Of a thread: ranks are threads, and one default stream for all would have them wait for each other.
struct Streams {
  Streams() : usual(add()), current(usual) {}
  ~Streams() {
    for (void* stream : all) device().destroy_stream(stream);
  }
  c10::StreamId add() {
    device().create_stream(&all.emplace_back());
    return reinterpret_cast<c10::StreamId>(all.back());
  }
  std::vector<void*> all;
  c10::StreamId usual, current;
};
thread_local Streams streams;

void wait_for(void* stream) {
  void* event = nullptr;
  device().create_event(&event);
  device().record(event, stream);
  for (int done = 0; done == 0; std::this_thread::yield()) device().finished(event, &done);
  device().destroy_event(event);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {kType, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream stream(c10::StreamId id) const { return c10::Stream(c10::Stream::UNSAFE, getDevice(), id); }
  c10::Stream getStream(c10::Device) const override { return stream(streams.current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(streams.usual); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(streams.add()); }
  c10::Stream getNewStream(c10::Device where, int) const override { return getStreamFromGlobalPool(where, false); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const c10::Stream before = stream(streams.current);
    streams.current = next.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return handle_of(stream.id()); }
  void synchronizeStream(const c10::Stream& stream) const override { wait_for(handle_of(stream.id())); }

  void synchronizeDevice(const c10::DeviceIndex) const override {
    for (void* stream : streams.all) wait_for(stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) device().create_event(event);
    device().record(*event, handle_of(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) device().wait(handle_of(stream.id()), event);
  }
  bool queryEvent(void* event) const override {
    int done = 1;
    if (event != nullptr) device().finished(event, &done);
    return done != 0;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr) device().destroy_event(event);
  }
};

struct Allocator final : c10::Allocator {
  static void release(void* memory) { device().release(memory); }
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    device().allocate(&memory, (bytes + 256) / 256 * 256);
    return {memory, memory, &release, c10::Device(kType, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dst, const void* src, size_t bytes) const override { default_copy_data(dst, src, bytes); }
};
Allocator allocator;

at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  wait_for(handle_of(streams.current));
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  TORCH_CHECK(from.sizes() == to.sizes(), "the fake device resizes nothing");
  return copy_from(from, to, false);
}

void through_the_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  wait_for(handle_of(streams.current));
  at::native::cpu_fallback(op, stack);
}

}  // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&through_the_host>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  c10::SetAllocator(kType, &allocator);
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
}

/// A stream of its own for the calling thread's operations from now on, and back to the default one.
TORCH_LIBRARY(emulated_device, m) {
  m.def("use_own_stream() -> ()", [] { streams.current = streams.add(); });
  m.def("use_default_stream() -> ()", [] { streams.current = streams.usual; });
  // Floats that lie at this address, as a pluggable allocator has given it.
  m.def("floats_at(int address, int count) -> Tensor", [](int64_t address, int64_t count) {
    const c10::Device where(kType, 0);
    return at::for_blob(reinterpret_cast<void*>(address), {count})
        .options(at::dtype(at::kFloat).device(where))
        .target_device(where)
        .make_tensor();
  });
}
