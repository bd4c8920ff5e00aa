// What a test can ask of live_gpu.cc beyond what a GPU has.
#pragma once

extern "C" {

/// What is put on streams from now on becomes part of a graph, as far as they say (it runs all the same).
void live_gpu_capture(bool capturing);
/// A stream that is held begins nothing that it has not begun.
void live_gpu_hold(void* stream, bool held);
/// Until the stream has done all it was given.
void live_gpu_wait(void* stream);
/// How much memory of others is open, and how often memory was allocated.
int live_gpu_opened();
int live_gpu_allocations();
/// How many pull kernels were launched on tensors that peers can read in place.
int live_gpu_in_place();
/// Bits of the devices that were current where a call needs one, since this was asked last.
unsigned live_gpu_touched();
}
