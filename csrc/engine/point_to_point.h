// Send and receive between two ranks, through slabs of the sender's region or in place from registered memory.
//
// Contract: messages of one pair arrive in order; a send is complete when its tensor may be written again. Sender and
// receiver must name the same dtype and count: InvalidUsage on the receiver otherwise, and through it on the sender.
// A Transfer is resumable, so that one thread can move many. Thread safety: one thread at a time per peer and direction.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>

#include "base/dtype.h"
#include "engine/wait.h"
#include "transport/transport.h"

namespace ringlet {

struct Message {
  int peer;
  bool sending;
  DType dtype;
  size_t count;
  std::byte* data;  ///< read when sending, written when receiving
  std::chrono::milliseconds timeout;
};

class Transfer {
 public:
  Transfer(Transport& transport, Waiter& waiter, const Message& message);

  /// Moves what can be moved now; true once the message is complete. Throws InvalidUsage on a mismatch.
  bool advance() { return message_.sending ? advance_send() : advance_receive(); }

  /// Moves all of it, waiting for the peer.
  void finish(bool patient);

 private:
  bool advance_send();
  bool advance_receive();
  void check(const SlabHeader& header) const;
  void announce(std::atomic<uint32_t>& counter, uint32_t value) const;
  const std::atomic<uint32_t>& watched() const;
  std::string story() const;

  Transport& transport_;
  Waiter& waiter_;
  Message message_;
  size_t bytes_;
  size_t moved_ = 0;
  bool started_ = false;
  bool in_place_ = false;
};

}  // namespace ringlet
