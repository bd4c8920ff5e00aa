// Linked where there was no nvcc; gpu.cc otherwise.
#include "base/error.h"
#include "gpu/gpu.h"

namespace ringlet {
namespace {

constexpr const char* kDetail = "this build found no nvcc";
constexpr const char* kAdvice = "install the CUDA toolkit 11.8 or later, put nvcc on PATH, and build again";

}  // namespace

GpuStatus gpu_status() { return {.state = "not built", .detail = kDetail, .advice = kAdvice}; }

const RingletCudaDevice& gpu_device() { throw DeviceError(std::string(kDetail) + "; " + kAdvice); }

}  // namespace ringlet
