// Linked where there was an nvcc; no_gpu.cc otherwise.
#include "gpu/gpu.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>

#include "base/error.h"

namespace ringlet {
namespace {

constexpr const char* kVariable = "RINGLET_CUDA_LIBRARY";

std::string library_path() {
  if (const char* path = std::getenv(kVariable); path != nullptr && *path != '\0') return path;
  const std::string library = "libringlet_cuda.so";
  Dl_info here{};
  if (::dladdr(reinterpret_cast<const void*>(&gpu_status), &here) == 0 || here.dli_fname == nullptr) return library;
  const std::string self = here.dli_fname;
  const std::string folder = self.substr(0, self.rfind('/') + 1);
  const std::string beside = folder + library;
  // A wheel has it once, above the folders of its extensions.
  const std::string above = folder + "../" + library;
  return ::access(beside.c_str(), F_OK) != 0 && ::access(above.c_str(), F_OK) == 0 ? above : beside;
}

template <class Function>
Function* exported(const char* name) {
  // Never closed: the driver's threads may run its code until the process ends.
  void* library = ::dlopen(library_path().c_str(), RTLD_NOW | RTLD_LOCAL);
  return library == nullptr ? nullptr : reinterpret_cast<Function*>(::dlsym(library, name));
}

std::string advice() { return std::string("install ringlet again, or unset ") + kVariable + " if it is set"; }

std::string loader_message() {
  const char* message = ::dlerror();
  return message == nullptr ? "no reason given" : message;
}

GpuStatus status_of(const RingletCudaFacts& facts) {
  GpuStatus status{.state = "ready",
                   .detail = facts.device,
                   .runtime_version = facts.runtime_version,
                   .driver_version = facts.driver_version,
                   .devices = facts.devices};
  if (facts.driver_version == 0) {
    status.state = "no driver";
    status.advice = "a machine with an NVIDIA GPU needs its driver (nvidia-smi shows it); in a container, --gpus all";
  } else if (facts.error[0] != '\0') {
    status.state = "error";
    status.detail += (status.detail.empty() ? "" : ": ") + std::string(facts.error);
    status.advice = "a driver older than the runtime must be updated, a device in use by others waited for";
  } else if (facts.devices == 0) {
    status.state = "no device";
    status.advice = "the driver shows no GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES";
  } else if (facts.kernels_run == 0) {
    status.state = "error";
    status.detail += ": a kernel gave a wrong answer";
    status.advice = "the device or its driver is faulty: see nvidia-smi and the kernel's log";
  }
  return status;
}

}  // namespace

GpuStatus gpu_status() {
  ::dlerror();
  const auto look = exported<decltype(ringlet_cuda_facts)>("ringlet_cuda_facts");
  if (look == nullptr) {
    return {.state = "not loaded", .detail = loader_message(), .advice = advice()};
  }
  RingletCudaFacts facts;
  look(&facts);
  return status_of(facts);
}

const RingletCudaDevice& gpu_device() {
  static std::atomic<const RingletCudaDevice*> known{nullptr};
  if (const RingletCudaDevice* device = known.load(std::memory_order_acquire)) return *device;
  ::dlerror();
  const auto find = exported<decltype(ringlet_cuda_device)>("ringlet_cuda_device");
  if (find == nullptr) throw DeviceError("the GPU library cannot be opened: " + loader_message() + "; " + advice());
  const RingletCudaDevice* device = find();
  if (device->bytes != sizeof(RingletCudaDevice)) {
    throw DeviceError(library_path() + " is of another version of ringlet; " + advice());
  }
  known.store(device, std::memory_order_release);
  return *device;
}

}  // namespace ringlet
