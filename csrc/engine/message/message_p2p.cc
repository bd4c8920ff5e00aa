#include "engine/message/message_p2p.h"

#include "engine/message/message_engine.h"

namespace ringlet {
namespace {

// They are few: each costs a system call per pipe, and peers may need this processor.
constexpr int kLooks = 20;

}  // namespace

MessageP2p::MessageP2p(MessageEngine& engine) : P2p(engine.mesh(), engine.health(), kLooks), engine_(engine) {}

/// The pipe for collectives must be open, too, before a message is sent: through it each rank learns of the other's
/// errors, and of the end of the other's process.
Pipe* MessageP2p::open(int peer) {
  try {
    const bool heard = mesh_.open(peer, ConnectionKind::collectives) != nullptr;
    Pipe* pipe = nullptr;
    try {
      pipe = P2p::open(peer);
    } catch (const PeerLost&) {  // a rank whose group has failed tells the cause through the other pipe
      if (heard) throw;
    }
    return heard ? pipe : nullptr;
  } catch (const Error&) {
    raise_final_error(peer, peer);
    throw;
  }
}

/// Data of a message may be on their way when the peer's goodbye, on another connection, is here.
void MessageP2p::examine(Waiting& waiting, Health::Look look) {
  waiting.awaits = [](int) { return false; };
  if (look != Health::Look::reports) waiting.check = [&] { check_alive(waiting); };
  P2p::examine(waiting, look);
}

/// A rank that waits for a message connects to the sender, too: perhaps a firewall lets only this side. The connection
/// for collectives ends when the sender's process does.
bool MessageP2p::lost(int peer, const Waiting& waiting) {
  try {
    mesh_.open(peer, ConnectionKind::collectives);
  } catch (const PeerLost&) {
    if (waiting.peer >= 0) throw;
    return true;  // a message may come from another rank
  }
  if (waiting.receiving) {
    try {
      mesh_.open(peer, ConnectionKind::messages);
    } catch (const PeerLost&) {  // the peer has left, which the other connection shows
    }
  }
  return mesh_.gone(peer, waiting.receiving);
}

/// What one of these peers reported before it ended the connection, if it did.
void MessageP2p::raise_final_error(int first, int last) {
  health().poll_failures();
  for (int peer = first; peer <= last; ++peer) {
    if (peer != rank()) engine_.read_final_error(peer);
  }
  health().raise_noted();
}

void MessageP2p::check_alive(const Waiting& waiting) {
  bool all = true;
  for (int peer = 0; peer < world(); ++peer) {
    if (peer == rank() || (waiting.peer >= 0 && peer != waiting.peer)) continue;
    all = lost(peer, waiting) && all;
  }
  if (!all || waiting.reached()) return;
  waiting.peer < 0 ? raise_final_error(0, world() - 1) : raise_final_error(waiting.peer, waiting.peer);
  const std::string peer = waiting.peer < 0 ? "every other rank" : "rank " + std::to_string(waiting.peer);
  health().fail_in_wait(
      ErrorKind::peer_lost,
      waiting.context() + ": " + peer + " left the group, or its process is gone; look at that rank's own output");
}

}  // namespace ringlet
