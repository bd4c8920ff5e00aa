// Messages of a group with ranks on several hosts: how a rank learns that a peer is gone.
//
// Ownership: the engine outlives it. Thread safety: engine/p2p.h.
#pragma once

#include "engine/p2p.h"

namespace ringlet {

class MessageEngine;

class MessageP2p final : public P2p {
 public:
  explicit MessageP2p(MessageEngine& engine);

  void examine(Waiting& waiting, Health::Look look) override;

 protected:
  Pipe* open(int peer) override;

 private:
  bool lost(int peer, const Waiting& waiting);
  void check_alive(const Waiting& waiting);
  void raise_final_error(int first, int last);

  MessageEngine& engine_;
};

}  // namespace ringlet
