// What a test can ask of emulated_gpu.cc beyond what a GPU has.
#pragma once

extern "C" {

/// What is put on streams from now on becomes part of a graph, as far as they say (it runs all the same).
void emulated_gpu_capture(bool capturing);
/// A stream that is held begins nothing that it has not begun.
void emulated_gpu_hold(void* stream, bool held);
/// How many launches a stream takes before the next one waits; 1024 unless told otherwise.
void emulated_gpu_launch_queue(int length);
/// Until the stream has done all it was given.
void emulated_gpu_wait(void* stream);
/// How much memory of others is open, and how often memory was allocated.
int emulated_gpu_opened();
int emulated_gpu_allocations();
/// How often all kernels were loaded.
int emulated_gpu_loads();
/// How many sends and receives NCCL was given.
int emulated_gpu_messages();
/// How many pull kernels were launched on tensors that peers can read in place.
int emulated_gpu_in_place();
/// How many devices a process is told that it sees; 1 unless told otherwise.
void emulated_gpu_devices(int count);
/// What the devices are from now on; 90 unless told otherwise. How many kernels of small all-reduces were launched.
void emulated_gpu_architecture(int is);
int emulated_gpu_low_latencies();
/// The most blocks that a kernel on peers' memory had since this was asked last.
int emulated_gpu_most_blocks();
/// What the last communicator was told of processors.
int emulated_gpu_max_ctas();
/// How many of NCCL's own collectives were enqueued.
int emulated_gpu_natives();
/// Bits of the devices that were current where a call needs one, since this was asked last.
unsigned emulated_gpu_touched();
}
