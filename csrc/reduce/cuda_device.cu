// The table of what the engines ask of a device.
#include "reduce/cuda.h"
#include "reduce/cuda_launch.cuh"

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
  return launch(counted.args, static_cast<cudaStream_t>(stream));
}

int cast(void* dst, DType to, const void* src, DType from, size_t count, void* stream) {
  const CastLaunch launch = cast_launch(from, to);
  if (launch == nullptr) return cudaErrorInvalidValue;
  if (count == 0) return cudaSuccess;
  const CastArgs args{static_cast<std::byte*>(dst), static_cast<const std::byte*>(src), count, to, from};
  return launch(args, static_cast<cudaStream_t>(stream));
}

int copy(void* dst, const void* src, size_t bytes, void* stream) {
  return cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream));
}

int pull(const PullArgs* args, DType dtype, ReduceOp op, void* stream) {
  const PullLaunch launch = supports(dtype, op) ? pull_launch(dtype, op) : nullptr;
  return launch == nullptr ? cudaErrorInvalidValue : launch(*args, static_cast<cudaStream_t>(stream));
}

int create_stream(void** stream) {
  return cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream), cudaStreamNonBlocking);
}

int create_event(void** event) {
  return cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event), cudaEventDisableTiming);
}

/// A query from one thread would end a capture that another is making, were it not said that it is none of it.
int finished(void* event, int* answer) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  if (const cudaError_t refused = cudaThreadExchangeStreamCaptureMode(&mode); refused != cudaSuccess) return refused;
  const cudaError_t state = cudaEventQuery(static_cast<cudaEvent_t>(event));
  const cudaError_t restored = cudaThreadExchangeStreamCaptureMode(&mode);
  *answer = state == cudaSuccess;
  return state == cudaErrorNotReady ? restored : state;
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
    cast,
    copy,
    pull,
    [](void* dst, const void* src, size_t bytes) -> int { return cudaMemcpy(dst, src, bytes, cudaMemcpyHostToDevice); },
    [](void* dst, const void* src, size_t bytes) -> int { return cudaMemcpy(dst, src, bytes, cudaMemcpyDeviceToHost); },
    [](void** memory, size_t bytes) -> int { return cudaMalloc(memory, bytes); },
    [](void* memory) -> int { return cudaFree(memory); },
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
