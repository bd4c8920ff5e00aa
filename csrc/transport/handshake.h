// How two processes of one host come to trust each other: an abstract unix socket, credentials, a one-time token.
//
// Each rank listens under a random name that it tells through the store, with a random token. A peer connects, shows
// the token, and both hand over a read-only descriptor of their heap, and wakeups where the group has them. Whoever
// connects without the same user id and the token is dropped and never noticed by the job. Abstract names leave nothing
// in the file system.
// Thread safety: one handshake at a time in one object.
#pragma once

#include <array>
#include <cstdint>
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
  int pid = 0;
  std::vector<Descriptor> wakeups{};
};

class Handshake {
 public:
  Handshake(int rank, int world);

  /// What peers need to find this rank: goes through the store.
  const std::string& name() const { return name_; }
  const Token& token() const { return token_; }

  struct Peer {
    std::string name;
    Token token;
  };

  static constexpr size_t kMostHanded = 8;

  /// Meets every other rank; `peers` and `joined` are indexed by rank. `handed` are the descriptors that they get: the
  /// heap's, then wakeups, as many on every rank. Throws Timeout naming the ranks that did not come, PeerLost,
  /// SystemError; `joined` then has all that may count this rank as joined.
  void exchange(const std::vector<Peer>& peers, std::span<const int> handed, std::vector<Introduced>& joined,
                const Deadline& deadline);

 private:
  void exchange_all(const std::vector<Peer>& peers, std::span<const int> handed, std::vector<Introduced>& joined,
                    std::vector<Descriptor>& calls, const Deadline& deadline) const;
  /// None where the peer's socket had no room until the deadline.
  Descriptor call(const Peer& peer, std::span<const int> handed, const Deadline& deadline) const;
  bool answer(Descriptor connection, std::span<const int> handed, std::vector<Introduced>& joined,
              const Deadline& deadline) const;
  std::string missing(const std::vector<Introduced>& joined) const;

  int rank_;
  int world_;
  Descriptor listener_;
  std::string name_;
  Token token_;
};

}  // namespace ringlet
