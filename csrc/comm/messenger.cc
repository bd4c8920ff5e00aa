#include "comm/messenger.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>

#include "base/start_thread.h"
#include "engine/pull/wait.h"
#include "reduce/reduce.h"

namespace ringlet {
namespace {

using namespace std::chrono_literals;

constexpr int64_t kSleepNanoseconds = 1'000'000;  // between two checks for failures
constexpr auto kProcessCheckEvery = 20ms;         // between looks at the peers' processes
constexpr int kFirstLooks = 40;  // when it is posted: a message that has arrived already needs no thread

std::string elements(DType dtype, uint64_t count) { return std::to_string(count) + " elements of " + name(dtype); }

}  // namespace

std::string describe(const Message& message) {
  const std::string peer = message.peer == kAnySource ? "any rank" : "rank " + std::to_string(message.peer);
  return (message.sending ? "send to " : "recv from ") + peer + " (" + elements(message.dtype, message.count) +
         (message.tag != 0 ? ", tag " + std::to_string(message.tag) : "") + ")";
}

struct Messenger::Pending {
  Message message;
  std::shared_ptr<void> keep;
  std::shared_ptr<Request> request;
  Deadline::Clock::time_point began;
  MessageProgress progress{};  // of one that is sent
  // Once it is complete: its error, and the one that completed next.
  std::exception_ptr error{};
  std::shared_ptr<Pending> next{};
};

/// A message taken before a receive wanted it.
struct Messenger::UnexpectedMessage {
  int peer;
  Envelope envelope;
  std::vector<std::byte> data;
  bool complete = false;
  std::shared_ptr<Pending> wanted{};  // by a receive posted since it began to arrive
};

struct Messenger::Incoming {
  struct Taking {
    std::byte* to;
    size_t bytes;
    MessageProgress progress{};
  };
  std::optional<Taking> taking{};
  std::shared_ptr<Pending> receive{};
  UnexpectedMessage* unexpected = nullptr;  // where no receive was posted

  void clear() {
    taking.reset();
    receive.reset();
    unexpected = nullptr;
  }
};

void refuse_peer(const char* call, int peer, int rank, int world) {
  throw InvalidUsage(std::string(call) + ": peer must be a rank from 0 to " + std::to_string(world - 1) +
                     " other than this rank (" + std::to_string(rank) + "), got " + std::to_string(peer));
}

void refuse_closed(const std::string& call) {
  throw InvalidUsage(call + " on a group that was closed: make a new group first");
}

Messenger::Messenger(P2p& p2p)
    : p2p_(p2p),
      outgoing_(p2p.world()),
      incoming_(p2p.world()),
      examined_(2 * (static_cast<size_t>(p2p.world()) + 1)) {}

Messenger::~Messenger() { end(); }

std::shared_ptr<Messenger::Request> Messenger::post(const Message& message, std::shared_ptr<void> keep, bool awaited) {
  auto request = std::make_shared<Request>(weak_from_this());
  if (!awaited) request->set_title([message] { return describe(message); });
  {
    const std::lock_guard lock(mutex_);
    if (ended_) refuse_closed(message.sending ? "send" : "recv");
    p2p_.health().raise_if_failed();  // under the lock: the messages that the failure ended may be half-way
    if (!awaited && !thread_.joinable()) thread_ = start_thread("messages between two ranks", [this] { loop(); });
    auto pending = std::make_shared<Pending>(Pending{message, std::move(keep), request, Deadline::Clock::now()});
    const auto unexpected = message.sending ? unexpected_.end() : find_unexpected(message);
    if (message.sending) {
      outgoing_[message.peer].push_back(pending);
      request->peer_.store(message.peer, std::memory_order_release);
    } else if (unexpected == unexpected_.end()) {
      receives_.push_back(pending);
    }
    ++pending_, ++moving_;  // from here on nothing throws: the tensor may be in use
    if (unexpected != unexpected_.end()) take_unexpected(unexpected, pending);
    for (int i = 0; i < kFirstLooks; ++i) {
      if (look(nullptr)) break;
    }
  }
  finish();
  if (awaited || request->done()) return request;
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
  return request;
}

std::list<Messenger::UnexpectedMessage>::iterator Messenger::find_unexpected(const Message& message) {
  return std::find_if(unexpected_.begin(), unexpected_.end(), [&](const UnexpectedMessage& s) {
    return !s.wanted && s.envelope.tag == message.tag && (message.peer == s.peer || message.peer == kAnySource);
  });
}

void Messenger::take_unexpected(std::list<UnexpectedMessage>::iterator unexpected,
                                const std::shared_ptr<Pending>& pending) {
  if (unexpected->complete) {
    deliver(*unexpected, pending);
    unexpected_.erase(unexpected);
  } else {
    unexpected->wanted = pending;
  }
}

void Messenger::deliver(const UnexpectedMessage& unexpected, const std::shared_ptr<Pending>& pending) {
  std::exception_ptr error;
  try {
    check(*pending, unexpected.peer, unexpected.envelope);
    if (!unexpected.data.empty()) copy_bytes(pending->message.data, unexpected.data.data(), unexpected.data.size());
  } catch (...) {
    error = end_group();
  }
  pending->request->peer_.store(unexpected.peer, std::memory_order_release);
  complete(pending, error);
}

void Messenger::complete(std::shared_ptr<Pending> pending, const std::exception_ptr& error) noexcept {
  if (--moving_ == 0 && std::exchange(told_, false)) p2p_.health().say_message("");
  pending->error = error;
  Pending* const last = pending.get();
  (completed_ ? last_completed_->next : completed_) = std::move(pending);
  last_completed_ = last;
}

/// Looks at all messages once. Returns whether something changed. With a list it first lists what to watch, and then
/// looks for failures, too, if nothing moved.
bool Messenger::look(P2p::Watchlist* list) noexcept {
  if (ended_) return false;
  try {
    if (list != nullptr) *list = watched();
    return move() || (list != nullptr && examine());
  } catch (...) {
    give_up(end_group());
    return true;
  }
}

/// In the handler of an error. Messages that are given up may be half-way, and the next one would be taken for the rest
/// of them. So the error ends the group, if that has not ended already. Returns the error for those messages.
std::exception_ptr Messenger::end_group() noexcept {
  return p2p_.health().poison_in_flight([] { return "its messages"; });
}

bool Messenger::move() {
  bool moved = false;
  for (int peer = 0; peer < p2p_.world(); ++peer) {
    if (peer == p2p_.rank()) continue;
    if (!outgoing_[peer].empty()) moved |= send_some(peer);
    if (incoming_[peer].taking || wanted(peer)) moved |= receive_some(peer);
  }
  return moved;
}

bool Messenger::send_some(int peer) {
  auto& queue = outgoing_[peer];
  const std::shared_ptr<Pending> first = queue.front();
  const MessageProgress before = first->progress;
  if (!p2p_.send(first->message, first->progress)) {
    return first->progress.bytes != before.bytes || first->progress.started != before.started;
  }
  queue.pop_front();
  complete(first, nullptr);
  return true;
}

bool Messenger::receive_some(int peer) {
  Incoming& incoming = incoming_[peer];
  if (!incoming.taking && !begin_receive(peer)) return false;
  Incoming::Taking& taking = *incoming.taking;
  const size_t before = taking.progress.bytes;
  if (!p2p_.receive(peer, taking.to, taking.bytes, taking.progress)) return taking.progress.bytes != before;
  if (incoming.receive) {
    incoming.receive->request->peer_.store(peer, std::memory_order_release);
    complete(std::move(incoming.receive), nullptr);
  } else if (incoming.unexpected->wanted) {
    deliver(*incoming.unexpected, incoming.unexpected->wanted);
    unexpected_.remove_if([&](const UnexpectedMessage& unexpected) { return &unexpected == incoming.unexpected; });
  } else {
    incoming.unexpected->complete = true;
  }
  incoming.clear();
  return true;
}

/// Whether a posted receive may take a message from `peer`.
bool Messenger::wanted(int peer) const {
  return std::any_of(receives_.begin(), receives_.end(), [&](const auto& pending) {
    return pending->message.peer == peer || pending->message.peer == kAnySource;
  });
}

bool Messenger::begin_receive(int peer) {
  const std::optional<Envelope> envelope = p2p_.next(peer);
  if (!envelope) return false;
  const auto match = std::find_if(receives_.begin(), receives_.end(), [&](const auto& pending) {
    const Message& message = pending->message;
    return message.tag == envelope->tag && (message.peer == peer || message.peer == kAnySource);
  });
  Incoming& incoming = incoming_[peer];
  if (match != receives_.end()) {
    check(**match, peer, *envelope);
    incoming.receive = *match;
    receives_.erase(match);
    incoming.taking = {incoming.receive->message.data, incoming.receive->message.bytes()};
    return true;
  }
  make_room(peer, envelope->bytes());
  incoming.unexpected =
      &unexpected_.emplace_back(UnexpectedMessage{peer, *envelope, std::vector<std::byte>(envelope->bytes())});
  incoming.taking = {incoming.unexpected->data.data(), incoming.unexpected->data.size()};
  return true;
}

/// Refuses a message that no receive has asked for, where this host's memory could not hold it. A peer decides how long
/// it is, and how many it sends.
void Messenger::make_room(int peer, size_t bytes) {
  const size_t memory = static_cast<size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  size_t held = 0;
  for (const UnexpectedMessage& unexpected : unexpected_) held += unexpected.data.size();
  if (bytes <= memory / 2 && held <= memory / 2 - bytes) return;
  p2p_.health().fail(
      ErrorKind::resource_error,
      p2p_.health().self() + ": rank " + std::to_string(peer) + " sends a message of " + std::to_string(bytes) +
          " bytes for which this rank has posted no receive, and " + std::to_string(held) +
          " bytes of such messages are here already, more together than half of this host's memory: post the "
          "receives before the peer sends");
}

void Messenger::check(const Pending& pending, int peer, const Envelope& envelope) {
  const Message& message = pending.message;
  if (envelope.dtype == message.dtype && envelope.count == message.count) return;
  p2p_.health().fail(ErrorKind::invalid_usage, "calls do not match: rank " + std::to_string(peer) + " sends " +
                                                   elements(envelope.dtype, envelope.count) + ", rank " +
                                                   std::to_string(p2p_.rank()) + " receives " +
                                                   elements(message.dtype, message.count));
}

std::string Messenger::context(const Pending& pending, size_t moved) const {
  const Message& message = pending.message;
  return p2p_.health().self() + " in " + describe(message) + ", " + std::to_string(moved) + " of " +
         std::to_string(message.bytes()) + " bytes done";
}

/// A peer may have sent a message and left since the last look, so a wait looks once more before it fails. Returns
/// whether it found a message; then the lists have changed.
bool Messenger::examine(const Pending& pending, size_t moved, bool look_at_process) {
  bool changed = false;
  Waiting waiting;
  waiting.peer = pending.message.peer;
  waiting.timeout = pending.message.timeout;
  waiting.message = true;
  waiting.receiving = !pending.message.sending;
  waiting.reached = [&] { return changed = changed || move(); };
  waiting.context = [&] { return context(pending, moved); };
  waiting.began = pending.began;
  p2p_.examine(waiting, look_at_process ? Health::Look::ends : Health::Look::reports);
  return changed;
}

/// Throws the error that ends the wait of a pending message, if there is one. Returns whether something moved instead.
bool Messenger::examine() {
  p2p_.health().raise_if_failed();
  const auto now = Deadline::Clock::now();
  const bool look_at_process = now - looked_ >= kProcessCheckEvery;
  if (look_at_process) looked_ = now;
  bool tell = look_at_process;  // the first of all that are pending: it stands for them
  // Messages one way with one peer end in the same way, but for their deadlines: only the first looks.
  examined_.assign(2 * (static_cast<size_t>(p2p_.world()) + 1), false);
  const auto changed = [&](const Pending& pending, size_t moved) {
    if (std::exchange(tell, false)) p2p_.health().say_message(context(pending, moved)), told_ = true;
    const Message& message = pending.message;
    const size_t way = 2 * static_cast<size_t>(message.peer + 1) + (message.sending ? 1 : 0);
    if (examined_[way] && !is_late(pending.began, message.timeout, now)) return false;
    examined_[way] = true;
    return examine(pending, moved, look_at_process);
  };
  for (const auto& queue : outgoing_) {
    if (!queue.empty() && changed(*queue.front(), queue.front()->progress.bytes)) return true;
  }
  for (const auto& pending : receives_) {
    if (changed(*pending, 0)) return true;
  }
  for (const Incoming& incoming : incoming_) {
    if (incoming.receive && changed(*incoming.receive, incoming.taking->progress.bytes)) return true;
  }
  for (const UnexpectedMessage& unexpected : unexpected_) {
    if (unexpected.wanted && changed(*unexpected.wanted, 0)) return true;
  }
  return false;
}

void Messenger::give_up(const std::exception_ptr& error) noexcept {
  for (auto& queue : outgoing_) {
    for (auto& pending : queue) complete(std::move(pending), error);
    queue.clear();
  }
  for (auto& pending : receives_) complete(std::move(pending), error);
  for (Incoming& incoming : incoming_) {
    if (incoming.receive) complete(std::move(incoming.receive), error);
    incoming.clear();
  }
  for (UnexpectedMessage& unexpected : unexpected_) {
    if (unexpected.wanted) complete(std::move(unexpected.wanted), error);
  }
  receives_.clear();
  unexpected_.clear();
}

/// Runs outside the lock: completion runs callbacks, which may wait for another message. So a thread takes one message
/// at a time: no other thread can complete a message that it holds.
void Messenger::finish() {
  const Completing mark(this);
  std::unique_lock lock(mutex_);
  if (!completed_) return;
  while (completed_) {
    const std::shared_ptr<Pending> pending = std::move(completed_);
    completed_ = std::move(pending->next);
    lock.unlock();
    pending->keep.reset();
    pending->request->complete(pending->error);
    lock.lock();
    --pending_;
  }
  if (assistants_ > 1) p2p_.wake();  // one may sleep whose message this thread has moved
  changed_.notify_all();
}

P2p::Watchlist Messenger::watched() {
  P2p::Watchlist list;
  for (int peer = 0; peer < p2p_.world(); ++peer) {
    if (peer == p2p_.rank()) continue;
    if (!outgoing_[peer].empty()) p2p_.watch(peer, true, list);
    if (incoming_[peer].taking || wanted(peer)) p2p_.watch(peer, false, list);
  }
  return list;
}

void Messenger::Request::assist(const Deadline& deadline) {
  if (const auto messenger = messenger_.lock()) messenger->assist(*this, deadline);
}

/// Spins, yields, then sleeps, as PullExecutor's waits do, and moves messages meanwhile.
void Messenger::assist(const Request& request, const Deadline& deadline) {
  const auto turn = [&](bool sleeps) {  // whether that was enough
    P2p::Watchlist list;
    bool changed = false, over = false;
    {
      const std::lock_guard lock(mutex_);
      changed = look(sleeps ? &list : nullptr);
      over = ended_ || moving_ == 0;
    }
    finish();
    if (over || request.done() || deadline.passed()) return true;
    if (sleeps && !changed) p2p_.sleep(list, kSleepNanoseconds);
    return false;
  };
  if (!begin_assisting()) return finish();
  const Assisting assisting(*this);
  bool enough = false;
  for (int i = p2p_.spins(); i > 0 && !enough; --i) {
    enough = turn(false);
    Waiter::relax();
  }
  if (!enough) {
    const OutsideRuntime outside;
    enough = Waiter::yield_until([&] { return turn(false); });
    while (!enough) {
      check_interrupts();
      enough = turn(true);
    }
  }
}

void Messenger::end_assisting() {
  const std::lock_guard lock(mutex_);
  if (--assistants_ == 0) changed_.notify_all();
}

/// False if the end has begun: the end waits only for the threads that came before it.
bool Messenger::begin_assisting() {
  const std::lock_guard lock(mutex_);
  if (!ended_) ++assistants_;
  return !ended_;
}

void Messenger::loop() {
  ::pthread_setname_np(::pthread_self(), "ringlet-p2p");
  std::unique_lock lock(mutex_);
  while (!ended_) {
    if (moving_ == 0 || assistants_ > 0) {
      changed_.wait(lock);
      continue;
    }
    P2p::Watchlist list;
    const bool changed = look(&list);
    lock.unlock();
    finish();
    if (!changed) p2p_.sleep(list, kSleepNanoseconds);
    lock.lock();
  }
}

bool Messenger::wait_idle(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, timeout, [&] { return pending_ == 0; });
}

void Messenger::end() {
  {
    const std::lock_guard lock(mutex_);
    if (ended_) return;
    ended_ = true;
    std::exception_ptr error;
    try {
      p2p_.health().raise_if_failed();
      if (moving_ > 0) {  // posted as the end began; a peer may be reading its tensor
        p2p_.health().fail(ErrorKind::peer_lost, in_words([&] {
                             return p2p_.health().self() + " closed the group while a message was pending";
                           }));
      }
      throw InvalidUsage("the group was closed while this message was pending");
    } catch (...) {
      error = std::current_exception();
    }
    give_up(error);
    changed_.notify_all();
  }
  finish();
  if (thread_.joinable()) thread_.join();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return assistants_ == 0; });
}

}  // namespace ringlet
