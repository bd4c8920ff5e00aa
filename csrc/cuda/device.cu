// The table of what the engines ask of a device.
#include <cstring>

#include "cuda/device_library.h"
#include "cuda/launch.cuh"

namespace ringlet::cuda {
namespace {

ReduceLaunch reduce_launch(DType dtype, ReduceOp op) {
  if (!supports(dtype, op)) return nullptr;
  if (const ReduceLaunch launch = float_launch(dtype, op)) return launch;
  if (const ReduceLaunch launch = float8_launch(dtype, op)) return launch;
  return other_launch(dtype, op);
}

int reduce(const ReduceArgs* args, DType dtype, ReduceOp op, void* stream) {
  if (args->n < 1 || args->n > kMostSources) return cudaErrorInvalidValue;
  const Counted counted = in_counted(*args, dtype, op);
  const bool nothing = counted.copies && args->dst == args->srcs[0] && args->dst2 == nullptr;
  const ReduceLaunch launch = counted.copies ? other_launch(DType::uint8, ReduceOp::bor) : reduce_launch(dtype, op);
  if (launch == nullptr) return cudaErrorInvalidValue;
  if (args->count == 0 || nothing) return cudaSuccess;
  return launch(&counted.args, op, static_cast<cudaStream_t>(stream));
}

int copy(void* dst, const void* src, size_t bytes, void* stream) {
  return cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream));
}

int pull(const PullArgs* args, DType dtype, void* stream) {
  const PullLaunch launch = supports(dtype, args->op) ? pull_launch(dtype, args->op) : nullptr;
  return launch == nullptr ? cudaErrorInvalidValue : launch(args, static_cast<cudaStream_t>(stream));
}

int exchange(const ExchangeArgs* args, void* stream) {
  return launch_exchange(args, static_cast<cudaStream_t>(stream));
}

int low_latency(const LowArgs* args, DType dtype, ReduceOp op, void* stream) {
  if (op != ReduceOp::sum && op != ReduceOp::avg) return cudaErrorInvalidValue;
  return launch_low_latency(args, dtype, static_cast<cudaStream_t>(stream));
}

/// Some kernels serve several dtypes and operations, and are loaded once.
int load() {
  for (int d = 0; d < kDTypes; ++d) {
    for (int o = 0; o < kReduceOps; ++o) {
      const auto dtype = static_cast<DType>(d);
      const auto op = static_cast<ReduceOp>(o);
      const ReduceLaunch reduction = reduce_launch(dtype, op);
      const PullLaunch pull = supports(dtype, op) ? pull_launch(dtype, op) : nullptr;
      cudaError_t refused = reduction == nullptr ? cudaSuccess : reduction(nullptr, op, nullptr);
      if (refused == cudaSuccess && pull != nullptr) refused = pull(nullptr, nullptr);
      if (refused != cudaSuccess) return refused;
    }
  }
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    if (const cudaError_t refused = launch_low_latency(nullptr, dtype, nullptr); refused != cudaSuccess) return refused;
  }
  return launch_exchange(nullptr, nullptr);
}

int create_stream(void** stream) {
  return cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream), cudaStreamNonBlocking);
}

int create_event(void** event) {
  return cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event), cudaEventDisableTiming);
}

/// A query, a copy, or what makes or gives back memory would end a capture that this or another thread is making, were
/// it not said that it is none of it.
template <class Act>
cudaError_t beside_captures(Act act) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  if (const cudaError_t refused = cudaThreadExchangeStreamCaptureMode(&mode); refused != cudaSuccess) return refused;
  const cudaError_t result = act();
  const cudaError_t restored = cudaThreadExchangeStreamCaptureMode(&mode);
  return result == cudaSuccess ? restored : result;
}

int finished(void* event, int* answer) {
  const cudaError_t state = beside_captures([=] { return cudaEventQuery(static_cast<cudaEvent_t>(event)); });
  *answer = state == cudaSuccess;
  return state == cudaErrorNotReady ? cudaSuccess : state;
}

int copy_now(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind, void* stream) {
  return beside_captures([=] {
    const auto on = static_cast<cudaStream_t>(stream);
    const cudaError_t refused = cudaMemcpyAsync(dst, src, bytes, kind, on);
    return refused == cudaSuccess ? cudaStreamSynchronize(on) : refused;
  });
}

int upload(void* dst, const void* src, size_t bytes, void* stream) {
  return copy_now(dst, src, bytes, cudaMemcpyHostToDevice, stream);
}

int download(void* dst, const void* src, size_t bytes, void* stream) {
  return copy_now(dst, src, bytes, cudaMemcpyDeviceToHost, stream);
}

int allocate(void** memory, size_t bytes) {
  return beside_captures([=] { return cudaMalloc(memory, bytes); });
}

int release(void* memory) {
  return beside_captures([=] { return cudaFree(memory); });
}

int allocate_mapped(void** memory, size_t bytes) {
  const cudaError_t refused =
      beside_captures([=] { return cudaHostAlloc(memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped); });
  if (refused == cudaSuccess) std::memset(*memory, 0, bytes);
  return refused;
}

int release_mapped(void* memory) {
  return beside_captures([=] { return cudaFreeHost(memory); });
}

int identity(RingletCudaIdentity* identity) {
  cudaDeviceProp properties;
  cudaError_t refused = cudaGetDevice(&identity->number);
  if (refused == cudaSuccess) refused = cudaGetDeviceCount(&identity->devices);
  if (refused == cudaSuccess) refused = cudaGetDeviceProperties(&properties, identity->number);
  if (refused != cudaSuccess) return refused;
  identity->processors = properties.multiProcessorCount;
  identity->architecture = properties.major * 10 + properties.minor;
  static_assert(sizeof properties.uuid.bytes == sizeof identity->uuid);
  std::memcpy(identity->uuid, properties.uuid.bytes, sizeof identity->uuid);
  return cudaSuccess;
}

int share(void* memory, RingletCudaShare* share) {
  cudaIpcMemHandle_t handle;
  static_assert(sizeof handle == sizeof share->bytes);
  const cudaError_t refused = beside_captures([&] { return cudaIpcGetMemHandle(&handle, memory); });
  std::memcpy(share->bytes, &handle, sizeof handle);
  return refused;
}

int open(const RingletCudaShare* share, void** memory) {
  cudaIpcMemHandle_t handle;
  std::memcpy(&handle, share->bytes, sizeof handle);
  return beside_captures([&] { return cudaIpcOpenMemHandle(memory, handle, cudaIpcMemLazyEnablePeerAccess); });
}

int close(void* memory, int device) {
  int current = 0;
  cudaError_t refused = cudaGetDevice(&current);
  if (refused == cudaSuccess) refused = cudaSetDevice(device);
  if (refused != cudaSuccess) return refused;
  refused = beside_captures([=] { return cudaIpcCloseMemHandle(memory); });
  cudaSetDevice(current);
  return refused;
}

int reach(int device) {
  int current = 0;
  if (const cudaError_t refused = cudaGetDevice(&current); refused != cudaSuccess || current == device) return refused;
  const cudaError_t refused = beside_captures([=] { return cudaDeviceEnablePeerAccess(device, 0); });
  return refused == cudaErrorPeerAccessAlreadyEnabled ? cudaSuccess : refused;
}

int capturing(void* stream, int* answer) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t refused = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  *answer = status != cudaStreamCaptureStatusNone;
  return refused;
}

constexpr RingletCudaDevice kDevice = {
    sizeof(RingletCudaDevice),
    "cuda",
    reduce,
    kMostSources,
    copy,
    pull,
    [](const PullArgs* ranks, int count, DType dtype, void* stream) -> int {
      return launch_pull_together(ranks, count, dtype, static_cast<cudaStream_t>(stream));
    },
    exchange,
    low_latency,
    load,
    upload,
    download,
    [](int device) -> int { return cudaSetDevice(device); },
    identity,
    share,
    open,
    close,
    reach,
    allocate,
    release,
    allocate_mapped,
    release_mapped,
    create_stream,
    [](void* stream) -> int { return cudaStreamDestroy(static_cast<cudaStream_t>(stream)); },
    create_event,
    [](void* event) -> int { return cudaEventDestroy(static_cast<cudaEvent_t>(event)); },
    [](void* event, void* stream) -> int {
      return cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream));
    },
    [](void* stream, void* event) -> int {
      return cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event), 0);
    },
    finished,
    capturing,
    [](int code) -> const char* { return cudaGetErrorString(static_cast<cudaError_t>(code)); },
};

}  // namespace
}  // namespace ringlet::cuda

extern "C" __attribute__((visibility("default"))) const RingletCudaDevice* ringlet_cuda_device() {
  return &ringlet::cuda::kDevice;
}
