// What there is of a GPU: the seam between the engines and the CUDA library.
//
// Contract: nothing of CUDA is loaded before the first call, which opens libringlet_cuda.so from the folder of the code
// that holds these functions, or the folder above (RINGLET_CUDA_LIBRARY=path names another) and keeps it open.
// A build without nvcc links no_gpu.cc, which answers "not built". Thread safety: from any thread.
#pragma once

#include <string>

#include "cuda/device_library.h"

namespace ringlet {

/// state is "ready", or the first thing missing: "not built", "not loaded", "no driver", "no device", "error".
struct GpuStatus {
  std::string state{};
  std::string detail{};     ///< the device's name, or what refused
  std::string advice{};     ///< what to do; empty where the state is "ready"
  int runtime_version = 0;  ///< of the CUDA runtime built in, e.g. 13000; 0 where there is none
  int driver_version = 0;   ///< the newest CUDA that the driver knows
  int devices = 0;
};

/// Asked anew at each call. Never throws but for want of memory.
GpuStatus gpu_status();

/// The device's functions. DeviceError where the library is not there or is of another version; asked again it looks
/// again.
const RingletCudaDevice& gpu_device();

}  // namespace ringlet
