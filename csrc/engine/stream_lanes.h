// Messages over pipes, one for each direction, dialled by the sender.
//
// Ownership: the engine outlives it. Thread safety: lanes.h.
#pragma once

#include <optional>
#include <vector>

#include "engine/frame.h"
#include "engine/lanes.h"

namespace ringlet {

class MessageEngine;

class StreamLanes final : public Lanes {
 public:
  explicit StreamLanes(MessageEngine& engine);

  int rank() const override;
  int world() const override;
  int spins(bool patient) const override;

  bool send(const Message& message, Moved& moved) override;
  std::optional<MessageTitle> next(int peer) override;
  bool receive(int peer, std::byte* to, size_t bytes, Moved& moved) override;

  void watch(int peer, bool sending, Watchlist& list) override;
  void sleep(const Watchlist& list, int64_t nanoseconds) override;

  void tell_waiting(const std::string& story) override;
  void examine(const Waiting& waiting, const Deadline& deadline, bool closely) override;
  void raise_if_failed() override;
  [[noreturn]] void fail(ErrorKind kind, const std::string& message) override;

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
  void check_alive(const Waiting& waiting);
  [[noreturn]] void fail_for_memory(const char* call, int peer);

  MessageEngine& engine_;
  std::vector<std::optional<Outgoing>> outgoing_;  // by peer
  std::vector<std::optional<Incoming>> incoming_;
};

}  // namespace ringlet
