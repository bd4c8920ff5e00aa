// Contract: throws DeviceError, which says what was tried and CUDA's reason, if `code` is not 0. Thread safety: pure.
#pragma once

#include <string>
#include <string_view>

#include "base/error.h"
#include "cuda/device_library.h"

namespace ringlet {

inline void check_device(const RingletCudaDevice& device, int code, std::string_view what) {
  if (code != 0) throw DeviceError(std::string(what) + ": " + device.explain(code));
}

}  // namespace ringlet
