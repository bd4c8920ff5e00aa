// An allocator of host memory for torch that takes it from the registered heap, so that peers can read any tensor.
//
// Contract: blocks from kLeastBytes up are registered, smaller ones torch's own (messages that small are staged
// anyway). Freed blocks are kept by size for the next allocation, up to a limit. In a forked child all blocks are
// torch's own. Blocks may be freed after the allocator was switched off. Thread safety: all calls from any thread.
#pragma once

#include <c10/core/Allocator.h>

namespace ringlet {

/// The process's one, made on first use.
c10::Allocator& registered_allocator();

/// Makes it, or torch's own again, the allocator of all CPU tensors created from now on.
void use_registered_allocator(bool enabled);

/// Bytes of freed blocks that are kept.
size_t registered_allocator_cache_bytes();

}  // namespace ringlet
