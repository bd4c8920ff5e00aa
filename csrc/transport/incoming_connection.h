// A connection that came in, until it has proven itself: the acceptor's side of transport/connection_handshake.h.
//
// It never waits and holds no more than one Hello and one Proof, whatever the other side sends or leaves out.
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
    unauthenticated,  ///< has not named this listener yet
    named,    ///< named this listener, as only those can who read this job's store or overheard a rank; no proof yet
    waiting,  ///< gave a proof, which nobody has looked at yet
    gone,     ///< closed, broke the rules or ran out of time
  };

  IncomingConnection(Socket socket, uint64_t listener);

  /// Takes what has arrived.
  State advance() noexcept;
  State state() const { return state_; }
  int descriptor() const { return socket_.get(); }
  const Deadline& deadline() const { return deadline_; }

  const Hello& hello() const { return hello_; }
  bool proves(const Token& key) const;
  /// Shows that this side knows the key too; the socket, or an invalid one where the incoming connection has gone.
  Socket welcome(const Token& key) noexcept;
  /// Lets it know that the rank it wants has left the group.
  void send_away(const Token& key) noexcept;

 private:
  bool answer(const Token& key, Domain domain) noexcept;
  bool fill(void* message, size_t bytes) noexcept;
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
