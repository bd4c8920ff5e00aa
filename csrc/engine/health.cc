#include "engine/health.h"

#include <algorithm>

#include "engine/call_log.h"

namespace ringlet {
namespace {

using namespace std::chrono_literals;

constexpr auto kReportAfter = 50ms;  // after this wait a rank tells its peers its call, and the rank that it waits for
constexpr size_t kMostText = 600;    // of the text that says which calls other ranks wait in: an error has few bytes

std::string name_of(int rank) { return rank < 0 ? "any rank" : "rank " + std::to_string(rank); }

constexpr bool is_in_order() {
  size_t at = 0;
  for (const Health::Transition& each : Health::transitions()) {
    if (static_cast<size_t>(each.from) != at / Health::kEvents ||
        static_cast<size_t>(each.event) != at % Health::kEvents || each.to < each.from) {
      return false;
    }
    ++at;
  }
  return at == (static_cast<size_t>(Health::State::left) + 1) * Health::kEvents;
}
static_assert(is_in_order());

}  // namespace

/// An error in a later call: the call in progress has all the data that it needs of that rank, and can complete.
bool Health::concerns_now(const Reported& reported) const {
  return !in_call_.load(std::memory_order_relaxed) || reported.call <= call_.load(std::memory_order_relaxed);
}

void Health::on_report(int peer, const Report& report) {
  const std::lock_guard lock(mutex_);
  Peer& sender = peers_[peer];
  switch (report.kind) {
    case Report::Kind::error: {
      Reported reported{report.error, report.origin, report.call, std::string(report.text)};
      const Event event = concerns_now(reported) ? Event::error : Event::later_error;
      const Act act = transition(state(), event).act;
      sender.left = true;
      if (act != Act::note && act != Act::forward) return;
      if (!reported_ || reported.call < reported_->call) reported_ = std::move(reported);
      enter(State::warned);  // what concerns this rank now is raised at its next look
      return;
    }
    case Report::Kind::goodbye:
      sender.left = sender.left || transition(state(), Event::goodbye).act == Act::note;
      return;
    case Report::Kind::waiting:
      sender.call.store(report.call, std::memory_order_relaxed);
      sender.suspects = report.suspect;
      sender.in_collective = report.text;
      break;
    case Report::Kind::in_message: sender.in_message = report.text; break;
  }
  sender.waits.store(true, std::memory_order_relaxed);
}

void Health::on_closed(int peer, bool memory_gone, std::string why) {
  const std::lock_guard lock(mutex_);
  if (!peers_[peer].closed) peers_[peer].closed = {memory_gone, std::move(why)};
}

void Health::forget_wait(int peer) {
  const std::lock_guard lock(mutex_);
  Peer& sender = peers_[peer];
  sender.waits.store(false, std::memory_order_relaxed);
  sender.suspects = {};
  sender.in_collective.clear();
  sender.in_message.clear();
}

void Health::enter_unwell() {
  failure_.raise_if_failed();
  if (transition(state(), Event::call).act == Act::forward) forward(nullptr);
}

void Health::begin_call(uint64_t call) {
  call_.store(call, std::memory_order_relaxed);
  in_call_.store(true, std::memory_order_relaxed);
  said_.reset();
}

void Health::end_call() {
  if (said_ && said_->rank >= 0) carrier_.send({.kind = Report::Kind::waiting, .call = call_});
  said_.reset();
  in_call_.store(false, std::memory_order_relaxed);
}

void Health::examine(const Waiting& waiting, Look look, Clock::time_point now) {
  if (failed()) failure_.raise("");
  carrier_.poll(look);
  raise_noted(&waiting);
  if (!is_late(waiting.began, waiting.timeout, now)) {
    report_straggler(waiting, now);
  } else if (!waiting.reached || !waiting.reached()) {
    time_out(waiting);
  }
}

void Health::poll_failures() {
  failure_.raise_if_failed();
  carrier_.poll(Look::ends);
  raise_noted(nullptr);
}

/// Peers may have sent all that a wait needs before they failed or left. So a wait looks once more before it fails.
void Health::raise_noted(const Waiting* waiting) {
  const auto ends_well = [&] { return waiting != nullptr && waiting->reached && waiting->reached(); };
  const auto needs = [&](int q) { return waiting != nullptr && waiting->awaits && waiting->awaits(q); };
  bool reported = false;
  {
    const std::lock_guard lock(mutex_);
    reported = reported_ && concerns_now(*reported_);
  }
  if (reported && ends_well()) return;
  if (reported) forward(waiting);
  if (waiting != nullptr && waiting->check) waiting->check();
  std::optional<int> left, gone;
  Closed how;
  {
    const std::lock_guard lock(mutex_);
    for (int q = 0; q < world_ && !gone; ++q) {
      const Peer& peer = peers_[q];
      if (!peer.closed || (peer.left && !(peer.closed->memory_gone && needs(q)))) continue;
      gone = q;
      how = *peer.closed;
    }
    if (waiting != nullptr && !(gone && how.memory_gone)) left = peer_that_left(*waiting);
  }
  if ((!left && !gone) || ends_well()) return;
  if (left)
    fail_peer_lost(waiting,
                   name_of(*left) + " left the group: it finished early, or raised an error: look at its output");
  if (how.memory_gone) fail_in_wait(ErrorKind::invalid_usage, context(waiting) + ": " + kMemoryGone);
  if (!over_network_ || how.why.empty()) {
    fail_peer_lost(waiting,
                   "the process of " + name_of(*gone) + " is gone; look at that rank's own output for the cause");
  }
  fail_peer_lost(waiting, "the connection to " + name_of(*gone) + " ended (" + how.why +
                              "): its process is gone, or its host cannot be reached; look at that rank's own output");
}

/// With mutex_ held. -1: all that the wait could be for.
std::optional<int> Health::peer_that_left(const Waiting& waiting) const {
  bool all = true;
  for (int q = 0; q < world_; ++q) {
    if (q == rank_) continue;
    const bool left = peers_[q].left;
    if (left && (waiting.awaits ? waiting.awaits(q) : q == waiting.peer)) return q;
    all = all && left;
  }
  return all && !waiting.awaits && waiting.peer < 0 ? std::optional(-1) : std::nullopt;
}

/// Another peer may know the cause.
void Health::fail_peer_lost(const Waiting* waiting, const std::string& why) {
  carrier_.poll(Look::reports);
  if (transition(state(), Event::lost).act == Act::forward) forward(waiting);
  fail_in_wait(ErrorKind::peer_lost, context(waiting) + ": " + why);
}

/// Fails with the error that a peer reported. The peers of this rank get it under the number of the rank where the
/// failure began.
void Health::forward(const Waiting* waiting) {
  std::optional<Reported> reported;
  {
    const std::lock_guard lock(mutex_);
    reported = reported_;
  }
  const Report report{
      .kind = Report::Kind::error, .error = reported->kind, .origin = reported->origin, .text = reported->text};
  const std::string message = context(waiting) + ": " + name_of(reported->origin) + " reported: " + reported->text;
  fail_in_wait(reported->kind, message, report, /*reported=*/true);
}

/// If another thread of this rank has failed meanwhile, raises its error: the peers were told that one.
void Health::fail_in_wait(ErrorKind kind, const std::string& message, const Report& report, bool reported) {
  std::unique_lock lock(ending_, std::defer_lock);
  if (owner_ == this_process()) lock.lock();
  if (transition(state(), Event::lost).act == Act::raise_first) failure_.raise("");
  rethrow(kind, end(kind, message, report, reported), reported);
}

/// A peer that waits for another rank waits for what this rank waits for. A peer that is one call behind does, too.
Suspect Health::straggler(int peer) const {
  if (peer < 0) return {};
  const uint64_t call = call_.load(std::memory_order_relaxed);
  const std::lock_guard lock(mutex_);
  const Peer& awaited = peers_[peer];
  const uint64_t theirs = awaited.call.load(std::memory_order_relaxed);
  const bool passed_on = theirs + 1 >= call && awaited.suspects.rank >= 0 && awaited.suspects.rank != rank_;
  return passed_on ? awaited.suspects : Suspect{peer, theirs >= call};
}

/// A rank that is stuck sends no report. The ranks that wait for it send one, and the ranks that wait for those pass it
/// on. A report also tells the peers which call this rank is in, if the call itself sends them nothing.
void Health::report_straggler(const Waiting& waiting, Clock::time_point now) {
  if (waiting.message || now - waiting.began <= std::min<Clock::duration>(kReportAfter, waiting.timeout / 4)) return;
  const Suspect last = waiting.straggler ? waiting.straggler() : Suspect{};
  if (said_ == last) return;
  said_ = last;
  const std::string text = waiting.context();
  carrier_.send({.kind = Report::Kind::waiting, .call = call_, .suspect = last, .text = text});
}

void Health::time_out(const Waiting& waiting) {
  carrier_.poll(Look::all);
  const Suspect last = waiting.straggler ? waiting.straggler() : Suspect{};
  const std::string behind = waiting.straggler
                                 ? "; furthest behind is " + name_of(last.rank) +
                                       (last.in_call ? ", which is in this call" : ", which has not made this call")
                                 : "";
  fail_in_wait(ErrorKind::timeout, waiting.context() + ": Timed out having waited " + in_seconds(waiting.timeout) +
                                       " for " + name_of(waiting.peer >= 0 ? waiting.peer : last.rank) +
                                       (over_network_ ? "" : ", whose process is there") + behind +
                                       waiting_as_well(waiting) +
                                       (over_network_ ? "; it may be in other work, stuck, or cut off from the network"
                                                      : "; it may be in other work, or stuck") +
                                       " (timeout= raises the limit)");
}

/// A rank in a message and a rank in a collective may wait for each other, and each must name both.
std::string Health::waiting_as_well(const Waiting& waiting) const {
  const std::lock_guard lock(mutex_);
  std::string text;
  for (int q = 0; q < world_; ++q) {
    const bool asked = waiting.message && (q == waiting.peer || waiting.peer < 0);
    for (const std::string& in : {asked ? peers_[q].in_collective : "", peers_[q].in_message}) {
      if (!in.empty() && text.size() < kMostText) text += "; waiting as well: " + in;
    }
  }
  return text;
}

/// The peers are told first: once other threads of this rank see the failure, they return tensors that peers may read.
std::string Health::end(ErrorKind kind, const std::string& message, const Report& report, bool reported) noexcept {
  if (owner_ != this_process()) return in_words([&] { return message; });
  const std::lock_guard lock(ending_);
  carrier_.send(report);
  std::string told = in_words([&] { return calls_.with_last_calls(kind, message); });
  if (failure_.set(kind, told, reported)) calls_.failed(kind, told);
  enter(State::failed);
  carrier_.stop();
  return told;
}

std::exception_ptr Health::poison_in_flight(const std::function<std::string()>& where) noexcept {
  if (failed()) {
    carrier_.stop();
    return std::current_exception();
  }
  const auto foreign = [&](const std::string_view& what) {
    return in_words([&] { return self() + " in " + where() + ": " + std::string(what.substr(0, what.find('\n'))); });
  };
  try {
    try {
      throw;
    } catch (const Error& error) {
      fail(error.kind(), in_words([&] { return std::string(error.what()); }));
    } catch (const Interrupted& interrupted) {
      poison(ErrorKind::peer_lost,
             in_words([&] { return self() + " in " + where() + ": interrupted (" + interrupted.by + ")"; }));
      throw;
    } catch (const std::exception& error) {
      fail(ErrorKind::resource_error, foreign(error.what()));
    } catch (...) {
      fail(ErrorKind::resource_error, foreign("an exception that is not the library's"));
    }
  } catch (...) {
    return std::current_exception();
  }
}

void Health::abort(const std::string& reason) noexcept {
  if (owner_ != this_process() || transition(state(), Event::abort).act == Act::nothing) return;
  const std::lock_guard lock(ending_);
  carrier_.send({.kind = Report::Kind::goodbye});
  failure_.set(ErrorKind::peer_lost, in_words([&] { return calls_.with_last_calls(ErrorKind::peer_lost, reason); }));
  enter(State::failed);
  carrier_.stop();
}

void Health::leave() noexcept {
  if (transition(state(), Event::leave).act == Act::nothing) return;
  carrier_.send({.kind = Report::Kind::goodbye});
  carrier_.stop();
  enter(State::left);
}

void Health::enter(State state) noexcept {
  for (State now = state_; now < state && !state_.compare_exchange_weak(now, state);) {
  }
}

void Health::say_message(const std::string& context) noexcept try {
  if (context == said_message_) return;
  std::string said = context;
  if (carrier_.send({.kind = Report::Kind::in_message, .call = call_, .text = context}))
    said_message_ = std::move(said);
} catch (const std::bad_alloc&) {  // the peers are not told
}

}  // namespace ringlet
