// A connection that this process is making: the initiator's side of transport/connection_handshake.h. The connector
// tries the addresses of one peer in turn.
//
// It never waits: advance() goes as far as it can now; descriptor(), events() and next() say when to call it again. If
// all addresses refuse or are unreachable, it fails at once. If there is no answer, or an overloaded listener drops the
// connection, it tries again until its time is over.
// Ownership: owns the socket until take(). Thread safety: one thread at a time (the listener's).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "transport/address.h"
#include "transport/connection_handshake.h"
#include "transport/pipe.h"
#include "transport/socket.h"

namespace ringlet {

class Connector {
 public:
  struct Target {
    Token key{};
    uint32_t from = 0;
    uint32_t to = 0;
    ConnectionKind which = ConnectionKind::collectives;
    PeerAddress address{};
  };
  enum class Outcome { going, made, failed };

  explicit Connector(Target target);

  Outcome advance();
  const Target& target() const { return target_; }
  int descriptor() const { return socket_.get(); }  ///< -1 during a pause
  short events() const;                             ///< for poll()
  const Deadline& next() const { return step_; }

  Socket take() { return std::move(socket_); }
  ErrorKind kind() const { return kind_; }
  const std::string& reason() const { return reason_; }

 private:
  enum class State { pause, connecting, asking, proving };

  Outcome start();
  Outcome connected();
  Outcome answered();
  Outcome welcomed();
  /// This address failed: tries the next one, or fails after the last.
  Outcome miss(const std::string& why, bool worth_repeating);
  Outcome fail(ErrorKind kind, const std::string& why);
  /// -1 when all of the message is there; 0 while more is to come; else the error number.
  int fill(void* message, size_t bytes);
  std::string place() const;

  Target target_;
  std::vector<Address> addresses_;
  size_t address_ = 0;
  Socket socket_;
  State state_ = State::pause;
  Deadline until_;
  Deadline step_;
  std::chrono::milliseconds pause_;
  bool repeat_ = false;  // an address that failed in this round may succeed in the next
  std::string reasons_;  // why the addresses of this round failed
  size_t got_ = 0;
  Hello hello_;
  Answer answer_;
  Proof proof_{};
  ErrorKind kind_ = ErrorKind::peer_lost;
  std::string reason_;
};

}  // namespace ringlet
