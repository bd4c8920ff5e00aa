// A connection that this process is making: the initiator's side of transport/connection_handshake.h. The connector
// tries the addresses of one peer, each a moment after the one before (RFC 8305): an address that does not answer
// delays nothing. The first connection over which the peer proves itself is used.
//
// It never waits: advance() goes as far as it can now; watch() and left() say when to call it again. If loopback
// refuses, nobody listens there, and the connector fails once the other addresses have failed. Between hosts it tries
// again until its time is over: meanwhile the peer may connect, if a firewall lets only one side. A connector for
// messages never gives up for that reason, because the one for `collectives` does. While a listener is there, no
// connector gives up: the call that needs the connection has a timeout.
// Ownership: owns the sockets until take(). Thread safety: one thread at a time (the listener's).
#pragma once

#include <poll.h>

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
  void watch(std::vector<pollfd>& list) const;
  std::chrono::milliseconds left() const;  ///< until the next call, if no socket is ready before
  /// Whether the peer may have taken a connection already.
  bool has_proved() const;

  Socket take() { return std::move(made_); }
  ErrorKind kind() const { return kind_; }
  const std::string& reason() const { return reason_; }

 private:
  /// A connection to one of the addresses.
  struct Attempt {
    enum class State { connecting, asking, proving };

    const Address* address;
    Socket socket;
    Deadline limit;
    State state = State::connecting;
    size_t got = 0;  // bytes of the message that is arriving
    Hello hello{};
    Answer answer{};
    Proof proof{};

    /// -1 when all of the message is there; 0 while more is to come; else the error number.
    int fill(void* message, size_t bytes);
  };
  enum class Step { going, made, missed, failed };

  Step start(const Address& address);
  Step advance(Attempt& attempt);
  Step connected(Attempt& attempt);
  Step answered(Attempt& attempt);
  Step welcomed(Attempt& attempt);
  Step unreachable(const Address& address, int code);
  Step miss(const Address& address, const std::string& why, bool worth_repeating);
  Step fail(ErrorKind kind, const std::string& why);
  /// All addresses failed: begins again after a pause, or fails.
  Outcome end_round();
  std::string place(const Address& address) const;

  Target target_;
  std::vector<Address> addresses_;
  size_t next_ = 0;  // the address to try next
  Deadline start_;   // when to try it
  std::vector<Attempt> attempts_;
  Socket made_;
  Deadline until_;
  std::chrono::milliseconds pause_;
  bool repeat_ = false;          // an address that failed in this round may succeed in the next
  bool nobody_listens_ = false;  // loopback refuses: the listener of that process is gone
  bool silent_ = false;  // a listener took the connection in this round, and said nothing: its process may be stopped
  std::string reasons_;  // why the addresses of this round failed
  ErrorKind kind_ = ErrorKind::peer_lost;
  std::string reason_;
};

}  // namespace ringlet
