// The process's door: one listener and one thread for all its groups, where connections are dialled, received and proven.
//
// Nobody waits here for anybody: strangers cost a bounded number of descriptors for a bounded time, and those of this
// job never wait behind them. A visitor for a group that is not made yet is kept. Where both ranks of a pair dial at
// once on lane `collectives`, the higher rank's connection is kept; the other waits at the higher rank's door, and is
// taken where that rank's own comes to nothing. docs/decisions/0011 says why it is safe to listen.
// Ownership: made on first use, for as long as the process lives; a forked child makes its own.
// Thread safety: all calls from any thread; a Resident is called on the door's thread alone.
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
#include "transport/dial.h"
#include "transport/socket.h"
#include "transport/token.h"
#include "transport/visitor.h"

namespace ringlet {

class Door {
 public:
  using Bytes = std::vector<std::byte>;

  /// A rank of a group, as the door knows it.
  class Resident {
   public:
    virtual ~Resident() = default;
    /// Whether a pipe to `peer` is still missing.
    virtual bool wants(int peer, Lane lane) noexcept = 0;
    /// A connection that has proven itself. `take` tells the peer so, and is called while nobody else looks at the
    /// pipes: who sees anything that the peer did afterwards, sees the pipe as well.
    virtual void admit(int peer, Lane lane, const std::function<Socket()>& take) noexcept = 0;
    /// A dial came to nothing.
    virtual void give_up(int peer, Lane lane, ErrorKind kind, const std::string& reason) noexcept = 0;
  };

  /// Throws SystemError where this process cannot listen, InvalidUsage where RINGLET_INTERFACE or
  /// RINGLET_TCP_CONGESTION names nothing.
  static Door& process();

  const Card& card() const { return card_; }
  /// From now on connections to `rank` of the group with this key are received. The door does not keep it alive.
  void enter(const Token& key, int rank, const std::shared_ptr<Resident>& resident);
  /// Those who come later are told so: on lane `collectives` by `last_words`, if there are any, as if the connection had
  /// stood before. They are also said over own dials that are still under way.
  void leave(const Token& key, int rank, Bytes last_words = {}) noexcept;
  /// Ends in the caller's admit() or give_up(), unless it has left before or a connection came from the other side.
  void dial(Dial::Call call);

  Door(const Door&) = delete;
  Door& operator=(const Door&) = delete;

 private:
  using Place = std::pair<Token, uint32_t>;  // a group's name and a rank of it
  struct Member {
    Token key;
    std::weak_ptr<Resident> resident;
  };
  struct Departed {
    Place place;
    Token key;
    Bytes last_words;
  };
  /// A connection on which everything has been said: kept until the other side has read it.
  struct Leaving {
    Socket socket;
    Deadline deadline;
  };

  Door();
  void start();
  [[noreturn]] void run();
  void wait();
  void take_calls();
  void receive();
  void make_room();
  void hear_visitors();
  void hear_dials();
  bool consider(Visitor& visitor);
  bool finish(Dial& dial);
  bool finish_for(const std::optional<Departed>& departed, Dial& dial);
  void wake() noexcept;
  Member member(const Place& place);
  std::optional<Departed> departed(const Place& place);
  bool turn_away(Visitor& visitor);
  void part(Socket socket, const Bytes& last_words);
  void see_off();

  const int owner_;  // the process whose door this is
  Card card_;
  Socket listener_;
  Descriptor bell_;
  std::mutex mutex_;
  std::map<Place, Member> members_;  // guarded by mutex_
  std::deque<Departed> departed_;    // the last that left; guarded by mutex_
  std::deque<Dial> calls_;           // new ones; guarded by mutex_
  bool stirred_ = false;             // members changed; guarded by mutex_

  // The thread's own.
  std::deque<Visitor> visitors_;  // in the order in which they came
  std::deque<Dial> dials_;
  std::deque<Leaving> leaving_;
  bool reconsider_ = false;  // what kept a proven visitor waiting may be over
  bool resting_ = false;     // no descriptors are left: the listener is not looked at for a moment
};

}  // namespace ringlet
