// Point-to-point messages of one rank: matches tags and sources, and moves many messages at once.
//
// Contract: sends to one peer go out in the order of post(). A receive takes the first message, in order of arrival,
// with its source (or any source) and tag. A message that no posted receive matches stays with its sender. If it blocks
// one that matches, it is kept here as an unexpected message. A thread that waits for a message moves all messages
// meanwhile. If no thread waits, the messenger's own thread moves them. Errors poison the group (engine/health.h).
// Ownership: tensors belong to the caller until the request is complete. Thread safety: all calls from any thread.
#pragma once

#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "comm/reentrancy.h"
#include "engine/p2p.h"
#include "engine/work.h"

namespace ringlet {

/// "send to rank 1 (8 elements of float32)"
std::string describe(const Message& message);
/// Throws InvalidUsage for a peer that is not another rank.
[[noreturn]] void refuse_peer(const char* call, int peer, int rank, int world);
/// Throws InvalidUsage: `call` came after the group was closed.
[[noreturn]] void refuse_closed(const std::string& call);

class Messenger : public std::enable_shared_from_this<Messenger> {
 public:
  /// The handle of one message.
  class Request final : public Work {
   public:
    explicit Request(std::weak_ptr<Messenger> messenger) : messenger_(std::move(messenger)) {}
    /// The rank that the message came from or went to; kAnySource until that is known.
    int peer() const { return peer_.load(std::memory_order_acquire); }

   protected:
    void assist(const Deadline& deadline) override;

   private:
    friend class Messenger;
    std::weak_ptr<Messenger> messenger_;
    std::atomic<int> peer_{kAnySource};
  };

  explicit Messenger(P2p& p2p);
  ~Messenger();

  /// Starts a message, and releases `keep` when it is complete. `awaited`: the caller waits for it at once, so that no
  /// other thread need move it.
  std::shared_ptr<Request> post(const Message& message, std::shared_ptr<void> keep, bool awaited);
  /// Waits until no message is pending; false after `timeout`.
  bool wait_idle(std::chrono::milliseconds timeout);
  /// Completes all pending messages with an error. Afterwards no tensor is touched, even if requests still exist.
  void end();

 private:
  struct Pending;
  struct UnexpectedMessage;
  struct Incoming;
  /// Ends the assistance at the end of a scope, which an interrupt may cause.
  struct Assisting {
    explicit Assisting(Messenger& of) : messenger(of), mark(&of) {}
    ~Assisting() { messenger.end_assisting(); }
    Messenger& messenger;
    Waits mark;
  };

  bool look(P2p::Watchlist* list) noexcept;
  bool move();
  bool send_some(int peer);
  bool receive_some(int peer);
  bool begin_receive(int peer);
  bool wanted(int peer) const;
  std::list<UnexpectedMessage>::iterator find_unexpected(const Message& message);
  void take_unexpected(std::list<UnexpectedMessage>::iterator unexpected, const std::shared_ptr<Pending>& pending);
  void deliver(const UnexpectedMessage& unexpected, const std::shared_ptr<Pending>& pending);
  void make_room(int peer, size_t bytes);
  void check(const Pending& pending, int peer, const Envelope& envelope);
  bool examine();
  bool examine(const Pending& pending, size_t moved, bool look_at_process);
  void complete(std::shared_ptr<Pending> pending, const std::exception_ptr& error) noexcept;
  void give_up(const std::exception_ptr& error) noexcept;
  std::exception_ptr end_group() noexcept;
  void finish();
  P2p::Watchlist watched();
  void assist(const Request& request, const Deadline& deadline);
  bool begin_assisting();
  void end_assisting();
  std::string context(const Pending& pending, size_t moved) const;
  void loop();

  P2p& p2p_;
  mutable std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::vector<std::deque<std::shared_ptr<Pending>>> outgoing_;  // by peer
  std::list<std::shared_ptr<Pending>> receives_;                // posted and not yet matched, in order
  std::vector<Incoming> incoming_;                              // by peer: the message being taken
  std::vector<bool> examined_;                                  // by peer and way, while all that are pending are
  std::list<UnexpectedMessage> unexpected_;                     // in order of arrival
  std::shared_ptr<Pending> completed_;  // and not yet told: the first of a chain, which needs no memory
  Pending* last_completed_ = nullptr;   // of that chain, if there is one
  size_t pending_ = 0;                  // not yet told
  size_t moving_ = 0;                   // of them, still to be moved
  int assistants_ = 0;                  // while there are any, the thread rests
  bool told_ = false;                   // the peers know what this rank waits in
  bool ended_ = false;
  Deadline::Clock::time_point looked_{};
  std::thread thread_;  // made when first needed
};

}  // namespace ringlet
