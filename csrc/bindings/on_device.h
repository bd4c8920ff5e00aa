// Calls on tensors of a GPU, in c10's own words for devices, streams and events: no CUDA header is needed to build.
//
// Contract: a call comes behind what the caller's current stream has been given. Done at once (async false) it is on
// that stream; asynchronously it is on a stream that the group keeps for it, and the caller's must be made to wait for
// `done`. The host waits for nothing but, in a group's first call, for the other ranks. Thread safety: as Communicator.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <functional>
#include <memory>
#include <vector>

#include "comm/communicator.h"

namespace ringlet {

/// Whether the CUDA library (gpu/gpu.h) reaches the device's memory. Where there is none CUDA counts as served: the
/// first call then tells all ranks what is missing.
bool is_served(const c10::Device& device);

/// DeviceError where torch has no such device, or none of the kind.
void check_present(const c10::Device& device);

/// Where all of a call's tensors are. InvalidUsage, naming `call`, where they are on several devices.
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

/// What was put on a stream. As a handle of Python's, wait() lets the current stream wait, and not the host.
struct Enqueued {
  std::shared_ptr<Work> work;  ///< complete when the device is done with the calls
  c10::Stream stream;
  std::shared_ptr<c10::Event> done;  ///< null where the caller's own stream has it all

  /// Throws what has befallen the calls so far.
  void wait() const;
};

Enqueued enqueue(Communicator& group, const DeviceCalls& calls);

/// What calls on that device run on, in words; the first time a meeting of all ranks, as their first call is.
std::string gpu_transport(Communicator& group, const c10::Device& device);

}  // namespace ringlet
