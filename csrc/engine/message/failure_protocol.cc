#include "engine/message/failure_protocol.h"

#include <algorithm>

namespace ringlet {
namespace {

using namespace std::chrono_literals;

constexpr auto kReportAfter = 50ms;  // after this wait a rank tells its peers its call, and the rank that it waits for
constexpr size_t kMostText = 600;    // of the text that says which calls other ranks wait in

std::string name_of(int rank) { return rank < 0 ? "nobody" : "rank " + std::to_string(rank); }

}  // namespace

void FailureProtocol::enter_call() {
  failure_.raise_if_failed();
  if (reported_) forward_failure();
}

void FailureProtocol::begin_call(const FrameHeader& header, std::chrono::milliseconds timeout, Clock::time_point now) {
  in_call_ = true;
  call_ = header;
  began_ = now;
  timeout_ = std::clamp(timeout, -kLongestTimeout, kLongestTimeout);
  said_.reset();
}

void FailureProtocol::end_call() {
  if (said_ && said_->rank >= 0) report({});  // withdraws the suspicion: this rank waits for no peer now
  in_call_ = false;
}

void FailureProtocol::on_message(int peer) {
  Peer& sender = peers_[peer];
  sender.suspects = {};
  sender.in_collective.clear();
  sender.in_message.clear();
}

void FailureProtocol::on_report(int peer, const FrameHeader& header, const std::string& text) {
  Peer& sender = peers_[peer];
  const bool known = header.detail >= 0 && header.detail <= static_cast<int64_t>(ErrorKind::device_error);
  switch (header.kind) {
    case FrameKind::error:
      if (!known) return;
      sender.left = true;
      reported_ = {static_cast<ErrorKind>(header.detail), static_cast<int>(header.index), text};
      // An error in a later call: this call has all the data that it needs of that rank, and can complete.
      if (!in_call_ || header.call <= call_.call) forward_failure();
      return;
    case FrameKind::goodbye: sender.left = true; return;
    case FrameKind::in_message: sender.in_message = text; return;
    case FrameKind::waiting:
      sender.call = header.call;
      sender.in_collective = header.detail < 0 ? "" : call_of(peer, header);
      sender.suspects = {static_cast<int>(header.detail), header.index != 0};
      return;
    case FrameKind::data:
    case FrameKind::taken:
    case FrameKind::message: return;
  }
}

/// A connection may end once its peer has said goodbye and the call in progress needs nothing of that peer.
void FailureProtocol::on_closed(int peer, bool memory_gone, const std::string& why) {
  if (peers_[peer].left && !(in_call_ && owner_.awaits(peer))) return;
  if (memory_gone) fail(ErrorKind::invalid_usage, owner_.context() + ": " + kMemoryGone);
  lose(peer, why);
}

void FailureProtocol::on_idle(Clock::time_point now) {
  if (failure_.failed()) {
    owner_.flush();
    failure_.raise("");
  }
  owner_.poll_peers();
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
    if (peers_[peer].left && owner_.awaits(peer)) lose(peer, "");
  }
  if (now - began_ >= timeout_) time_out();
  if (now - began_ <= std::min<Clock::duration>(kReportAfter, timeout_ / 4)) return;
  // A rank that is stuck sends no report. The ranks that wait for it send one, and the ranks that wait for those pass
  // it on. A report also tells the peers which call this rank is in, if the call itself sends them nothing.
  const Suspect last = straggler();
  if (said_ != last) report(last);
}

/// The peer that this rank waits for. If that peer has reported that it waits for another rank: that other rank.
FailureProtocol::Suspect FailureProtocol::straggler() const {
  const int rank = owner_.awaited();
  if (rank < 0) return {};
  const Peer& peer = peers_[rank];
  // A peer that is one call behind waits for the same rank, too.
  const bool passed_on = peer.call + 1 >= call_.call && peer.suspects.rank >= 0 && peer.suspects.rank != rank_;
  return passed_on ? peer.suspects : Suspect{rank, peer.call >= call_.call};
}

void FailureProtocol::report(const Suspect& suspect) {
  said_ = suspect;
  FrameHeader header = call_;
  header.kind = FrameKind::waiting;
  header.detail = suspect.rank;
  header.index = suspect.in_call ? 1 : 0;
  owner_.say(header, "");
}

void FailureProtocol::time_out() {
  const Suspect last = straggler();
  const std::string peer = name_of(last.rank);
  fail(ErrorKind::timeout,
       owner_.context() + ": Timed out having waited " + in_seconds(timeout_) + " for " + peer +
           "; furthest behind is " + peer +
           (last.in_call ? ", which is in this call" : ", which has not made this call") + waiting_as_well(rank_) +
           "; it may be in other work, stuck, or cut off from the network (timeout= raises the limit)");
}

/// Reads all reports first: the peer that knows the cause may not be the peer that is gone.
void FailureProtocol::lose(int peer, const std::string& why) {
  owner_.read_reports();
  if (reported_) forward_failure();  // an error of a later call; this call still needs data, so it fails as well
  const std::string where = (in_call_ ? owner_.context() : name_of(rank_)) + ": ";
  if (peers_[peer].left) {
    fail(ErrorKind::peer_lost,
         where + name_of(peer) + " left the group: it finished early, or raised an error: look at its output");
  }
  fail(ErrorKind::peer_lost,
       where + "the connection to " + name_of(peer) + " ended (" + why +
           "): its process is gone, or its host cannot be reached; look at that rank's own output");
}

/// Fails with the error that a peer reported. The peers of this rank get it under the number of the rank where the
/// failure began.
void FailureProtocol::forward_failure() {
  const Reported what = *reported_;
  const std::string message = owner_.context() + ": " + name_of(what.origin) + " reported: " + what.text;
  rethrow(what.kind, poison(what.kind, message, what.origin, what.text));
}

void FailureProtocol::fail(ErrorKind kind, const std::string& message) { rethrow(kind, poison(kind, message)); }

/// `text`: what rank `origin`, in which the failure began, reports about it.
std::string FailureProtocol::poison(ErrorKind kind, const std::string& message, int origin,
                                    const std::string& text) noexcept {
  FrameHeader header;
  header.kind = FrameKind::error;
  header.detail = static_cast<int64_t>(kind);
  header.index = static_cast<uint32_t>(origin);
  // Posted before the failure is set, because the thread whose call ends by this failure sends the report.
  owner_.post(header, text);
  std::string told = in_words([&] { return calls_.with_last_calls(kind, message); });
  if (failure_.set(kind, told)) calls_.failed(kind, told);
  owner_.flush();
  return told;
}

void FailureProtocol::abort(const std::string& reason) {
  FrameHeader goodbye;
  goodbye.kind = FrameKind::goodbye;
  owner_.post(goodbye, "");
  failure_.set(ErrorKind::peer_lost, reason);
  owner_.flush();
}

void FailureProtocol::say_message(const std::string& context) {
  if (context == said_message_) return;
  said_message_ = context;
  FrameHeader header;
  header.kind = FrameKind::in_message;
  header.call = call_.call;
  owner_.say(header, context.substr(0, FrameHeader::kMostText));
}

/// A peer in a collective may have sent its first message already. Its reports follow that message in the stream.
std::string FailureProtocol::waiting_as_well(int peer) {
  std::string text;
  for (int q = 0; q < static_cast<int>(peers_.size()); ++q) {
    const FrameHeader* const ahead = owner_.frame_ahead(q);
    std::string in_collective = ahead != nullptr ? call_of(q, *ahead) : peers_[q].in_collective;
    if (peer >= 0 && q != peer) in_collective.clear();
    for (const std::string& in : {in_collective, peers_[q].in_message}) {
      if (!in.empty() && text.size() < kMostText) text += "; waiting as well: " + in;
    }
  }
  return text;
}

std::string FailureProtocol::call_of(int peer, const FrameHeader& header) const {
  return name_of(peer) + " of " + std::to_string(peers_.size()) + " in " +
         describe({header.signature, header.count}, header.sequence);
}

}  // namespace ringlet
