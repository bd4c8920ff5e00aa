#include "bindings/on_device.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "gpu/gpu.h"
#include "gpu/gpu_group.h"

namespace ringlet {
namespace {

using c10::impl::VirtualGuardImpl;

/// The group's stream for asynchronous calls.
c10::Stream side_stream(GpuGroup& group, const VirtualGuardImpl& guard, const c10::Device& device) {
  std::optional<int64_t>& id = group.side_stream();
  if (!id) id = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true).id();
  return c10::Stream(c10::Stream::UNSAFE, device, *id);
}

}  // namespace

bool is_served(const c10::Device& device) {
  if (!device.is_cuda() && !device.is_privateuseone()) return false;
  try {
    return std::strcmp(gpu_device().serves, device.is_cuda() ? "cuda" : "privateuseone") == 0;
  } catch (const DeviceError&) {  // the first call tells all ranks
    return device.is_cuda();
  }
}

void check_present(const c10::Device& device) {
  try {
    if (VirtualGuardImpl(device.type()).deviceCount() > std::max<int>(device.index(), 0)) return;
  } catch (const c10::Error&) {  // torch was built without this kind of device
  }
  throw DeviceError("torch has no " + device.str() + " here: run `ringlet doctor` to see why");
}

c10::Device common_device(const std::vector<at::Tensor>& tensors, const char* call) {
  const c10::Device first = tensors.empty() ? c10::Device(c10::kCPU) : tensors[0].device();
  for (const at::Tensor& tensor : tensors) {
    if (tensor.device() == first) continue;
    throw InvalidUsage(std::string(call) + ": all tensors of a call must be on one device, got " + first.str() +
                       " and " + tensor.device().str());
  }
  return first;
}

void Enqueued::wait() const {
  work->raise_if_failed();
  if (done == nullptr) return;
  const VirtualGuardImpl guard(stream.device_type());
  done->block(guard.getStream(stream.device()));
}

Enqueued enqueue(Communicator& group, const DeviceCalls& calls) {
  const c10::DeviceGuard current(calls.device);
  const VirtualGuardImpl guard(calls.device.type());
  const std::shared_ptr<GpuGroup> shared = group.on_gpu(calls.device.index());
  GpuGroup& gpu = *shared;
  const c10::Stream own = guard.getStream(calls.device);
  if (calls.device.is_cuda() && own.native_handle() == nullptr && gpu.shares_default_stream()) {
    throw InvalidUsage("ranks that are threads of one process share the default stream of " + calls.device.str() +
                       ", and would wait for each other there: give each rank a stream of its own: with "
                       "torch.cuda.stream(torch.cuda.Stream())");
  }
  const c10::Stream stream = calls.async ? side_stream(gpu, guard, calls.device) : own;
  if (calls.async) {
    c10::Event ready(calls.device.type());
    ready.record(own);
    ready.block(stream);
  }
  Enqueued enqueued{nullptr, stream, nullptr};
  if (calls.collect) {
    gpu.follow_calls(stream.native_handle());
    const c10::StreamGuard on(stream);
    calls.collect();
  }
  for (const Call& call : calls.calls) enqueued.work = gpu.run(call, stream.native_handle());
  if (!calls.messages.empty()) enqueued.work = gpu.exchange(calls.messages, stream.native_handle());
  if (calls.deliver) {
    const c10::StreamGuard on(stream);
    calls.deliver();
  }
  if (calls.async) {
    for (const at::Tensor& tensor : calls.tensors) {
      guard.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
    }
    enqueued.done = std::make_shared<c10::Event>(calls.device.type());
    enqueued.done->record(stream);
  }
  return enqueued;
}

std::string gpu_transport(Communicator& group, const c10::Device& device) {
  if (device.is_cpu() || !is_served(device)) throw InvalidUsage(device.str() + " is not a GPU that ringlet supports");
  check_present(device);
  const c10::DeviceGuard current(device);
  const VirtualGuardImpl guard(device.type());
  return group.on_gpu(guard.getDevice().index())->describe();
}

}  // namespace ringlet
