// The handshake of two processes on one host: over an abstract unix socket, with credentials and a one-time token.
//
// Each rank listens under a random name, which it publishes in the store with a random token. A peer connects and shows
// the token. Then both send a read-only descriptor of their heap, and wakeups if the group has them. A connection that
// has another user id or a wrong token is closed, and the job does not notice it. Abstract names leave nothing in the
// file system.
// Thread safety: one handshake at a time in one object.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "memory/mapping.h"
#include "transport/token.h"

namespace ringlet {

struct Introduced {
  Descriptor heap;   ///< the peer's heap, read-only
  Descriptor watch;  ///< readable once the peer's process is gone
  Descriptor held;   ///< the connection, if the peer watches that; it must stay open
  int pid = 0;
  std::vector<Descriptor> wakeups{};
};

class Handshake {
 public:
  Handshake(int rank, int world);

  /// What peers need to find this rank; it goes through the store.
  const std::string& name() const { return name_; }
  const Token& token() const { return token_; }

  struct Peer {
    std::string name;
    Token token;
  };

  static constexpr size_t kMostHanded = 8;

  /// Connects with every other rank. `peers` and `joined` are indexed by rank. `handed` are the descriptors that the
  /// peers get: first the heap, then wakeups, as many on every rank. `look` is called now and then, and throws what
  /// other ranks have told. Throws Timeout that names the missing ranks, PeerLost or ResourceError; `joined` then has
  /// all peers that may count this rank as joined.
  void exchange(const std::vector<Peer>& peers, std::span<const int> handed, std::vector<Introduced>& joined,
                const Deadline& deadline, const std::function<void()>& look);

 private:
  /// A connection to a peer, and its process if that can be watched.
  struct Call {
    Descriptor connection{}, process{};
    int pid = 0;
  };
  struct Hello;
  struct Received;

  void exchange_all(const std::vector<Peer>& peers, std::span<const int> handed, std::vector<Introduced>& joined,
                    std::vector<Call>& calls, const Deadline& deadline, const std::function<void()>& look) const;
  /// Finds the process at the other end.
  Call opened(Descriptor connection) const;
  static bool send_hello(const Call& call, int rank, const Token& token, std::span<const int> handed,
                         const Deadline& deadline);
  static std::optional<Received> receive_hello(int socket, size_t expected);
  static Introduced introduced(Call call, Received received);
  /// Without a connection if the peer's socket had no room until the deadline.
  Call call(const Peer& peer, std::span<const int> handed, const Deadline& deadline,
            const std::function<void()>& look) const;
  bool answer(Descriptor connection, std::span<const int> handed, std::vector<Introduced>& joined,
              const Deadline& deadline) const;

  int rank_;
  int world_;
  Descriptor listener_;
  std::string name_;
  Token token_;
};

}  // namespace ringlet
