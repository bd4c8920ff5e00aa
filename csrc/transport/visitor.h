// A connection that came in, until it has proven itself: the acceptor's side of transport/greeting.h.
//
// It never waits and holds no more than one Hello and one Proof, whatever the other side sends or leaves out.
// Ownership: owns the socket until welcome(). Thread safety: one thread at a time (the door's).
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/deadline.h"
#include "transport/greeting.h"
#include "transport/socket.h"

namespace ringlet {

class Visitor {
 public:
  enum class Stage {
    stranger,  ///< has not named this door yet
    named,     ///< named this door, as only those can who read this job's store or overheard a rank; no proof yet
    waiting,   ///< gave a proof, which nobody has looked at yet
    gone,      ///< closed, broke the rules or ran out of time
  };

  Visitor(Socket socket, uint64_t door);

  /// Takes what has arrived.
  Stage advance() noexcept;
  Stage stage() const { return stage_; }
  int descriptor() const { return socket_.get(); }
  const Deadline& deadline() const { return deadline_; }

  const Hello& hello() const { return hello_; }
  bool proves(const Token& key) const;
  /// Shows that this side knows the key too; the socket, or an invalid one where the visitor has gone.
  Socket welcome(const Token& key) noexcept;
  /// Lets it know that the rank it wants has left the group.
  void send_away(const Token& key) noexcept;

 private:
  bool answer(const Token& key, Domain domain) noexcept;
  bool fill(void* message, size_t bytes) noexcept;
  void greet() noexcept;
  void look_for_end() noexcept;

  Socket socket_;
  uint64_t door_;
  Deadline deadline_;
  Stage stage_ = Stage::stranger;
  size_t got_ = 0;  // bytes of the message that is arriving
  Hello hello_;
  Answer answer_;
  Proof proof_{};
};

}  // namespace ringlet
