// Which process this is, for no more than a load: a forked child has its parent's objects, but none of its threads.
//
// Thread safety: all calls from any thread.
#pragma once

#include <atomic>

namespace ringlet {

extern std::atomic<int> process_number;  // kept by what runs in the child of every fork()

inline int this_process() noexcept { return process_number.load(std::memory_order_relaxed); }

}  // namespace ringlet
