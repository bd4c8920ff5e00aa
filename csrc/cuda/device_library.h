// What libringlet_cuda.so exports: two plain C names, found with dlsym, so that nothing else links or includes CUDA.
//
// Contract: no function throws, or, `use` aside, leaves another device current than it found; one that returns int
// returns 0 or CUDA's error code, which `explain` puts into words. Streams and events are CUDA's own handles. What
// takes a stream only enqueues: it allocates nothing and waits for nothing; the stream's device must be current.
// Thread safety: from any thread.
#pragma once

#include <cstddef>

#include "reduce/reduce.h"

namespace ringlet::cuda {
struct PullArgs;      // pull.h
struct ExchangeArgs;  // all_to_all.h
struct LowArgs;       // low_latency.h
}  // namespace ringlet::cuda

extern "C" {

struct RingletCudaFacts {
  int runtime_version;  ///< of the runtime linked in, e.g. 13000
  int driver_version;   ///< the newest the driver knows; 0 where there is no driver
  int devices;          ///< 0 where there is none or the driver refuses
  int kernels_run;      ///< 1 where one of our kernels gave the right answer on device 0
  char device[128];     ///< device 0's name and compute capability
  char error[256];      ///< what CUDA refused; empty where nothing was
};

/// Fills `facts`; starts the driver and, where there is a device, runs one small kernel on it.
void ringlet_cuda_facts(RingletCudaFacts* facts);

/// Which device is current, and what it has.
struct RingletCudaIdentity {
  unsigned char uuid[16];
  int number;        ///< this process's own, of
  int devices;       ///< ... so many that it sees
  int processors;    ///< a block of threads of a kernel needs one of them to run beside all others
  int architecture;  ///< 90: compute capability 9.0
};

/// How another process of this host can reach memory of `allocate`.
struct RingletCudaShare {
  char bytes[64];
};

/// The device as the engines see it. A test fills one with functions of its own and needs no GPU.
struct RingletCudaDevice {
  size_t bytes;        ///< sizeof(RingletCudaDevice) where the library was built
  const char* serves;  ///< the tensors whose memory it reaches, by torch's name of their device: "cuda"

  /// reduce.h's contract on addresses that the device reaches; up to `most_sources` sources.
  int (*reduce)(const ringlet::ReduceArgs* args, ringlet::DType dtype, ringlet::ReduceOp op, void* stream);
  int most_sources;
  int (*copy)(void* dst, const void* src, size_t bytes, void* stream);
  /// Runs a plan on peers' memory, whose elements are of `dtype`.
  int (*pull)(const ringlet::cuda::PullArgs* args, ringlet::DType dtype, void* stream);

  /// That of up to three ranks that share the device, in one launch, for tools that run one kernel at a time. Only
  /// int32's sums and what copies.
  int (*pull_together)(const ringlet::cuda::PullArgs* ranks, int count, ringlet::DType dtype, void* stream);

  /// An all-to-all on peers' memory.
  int (*exchange)(const ringlet::cuda::ExchangeArgs* args, void* stream);

  /// A small all-reduce on peers' memory, of float32, float16 or bfloat16; `op` sum or avg. From architecture 70 on.
  int (*low_latency)(const ringlet::cuda::LowArgs* args, ringlet::DType dtype, ringlet::ReduceOp op, void* stream);

  /// Brings all kernels to the device, so that none is loaded at its first launch, beside kernels that wait for it.
  int (*load)();

  /// From and to the host, done when they return; behind nothing but what is on that stream.
  int (*upload)(void* dst, const void* src, size_t bytes, void* stream);
  int (*download)(void* dst, const void* src, size_t bytes, void* stream);

  int (*use)(
      int device);  ///< makes it this thread's current one; a thread that has none gets device 0, and memory there
  int (*identity)(RingletCudaIdentity* identity);
  int (*share)(void* memory, RingletCudaShare* share);
  int (*open)(const RingletCudaShare* share, void** memory);  ///< another process's; reached by the current device
  int (*close)(void* memory, int device);                     ///< that was opened while that device was current
  int (*reach)(int device);  ///< the current device reaches that device's memory from now on

  int (*allocate)(void** memory, size_t bytes);  ///< may wait for the device, as release may
  int (*release)(void* memory);
  int (*allocate_mapped)(void** memory, size_t bytes);  ///< the host's, zeroed; kernels reach it by the same address
  int (*release_mapped)(void* memory);
  int (*create_stream)(void** stream);  ///< one that does not wait for the default stream
  int (*destroy_stream)(void* stream);
  int (*create_event)(void** event);
  int (*destroy_event)(void* event);
  int (*record)(void* event, void* stream);
  int (*wait)(void* stream, void* event);       ///< what follows on the stream waits for the event as last recorded
  int (*finished)(void* event, int* answer);    ///< answer 1: what it was recorded after is done
  int (*capturing)(void* stream, int* answer);  ///< answer 1: what is put on it becomes part of a CUDA graph

  const char* (*explain)(int code);
};

const RingletCudaDevice* ringlet_cuda_device();
}
