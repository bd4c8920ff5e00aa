// Moving messages between two ranks, through slabs of the sender's region or in place from registered memory.
//
// Contract: a pair's channel is a pipe: messages arrive in the order in which they were put in, one at a time. An
// Outgoing is complete when its tensor may be written again. Both are resumable and never wait, so that one thread can
// move many (comm/messenger.h, which also matches tags). Thread safety: one thread at a time per peer and direction.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/dtype.h"
#include "transport/transport.h"

namespace ringlet {

inline constexpr int kAnySource = -1;
inline constexpr size_t kAtOnce = size_t{512} << 10;  // so that no message holds up the others, or who started it

struct Message {
  int peer;  ///< when receiving, kAnySource takes whichever comes first
  bool sending;
  DType dtype;
  size_t count;
  std::byte* data;  ///< read when sending, written when receiving
  std::chrono::milliseconds timeout;
  int64_t tag = 0;  ///< a receive takes only a message of the same tag

  size_t bytes() const { return count * element_size(dtype); }
};

class Outgoing {
 public:
  Outgoing(Transport& transport, const Message& message) : transport_(transport), message_(message) {}

  /// Puts out what there is room for, at most kAtOnce bytes; true once the message is complete.
  bool advance();
  size_t moved() const { return moved_; }
  /// What the peer changes when it has taken a slab.
  const std::atomic<uint32_t>& watched() const;

 private:
  void put(bool in_place, uint64_t address, size_t piece);

  Transport& transport_;
  Message message_;
  size_t moved_ = 0;
  bool started_ = false;
  bool in_place_ = false;
};

class Incoming {
 public:
  /// The header of the message that comes next from `peer`; null while none has arrived. Not while one is being taken.
  static const SlabHeader* next(const Transport& transport, int peer);
  /// What the peer changes when it has put out a slab.
  static const std::atomic<uint32_t>& watched(const Transport& transport, int peer);

  /// Takes the next message from `peer`, `bytes` long, to `to`.
  Incoming(Transport& transport, int peer, std::byte* to, size_t bytes)
      : transport_(transport), peer_(peer), to_(to), bytes_(bytes) {}

  /// Takes what has arrived, at most kAtOnce bytes; true once the message is complete.
  bool advance();
  size_t moved() const { return moved_; }

 private:
  Transport& transport_;
  int peer_;
  std::byte* to_;
  size_t bytes_;
  size_t moved_ = 0;
  bool started_ = false;
};

}  // namespace ringlet
