// The process's listener: one socket and one thread for all its groups. Here connections are made, accepted and proven.
//
// Nobody waits here for anybody: unauthenticated connections cost a bounded number of descriptors for a bounded time,
// and those of this job never wait behind them. An incoming connection for a group that is not made yet is kept. If
// both ranks of a pair connect at once on kind `collectives`, the higher rank's connection is kept; the other waits at
// the higher rank's listener, and is taken if that rank's own connector fails. docs/decisions/0011 says why it is safe
// to listen.
// Ownership: made on first use, for as long as the process lives; a forked child makes its own.
// Thread safety: all calls from any thread; a Resident is called on the listener's thread alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "memory/mapping.h"
#include "transport/address.h"
#include "transport/connector.h"
#include "transport/incoming_connection.h"
#include "transport/socket.h"
#include "transport/token.h"

namespace ringlet {

class Listener {
 public:
  using Bytes = std::vector<std::byte>;

  /// A rank of a group, as the listener knows it.
  class Resident {
   public:
    virtual ~Resident() = default;
    /// Whether a pipe to `peer` is still missing.
    virtual bool wants(int peer, ConnectionKind which) noexcept = 0;
    /// A connection that has proven itself. `take` tells the peer so, and is called while nobody else looks at the
    /// pipes: who sees anything that the peer did afterwards, sees the pipe as well.
    virtual void admit(int peer, ConnectionKind which, const std::function<Socket()>& take) noexcept = 0;
    /// A connector has failed.
    virtual void give_up(int peer, ConnectionKind which, ErrorKind kind, const std::string& reason) noexcept = 0;
  };

  /// Throws SystemError where this process cannot listen, InvalidUsage where RINGLET_INTERFACE or
  /// RINGLET_TCP_CONGESTION names nothing.
  static Listener& process();

  const PeerAddress& address() const { return address_of_process_; }
  /// From now on connections to `rank` of the group with this key are received. The listener does not keep it alive.
  void enter(const Token& key, int rank, const std::shared_ptr<Resident>& resident);
  /// Those who come later are told so: on kind `collectives` by `final_frame`, if there is one, as if the connection
  /// had stood before. It is also sent over own connectors that are still under way.
  void leave(const Token& key, int rank, Bytes final_frame = {}) noexcept;
  /// Ends in the caller's admit() or give_up(), unless it has left before or a connection came from the other side.
  void connect_to(Connector::Target call);

  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

 private:
  using MemberId = std::pair<Token, uint32_t>;  // a group's name and a rank of it
  struct Member {
    Token key;
    std::weak_ptr<Resident> resident;
  };
  struct Departed {
    MemberId id;
    Token key;
    Bytes final_frame;
  };
  /// A connection on which everything has been said: kept until the other side has read it.
  struct Leaving {
    Socket socket;
    Deadline deadline;
  };

  Listener();
  void start();
  [[noreturn]] void run();
  void wait();
  void take_calls();
  void receive();
  void make_room();
  void poll_incoming();
  void poll_connectors();
  bool consider(IncomingConnection& incoming);
  bool finish(Connector& connector);
  bool finish_for(const std::optional<Departed>& departed, Connector& connector);
  void wake() noexcept;
  Member member(const MemberId& id);
  std::optional<Departed> departed(const MemberId& id);
  bool turn_away(IncomingConnection& incoming);
  void part(Socket socket, const Bytes& final_frame);
  void close_departed();

  const int owner_;  // the process whose listener this is
  PeerAddress address_of_process_;
  Socket listener_;
  Descriptor wakeup_;
  std::mutex mutex_;
  std::map<MemberId, Member> members_;  // guarded by mutex_
  std::deque<Departed> departed_;       // the last that left; guarded by mutex_
  std::deque<Connector> calls_;         // new ones; guarded by mutex_
  bool stirred_ = false;                // members changed; guarded by mutex_

  // The thread's own.
  std::deque<IncomingConnection> incoming_;  // in the order in which they came
  std::deque<Connector> connectors_;
  std::deque<Leaving> leaving_;
  bool reconsider_ = false;  // what kept a proven incoming connection waiting may be over
  bool resting_ = false;     // no descriptors are left: the listener is not looked at for a moment
};

}  // namespace ringlet
