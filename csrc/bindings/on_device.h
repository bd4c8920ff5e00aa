// Calls on tensors of a GPU, through c10's devices, streams and events, so that the build needs no CUDA header.
//
// Contract: a call follows the work of the caller's current stream. A synchronous call is on that stream. An
// asynchronous call is on a stream of the group, and the caller's stream must wait for `done`. The host waits only in a
// group's first call, for the other ranks. Thread safety: as Communicator.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <functional>
#include <memory>
#include <vector>

#include "comm/communicator.h"

namespace ringlet {

/// Whether the CUDA library (gpu/gpu.h) reaches the device's memory. Without the library CUDA counts as served: the
/// first call then tells all ranks what is missing.
bool is_served(const c10::Device& device);

/// Throws DeviceError if torch has no such device.
void check_present(const c10::Device& device);

/// The device of all of a call's tensors. Throws InvalidUsage, naming `call`, if they are on several devices.
c10::Device common_device(const std::vector<at::Tensor>& tensors, const char* call);

struct DeviceCalls {
  c10::Device device;
  std::vector<Call> calls{};
  std::vector<Message> messages{};    ///< that move together, after the calls
  std::vector<at::Tensor> tensors{};  ///< that the calls, `collect` and `deliver` read or write
  std::function<void()> collect{};    ///< torch's operations that come before
  std::function<void()> deliver{};    ///< ... and after
  bool async = false;
};

/// Calls that were put on a stream. wait() makes the current stream wait, not the host.
struct Enqueued {
  std::shared_ptr<Work> work;  ///< complete when the device is done with the calls
  c10::Stream stream;
  std::shared_ptr<c10::Event> done;  ///< null if the calls are on the caller's stream

  /// Throws the error of the calls, if one has failed.
  void wait() const;
};

Enqueued enqueue(Communicator& group, const DeviceCalls& calls);

/// Their handle in Python. It looks at them when it is asked, so it is complete as soon as they are.
class DeviceWork final : public Work {
 public:
  explicit DeviceWork(Enqueued enqueued) : calls(std::move(enqueued)) {}

  const Enqueued calls;

 private:
  void help() override {
    if (calls.work->done()) complete(nullptr);  // nobody asks it for an error: wait() is that of `calls`
  }
};

/// Describes what calls on that device run on. The first time all ranks must call it, as they make a first call.
std::string gpu_transport(Communicator& group, const c10::Device& device);

}  // namespace ringlet
