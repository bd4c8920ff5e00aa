// An allocator of host memory for torch that takes it from the registered heap, so that peers can read any tensor.
//
// Contract: blocks of kLeastBytes or more are registered. Smaller blocks come from torch's allocator, because messages
// of that size are staged anyway. Freed blocks are kept by size for later allocations, up to a limit. In a forked child
// all blocks come from torch's allocator. Blocks may be freed after the allocator was switched off. Thread safety: all
// calls from any thread.
#pragma once

#include <c10/core/Allocator.h>

namespace ringlet {

/// The process's allocator, made on first use.
c10::Allocator& registered_allocator();

/// Makes it, or torch's own again, the allocator of all CPU tensors created from now on.
void use_registered_allocator(bool enabled);

/// Between begin and end, which may nest, it is the allocator of all CPU tensors. If the heap is full, their memory then
/// comes from torch's allocator, without an error.
void begin_registered_tensors();
void end_registered_tensors();

/// Bytes of freed blocks that are kept.
size_t registered_allocator_cache_bytes();

}  // namespace ringlet
