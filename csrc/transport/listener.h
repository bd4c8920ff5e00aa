// The listener of the process: one socket and one thread make, accept and authenticate the connections of all groups.
//
// No connection waits for another: unauthenticated connections cost a bounded number of descriptors for a bounded time,
// and never delay the connections of this job. The listener keeps an incoming connection whose group is not made yet.
// Either rank of a pair may connect, on each kind. If both do at once, the connection of the higher rank is used. The
// other one waits at the higher rank's listener, if its own connector has proved itself to the peer, and is taken if
// that connector fails. docs/decisions/0011 says why it is safe to listen.
// Ownership: made at first use, lives as long as the process; a forked child makes its own.
// Thread safety: all calls from any thread. Only the listener's thread calls a Resident.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
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
    /// Whether the rank still needs a pipe to `peer`.
    virtual bool wants(int peer, ConnectionKind which) noexcept = 0;
    /// A connection is authenticated. `take` tells the peer so; call it while no other thread looks at the pipes. Then
    /// a thread that sees what the peer did afterwards sees the pipe, too.
    virtual void admit(int peer, ConnectionKind which, const std::function<Socket()>& take) noexcept = 0;
    /// A connector has failed.
    virtual void give_up(int peer, ConnectionKind which, ErrorKind kind, const std::string& reason) noexcept = 0;
  };

  /// Throws ResourceError if this process cannot listen, InvalidUsage if RINGLET_TCP_CONGESTION has an unknown name.
  static Listener& process();

  /// Where peers reach this process; `store` is as for own_addresses(). Throws ResourceError if there is no network,
  /// InvalidUsage if RINGLET_INTERFACE has an unknown name.
  PeerAddress address(const std::string& store) const;
  /// From now on the listener takes connections to `rank` of the group with this key. It does not keep `resident`
  /// alive.
  void enter(const Token& key, int rank, const std::shared_ptr<Resident>& resident);
  /// From now on the listener tells peers that connect that this rank has left: on kind `collectives` by `final_frame`,
  /// if there is one, as if the connection had existed before. Connectors of this rank that are under way send it, too.
  void leave(const Token& key, int rank, Bytes final_frame = {}) noexcept;
  /// Calls admit() or give_up() of the caller's Resident at the end, unless that has left or the peer connected first.
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
  struct Entry {
    Member member;
    std::list<Departed> departed;  // one, made with the member: a rank leaves without memory, too
  };
  /// A connection over which the last byte is sent: kept until the peer has read it.
  struct Draining {
    Socket socket;
    Deadline deadline;
  };

  Listener();
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

  const int owner_;    // the process whose listener this is
  PeerAddress own_{};  // without addresses: interfaces come and go
  Socket listener_;
  Descriptor wakeup_;
  std::mutex mutex_;
  std::map<MemberId, Entry> members_;  // guarded by mutex_
  std::list<Departed> departed_;       // the last that left; guarded by mutex_
  std::list<Connector> calls_;         // new ones; guarded by mutex_
  bool stirred_ = false;               // members changed; guarded by mutex_

  // Of the thread alone.
  std::deque<IncomingConnection> incoming_;  // in the order in which they came
  std::list<Connector> connectors_;
  std::deque<Draining> draining_;
  bool reconsider_ = false;  // check the connections with a proof again
  bool resting_ = false;     // no descriptors are left: the thread does not accept for a moment
};

}  // namespace ringlet
