// How the message engine waits, and every way in which a wait can end badly.
#include <sched.h>

#include <algorithm>
#include <cstring>

#include "base/deadline.h"
#include "engine/message/message_link.h"

namespace ringlet {
namespace {

using namespace std::chrono_literals;

// Looks before sleeping, each with a yield: peers on other machines answer within them, and ranks that share a
// processor get it at once.
constexpr int kLooks = 120;
constexpr int kLooksInBackground = 2;
constexpr int64_t kSleepNanoseconds = 20'000'000;
constexpr auto kSilence = 50ms;          // after which the peers are told what this rank is in, and whom it waits for
constexpr size_t kMostText = 600;        // of what other ranks wait in
constexpr auto kFinalErrorTime = 250ms;  // for telling the peers why, before they would find out by themselves

std::vector<std::byte> packed(const FrameHeader& header, const std::string& text) {
  std::vector<std::byte> frame(sizeof header + text.size());
  std::memcpy(frame.data(), &header, sizeof header);
  if (!text.empty()) std::memcpy(frame.data() + sizeof header, text.data(), text.size());
  return frame;
}

}  // namespace

void MessageEngine::wait(int& idle) {
  const int looks = run_->background ? kLooksInBackground : kLooks;
  if (++idle < looks) {
    ::sched_yield();
  } else if (idle == looks) {
    if (!run_->outside) run_->outside.emplace();
    check_for_interrupt();
    examine();  // before the last look: a header that it reads would wake no sleeper
    mesh_->about_to_sleep(ConnectionKind::collectives);  // and look once more
  } else {
    sleep();
    idle = looks - 1;
  }
}

void MessageEngine::sleep() {
  std::vector<Mesh::Watch>& watches = run_->watches;
  watches.clear();
  for (const auto& each : links_) {
    if (!each || each->pipe == nullptr) continue;
    // A header that nobody takes now would wake at once, for ever.
    const Mesh::Watch watch{each->pipe, !each->reader->waits() || each->receiving >= 0, !each->queue.empty()};
    if (watch.reading || watch.writing) watches.push_back(watch);
  }
  const auto began = Deadline::Clock::now();
  mesh_->sleep(ConnectionKind::collectives, watches, kSleepNanoseconds);
  run_->slept += Deadline::Clock::now() - began;
}

/// Throws what ends the call in progress, if something does.
void MessageEngine::examine() {
  if (failure_.failed()) {
    tell();
    failure_.raise("");
  }
  poll_peers();
  for (const auto& each : links_) {
    if (each && each->pipe != nullptr && each->left && awaits(*each)) lost(*each);
  }
  const auto waited = Deadline::Clock::now() - run_->started;
  if (run_->deadline.passed()) {
    const Suspect last = suspect();
    const std::string peer = last.rank < 0 ? "nobody" : "rank " + std::to_string(last.rank);
    fail(ErrorKind::timeout,
         context() + ": Timed out having waited " + in_seconds(run_->call.timeout) + " for " + peer +
             "; furthest behind is " + peer +
             (last.in_call ? ", which is in this call" : ", which has not made this call") + waiting_as_well(rank_) +
             "; is it in other work, stuck, or cut off from the network? (timeout= raises the limit)");
  }
  if (waited > std::min<Deadline::Clock::duration>(kSilence, run_->call.timeout / 4)) report_suspect_once();
}

/// Pipes of other calls: a peer may report an error, be gone, or be in a call in which this rank has no part. All are
/// heard before the end of one is heeded: who knows why may be another than who is gone.
void MessageEngine::poll_peers() {
  read_reports();
  for (const auto& each : links_) {
    if (each && each->pipe != nullptr) on_peer_closed(*each);
  }
}

void MessageEngine::read_reports() {
  for (int peer = 0; peer < world_; ++peer) {
    if (peer == rank_ || (!links_[peer] && mesh_->find(peer, ConnectionKind::collectives) == nullptr)) continue;
    Link& other = link(peer);
    if (!other.find(*mesh_) || other.receiving >= 0) continue;
    const FrameHeader* header = other.next();
    if (header == nullptr) continue;
    if (header->kind != FrameKind::data) {
      on_report(other, *header);
    } else if (run_ != nullptr && header->call <= calls_) {
      compare(other, *header);
    }
  }
}

void MessageEngine::poll_failures() {
  const Hold hold{*this, std::unique_lock(pipes_, std::try_to_lock)};
  if (hold.lock && !left_) poll_peers();
}

/// Before its error or its goodbye there may be messages of a call that this rank has not made, and never will.
void MessageEngine::read_final_error(int peer) {
  const Hold hold{*this, std::unique_lock(pipes_, std::try_to_lock)};
  if (!hold.lock || left_ || run_ != nullptr || !link(peer).find(*mesh_)) return;
  Link& gone = link(peer);
  std::vector<std::byte> unwanted;
  while (const FrameHeader* header = gone.next()) {
    if (header->kind != FrameKind::data) {
      if (!on_report(gone, *header)) return;
      continue;
    }
    if (header->bytes > kScratchBytes) return;  // no such message
    unwanted.resize(header->bytes);
    const iovec piece{unwanted.data(), unwanted.size()};
    if (!gone.reader->payload({&piece, unwanted.empty() ? size_t{0} : size_t{1}})) return;
  }
}

/// Takes what is no message; false while it has not arrived whole.
bool MessageEngine::on_report(Link& link, const FrameHeader& header) {
  if (header.bytes > FrameHeader::kMostText) {
    fail(ErrorKind::peer_lost, context() + ": rank " + std::to_string(link.peer) + " sent a word of " +
                                   std::to_string(header.bytes) + " bytes, longer than any");
  }
  link.text.resize(header.bytes);
  const iovec piece{link.text.data(), link.text.size()};
  const FrameHeader word = header;
  if (!link.reader->payload({&piece, 1})) return false;
  const bool sound = word.detail >= 0 && word.detail <= static_cast<int64_t>(ErrorKind::device_error);
  if (word.kind == FrameKind::error && sound) {
    link.left = true;
    reported_ = {static_cast<ErrorKind>(word.detail), static_cast<int>(word.index), link.text};
    // Of a later call: this one has all it needs of that rank, and can end well.
    if (run_ == nullptr || word.call <= calls_) forward_failure();
  }
  if (word.kind == FrameKind::goodbye) link.left = true;
  if (word.kind == FrameKind::in_message) link.in_message = link.text;
  if (word.kind == FrameKind::waiting) {
    if (run_ != nullptr && word.call <= calls_) compare(link, word);
    link.heard = word.call;
    link.in_collective = word.detail < 0 ? "" : link.context(word, world_);
    link.suspects = {static_cast<int>(word.detail), word.index != 0};
  }
  return true;
}

/// Gives the group up for what a peer reported.
void MessageEngine::forward_failure() {
  const Reported what = *reported_;
  give_up(what.kind, context() + ": rank " + std::to_string(what.origin) + " reported: " + what.text, what.origin,
          what.text);
}

bool MessageEngine::awaits(const Link& link) const {
  if (link.owes()) return true;
  for (size_t i = run_->first; i < run_->next; ++i) {
    if (!run_->finished[i % run_->window] && segments_[i % run_->window].awaits(link.peer)) return true;
  }
  return false;
}

/// The peer that this rank waits for, or whom that one waits for, as far as it said so.
MessageEngine::Suspect MessageEngine::suspect() const {
  int peer = -1;
  for (size_t i = run_->first; i < run_->next && peer < 0; ++i) {
    if (!run_->finished[i % run_->window]) peer = segments_[i % run_->window].awaited();
  }
  for (const auto& each : links_) {
    if (peer < 0 && each && each->owes()) peer = each->peer;
  }
  if (peer < 0 || !links_[peer]) return {peer, false};
  const Link& link = *links_[peer];
  // A rank that is a call behind is held up by whom it waits for, too.
  const bool passed_on = link.heard + 1 >= calls_ && link.suspects.rank >= 0 && link.suspects.rank != rank_;
  return passed_on ? link.suspects : Suspect{peer, link.heard >= calls_};
}

/// A rank that is stuck says nothing; those who wait for it say so, and those who wait for them pass it on. Peers also
/// learn in which call this rank is, where the call itself sends them nothing.
void MessageEngine::report_suspect_once() {
  const Suspect last = suspect();
  if (run_->reported && last == run_->told) return;
  run_->reported = true;
  report_suspect(last);
}

void MessageEngine::report_suspect(const Suspect& last) {
  run_->told = last;
  FrameHeader header = run_->header;
  header.kind = FrameKind::waiting;
  header.detail = last.rank;
  header.index = last.in_call ? 1 : 0;
  say(std::make_shared<const Word>(Word{header, ""}));
}

/// Beside what else goes on, to those to whom a pipe stands.
void MessageEngine::say(const std::shared_ptr<const Word>& word) {
  for (const auto& each : links_) {
    if (!each || each->pipe == nullptr || each->left || each->mute) continue;
    each->say(word);
    while (!each->queue.empty() && each->queue.front().word && each->send()) each->queue.pop_front();
  }
}

void MessageEngine::tell_message(const std::string& context) {
  const Hold hold{*this, std::unique_lock(pipes_, std::try_to_lock)};
  if (!hold.lock || left_ || run_ != nullptr || context == told_message_) return;
  for (int peer = 0; peer < world_; ++peer) {
    if (peer != rank_ && mesh_->find(peer, ConnectionKind::collectives) != nullptr) link(peer).find(*mesh_);
  }
  told_message_ = context;
  FrameHeader header;
  header.kind = FrameKind::in_message;
  header.bytes = std::min(context.size(), FrameHeader::kMostText);
  header.call = calls_;
  say(std::make_shared<const Word>(Word{header, context.substr(0, header.bytes)}));
}

/// A peer that is in a call may have sent its first message of it, behind which stands all that it says.
std::string MessageEngine::waiting_as_well(int peer) {
  const Hold hold{*this, std::unique_lock(pipes_, std::try_to_lock)};
  if (!hold.lock || left_) return "";
  std::string text;
  for (const auto& each : links_) {
    if (!each || each->pipe == nullptr) continue;
    std::string in_collective = each->in_collective;
    if (const FrameHeader* header = each->receiving < 0 ? each->next() : nullptr) {
      if (header->kind == FrameKind::data && header->call > calls_) in_collective = each->context(*header, world_);
    }
    if (each->peer != peer && peer >= 0) in_collective.clear();
    for (const std::string& in : {in_collective, each->in_message}) {
      if (!in.empty() && text.size() < kMostText) text += "; waiting as well: " + in;
    }
  }
  return text;
}

/// A pipe may end once its peer said goodbye and nothing of it is needed any more. Frames of later calls may have been
/// read ahead: then it has not ended yet.
void MessageEngine::on_peer_closed(const Link& link) {
  const bool unread = link.reader->has_more() || (link.reader->waits() && link.receiving < 0);
  if (!unread && link.pipe->ended() && !(link.left && (run_ == nullptr || !awaits(link)))) lost(link);
}

void MessageEngine::lost(const Link& link) {
  if (link.pipe->memory_gone()) fail(ErrorKind::invalid_usage, context() + ": " + kMemoryGone);
  read_reports();                    // somebody may have said why
  if (reported_) forward_failure();  // of a later call, and yet something of this one is missing
  const std::string peer = "rank " + std::to_string(link.peer);
  const std::string where = run_ != nullptr ? context() : "rank " + std::to_string(rank_);
  if (link.left) {
    fail(ErrorKind::peer_lost, where + ": " + peer + " left the group; did it finish early, or fail outside ringlet?");
  }
  fail(ErrorKind::peer_lost,
       where + ": the connection to " + peer + " ended (" + link.pipe->why_ended() +
           "): its process is gone, or its host cannot be reached; look at that rank's own output");
}

void MessageEngine::fail(ErrorKind kind, const std::string& message) { give_up(kind, message, rank_, message); }

/// In the middle of a call: its messages will not be complete.
void MessageEngine::check_for_interrupt() {
  check_interrupts([&](const std::string& why) {
    const std::string message = context() + ": " + why;
    poison(ErrorKind::peer_lost, message, rank_, message);
  });
}

void MessageEngine::give_up(ErrorKind kind, const std::string& message, int origin, const std::string& words) {
  rethrow(kind, poison(kind, message, origin, words));
}

/// `words`: what rank `origin`, where it happened, says of it. Returns what this rank raises.
std::string MessageEngine::poison(ErrorKind kind, const std::string& message, int origin, const std::string& words) {
  FrameHeader header;
  header.kind = FrameKind::error;
  header.detail = static_cast<int64_t>(kind);
  header.index = static_cast<uint32_t>(origin);
  post(header, words.substr(0, FrameHeader::kMostText));  // before it is set: who ends because of it says why
  const std::string told = calls().with_last_calls(kind, message);
  if (failure_.set(kind, told)) calls().failed(kind, told);
  tell();
  return told;
}

void MessageEngine::post(const FrameHeader& header, const std::string& text) {
  const std::lock_guard lock(words_);
  untold_.push_back(std::make_shared<Word>(Word{header, text}));
  untold_.back()->header.bytes = text.size();
}

/// Best effort: whoever is not told finds out by the deadline. Where another thread holds the pipes, that one tells: if
/// it sleeps it is woken, and it looks here after it has let go.
void MessageEngine::tell() {
  std::unique_lock words(words_);
  while (!untold_.empty()) {
    const std::unique_lock pipes(pipes_, std::try_to_lock);
    if (!pipes) return mesh_->ring();
    const std::shared_ptr<Word> word = std::move(untold_.front());
    untold_.pop_front();
    words.unlock();
    send_to_all(word);
    words.lock();  // before the pipes are let go: who finds them held has posted what this then sees
  }
}

void MessageEngine::send_to_all(const std::shared_ptr<Word>& word) {
  if (left_) return;
  word->header.call = run_ != nullptr ? calls_ : calls_ + 1;
  if (word->header.kind == FrameKind::error) final_error_ = word;
  for (int peer = 0; peer < world_; ++peer) {
    if (peer == rank_ || mesh_->find(peer, ConnectionKind::collectives) == nullptr) continue;
    Link& each = link(peer);
    if (!each.find(*mesh_) || each.mute) continue;
    each.queue.resize(each.writer->midway() ? 1 : 0, {0, -1, word});
    if (final_error_ && word != final_error_) each.queue.push_back({0, -1, final_error_});  // it may be a new pipe
    each.queue.push_back({0, -1, word});
  }
  drain(Deadline::after(kFinalErrorTime));
}

/// Until nothing is queued that can still go out.
void MessageEngine::drain(const Deadline& deadline) {
  for (bool left = true; left && !deadline.passed();) {
    left = false;
    std::vector<Mesh::Watch> watches;
    for (const auto& each : links_) {
      if (!each || each->pipe == nullptr) continue;
      while (!each->queue.empty() && each->send()) each->queue.pop_front();
      if (each->queue.empty() || each->pipe->ended()) continue;
      watches.push_back({each->pipe, false, true});
      left = true;
    }
    if (left) mesh_->sleep(ConnectionKind::collectives, watches, 1'000'000);
  }
}

void MessageEngine::abort(const std::string& reason) {
  FrameHeader goodbye;
  goodbye.kind = FrameKind::goodbye;
  post(goodbye);
  failure_.set(ErrorKind::peer_lost, reason);
  tell();
}

void MessageEngine::leave(bool, std::chrono::milliseconds patience) {
  const std::lock_guard lock(pipes_);
  FrameHeader goodbye;
  goodbye.kind = FrameKind::goodbye;
  goodbye.call = calls_ + 1;
  mesh_->retire(final_error_ ? packed(final_error_->header, final_error_->text) : packed(goodbye, ""));
  post(goodbye);
  tell();
  left_ = true;
  mesh_->close(Deadline::after(patience));
}

std::string MessageEngine::context() const {
  std::string text = "rank " + std::to_string(rank_) + " of " + std::to_string(world_);
  if (run_ == nullptr) return text;
  const Run& run = *run_;
  const size_t bytes = run.call.count * element_size(run.call.dtype);
  text += " in " + describe(run.signature, run.call.sequence) + ", " + std::to_string(bytes * run.done / run.segments) +
          " of " + std::to_string(bytes) + " bytes done";
  if (run.first < run.next) text += ", round " + std::to_string(segments_[run.first % run.window].round());
  return text;
}

}  // namespace ringlet
