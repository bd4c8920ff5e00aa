// An accepted connection until it is authenticated: the acceptor's side of transport/connection_handshake.h.
//
// It never waits. It keeps at most one Hello and one Proof, whatever the other side sends.
// Ownership: owns the socket until welcome(). Thread safety: one thread at a time (the listener's).
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/deadline.h"
#include "transport/connection_handshake.h"
#include "transport/socket.h"

namespace ringlet {

class IncomingConnection {
 public:
  enum class State {
    unauthenticated,  ///< the peer has not named this listener yet
    named,    ///< has named this listener, so it knows this job's store or overheard a rank; no proof has arrived
    waiting,  ///< the peer has sent a proof that is not checked yet
    gone,     ///< closed, broke the protocol or ran out of time
  };

  IncomingConnection(Socket socket, uint64_t listener);

  /// Reads the bytes that have arrived.
  State advance() noexcept;
  State state() const { return state_; }
  int descriptor() const { return socket_.get(); }
  const Deadline& deadline() const { return deadline_; }

  const Hello& hello() const { return hello_; }
  bool proves(const Token& key) const;
  /// Proves that this side knows the key, too. Returns the socket, or an invalid one if the connection is gone.
  Socket welcome(const Token& key) noexcept;
  /// Tells the peer that the rank that it asks for has left the group.
  void send_away(const Token& key) noexcept;

 private:
  bool answer(const Token& key, Domain domain) noexcept;
  bool fill(void* message, size_t bytes) noexcept;
  bool give(const void* message, size_t bytes) noexcept;
  void send_answer() noexcept;
  void look_for_end() noexcept;

  Socket socket_;
  uint64_t listener_id_;
  Deadline deadline_;
  State state_ = State::unauthenticated;
  size_t got_ = 0;  // bytes of the message that is arriving
  Hello hello_;
  Answer answer_;
  Proof proof_{};
};

}  // namespace ringlet
