// How two processes of one host come to trust each other: an abstract unix socket, credentials, a one-time token.
//
// Each rank listens under a random name that it tells through the store, with a random token. A peer connects, shows
// the token, and both hand over read-only descriptors of their heaps. Whoever connects without the same user id and
// the token is dropped and never noticed by the job. Abstract names leave nothing in the file system.
// Thread safety: one handshake at a time in one object.
#pragma once

#include <array>
#include <cstdint>
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

  /// Meets every other rank; `peers` is indexed by rank. Throws Timeout naming the ranks that did not come, SystemError.
  std::vector<Introduced> meet(const std::vector<Peer>& peers, int heap_descriptor, const Deadline& deadline);

 private:
  Descriptor call(const Peer& peer, int heap_descriptor) const;
  bool answer(Descriptor connection, int heap_descriptor, std::vector<Introduced>& met, const Deadline& deadline) const;
  std::string missing(const std::vector<Introduced>& met) const;

  int rank_;
  int world_;
  Descriptor listener_;
  std::string name_;
  Token token_;
};

}  // namespace ringlet
