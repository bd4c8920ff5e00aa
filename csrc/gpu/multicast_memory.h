// This rank's part of a multicast object: memory of all ranks' GPUs that a switch stores to, and adds up, at once.
//
// Contract: join(), then, when all ranks have joined, map(). Rank 0 makes the object and hands its descriptor to the
// others over sockets of this host, named by random tokens that they have told it; a process of another user is not
// heard. All throw DeviceError or SystemError, and a rank 0 that cannot make the object tells the others.
// Ownership: owns what it made; the object lasts until the last rank has let go of it. The destructor must not run
// before this rank's kernels have ended; if they may never end, lose(). The device outlives it.
// Thread safety: one thread at a time, with the device current in join() and map().
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "base/deadline.h"
#include "cuda/cuda.h"
#include "memory/mapping.h"
#include "transport/token.h"

namespace ringlet {

class MulticastMemory {
 public:
  MulticastMemory(const RingletCudaDevice& device, size_t bytes);
  ~MulticastMemory();
  MulticastMemory(const MulticastMemory&) = delete;
  MulticastMemory& operator=(const MulticastMemory&) = delete;

  /// Where this rank takes the descriptor; the others must know it before join().
  const Token& mailbox() const { return name_; }

  /// mailboxes: all ranks', in their order. look: while it waits, every now and then; what it throws ends the wait.
  void join(const std::vector<Token>& mailboxes, int rank, const Deadline& deadline, const std::function<void()>& look);
  void map();
  /// Nothing is given back: a kernel may still use it.
  void lose() noexcept { made_ = {}; }

  std::byte* own() const { return static_cast<std::byte*>(made_.own); }
  std::byte* all() const { return static_cast<std::byte*>(made_.all); }

 private:
  void make(const std::vector<Token>& mailboxes);
  void take(const Deadline& deadline, const std::function<void()>& look);

  const RingletCudaDevice& device_;
  const Token name_ = random_token();
  Descriptor socket_;
  RingletCudaMulticast made_{};
};

}  // namespace ringlet
