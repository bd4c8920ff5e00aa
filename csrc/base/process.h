// The number of this process, at the cost of one load. Objects keep it to notice that they are in a forked child, which
// has its parent's objects but none of its threads. Thread safety: all calls from any thread.
#pragma once

#include <atomic>

namespace ringlet {

extern std::atomic<int> process_number;  // a handler in the child of every fork() updates it

inline int this_process() noexcept { return process_number.load(std::memory_order_relaxed); }

}  // namespace ringlet
