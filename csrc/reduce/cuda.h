// What libringlet_cuda.so exports: plain C names, found with dlsym, so that nothing else links or includes CUDA.
//
// Contract: a function never throws and leaves the current device as it was. Thread safety: from any thread.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

struct RingletCudaFacts {
  int runtime_version;  ///< of the runtime linked in, e.g. 13000
  int driver_version;   ///< the newest the driver knows; 0 where there is no driver
  int devices;          ///< 0 where there is none or the driver refuses
  int kernels_run;      ///< 1 where one of our kernels gave the right answer on device 0
  char device[128];     ///< device 0's name and compute capability
  char error[256];      ///< what CUDA refused; empty where nothing was
};

/// Fills `facts`; starts the driver and, where there is a device, runs one small kernel on it.
void ringlet_cuda_facts(struct RingletCudaFacts* facts);

#ifdef __cplusplus
}
#endif
