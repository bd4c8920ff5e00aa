// The P2P transport between hosts: messages go over pipes, one for each direction. The sender opens the connection.
//
// Ownership: the engine outlives it. Thread safety: p2p_transport.h.
#pragma once

#include <optional>
#include <vector>

#include "engine/message/frame.h"
#include "engine/p2p_transport.h"

namespace ringlet {

class MessageEngine;

class StreamP2p final : public P2pTransport {
 public:
  explicit StreamP2p(MessageEngine& engine);

  int spins(bool background) const override;

  bool send(const Message& message, MessageProgress& progress) override;
  std::optional<Envelope> next(int peer) override;
  bool receive(int peer, std::byte* to, size_t bytes, MessageProgress& progress) override;

  void watch(int peer, bool sending, Watchlist& list) override;
  void sleep(const Watchlist& list, int64_t nanoseconds) override;

  void examine(Waiting& waiting, Health::Look look) override;

 private:
  struct Incoming {
    Pipe* pipe;
    FrameReader reader;
  };
  struct Outgoing {
    Pipe* pipe;
    FrameWriter writer;
  };
  Pipe* open(int peer);
  Incoming* incoming(int peer);
  bool lost(int peer, const Waiting& waiting);
  void check_alive(const Waiting& waiting);
  [[noreturn]] void fail_for_memory(const char* call, int peer);

  MessageEngine& engine_;
  std::vector<std::optional<Outgoing>> outgoing_;  // by peer
  std::vector<std::optional<Incoming>> incoming_;
};

}  // namespace ringlet
