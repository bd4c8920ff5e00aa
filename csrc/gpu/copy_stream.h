// A stream of its own for copies between host and device, which wait for no kernel.
//
// Contract: each copy is done when it returns; what it returns is the device's code, 0 where it went well. The
// constructor throws DeviceError. Ownership: owns the stream; the device outlives it. Thread safety: one thread at a
// time; the device must be current in the constructor alone.
#pragma once

#include <cstddef>

#include "cuda/device_library.h"
#include "gpu/check_device.h"

namespace ringlet {

class CopyStream {
 public:
  explicit CopyStream(const RingletCudaDevice& device) : device_(device) {
    check_device(device_, device_.create_stream(&stream_), "making a stream");
  }
  ~CopyStream() { device_.destroy_stream(stream_); }
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;

  int upload(std::byte* to, const void* from, size_t bytes) const { return device_.upload(to, from, bytes, stream_); }
  int download(void* to, const std::byte* from, size_t bytes) const {
    return device_.download(to, from, bytes, stream_);
  }

 private:
  const RingletCudaDevice& device_;
  void* stream_ = nullptr;
};

}  // namespace ringlet
