// How the message engine waits for its pipes, and how reports of failures go through them.
#include <sched.h>

#include <algorithm>
#include <cstring>

#include "engine/message/message_link.h"

namespace ringlet {
namespace {

using namespace std::chrono_literals;

// A background thread sleeps soon: a rank may compute on its processor.
constexpr int kLooksInBackground = 2;
// Where other programs fill the processors, a yield may take a time slice of each. Who waits for so long sleeps, which
// ends as soon as bytes arrive, and says for whom it waits.
constexpr auto kLongestLooking = 5ms;
// To look at a link costs a system call. In a call of one segment, this many looks are at the links of its round only.
constexpr int kGlances = 8;               ///< looks, of a call of one segment, at the pipes of its round only
constexpr auto kSleep = 20ms;             // the longest of a thread that makes a call
constexpr auto kSleepBesideOthers = 4ms;  // of one beside which others carry the call on, and which may miss its end
constexpr auto kExamineEvery = 20ms;      // how often such a thread looks for peers that are gone
constexpr auto kFinalErrorTime = 250ms;   ///< what a failed rank gives its pipes to take the error, before its peers
                                          ///< detect the end of the connection

std::vector<std::byte> packed(const FrameHeader& header, const std::string& text) {
  std::vector<std::byte> frame(sizeof header + text.size());
  std::memcpy(frame.data(), &header, sizeof header);
  if (!text.empty()) std::memcpy(frame.data() + sizeof header, text.data(), text.size());
  return frame;
}

}  // namespace

void MessageEngine::work_through(bool background) {
  std::optional<OutsideRuntime> outside;
  Awaited awaited;
  while (!make_progress({.looks = background ? kLooksInBackground : kLooks, .alone = true}, &awaited)) {
    if (!outside) outside.emplace();
    health().check_interrupts([this] { return context(); });
    mesh_->sleep(ConnectionKind::collectives, awaited.pipes, std::chrono::nanoseconds(kSleep).count());
  }
}

void MessageEngine::sleep(const Awaited& awaited, std::chrono::nanoseconds most) noexcept {
  const auto time = std::min<std::chrono::nanoseconds>(most, kSleepBesideOthers);
  mesh_->sleep(ConnectionKind::collectives, awaited.pipes, time.count());
}

/// Moves the call's bytes, until it is complete (true), or nothing has moved for so many looks, with a yield after each:
/// peers on other machines usually answer within them, and a rank that shares this processor can run at each yield.
/// After a sleep in vain one look is enough.
bool MessageEngine::make_progress(const Effort& effort, Awaited* awaited) {
  Run& run = *run_;
  const bool one_segment = run.segments == 1 && effort.looks > kGlances;
  int idle = run.asleep_since ? effort.looks - 1 : 0;
  Deadline::Clock::time_point idle_since{};
  while (run.done < run.segments) {
    const size_t done = run.done;
    if (progress(one_segment && idle < kGlances)) {
      idle = 0;
      if (const auto since = std::exchange(run.asleep_since, {})) run.slept += Deadline::Clock::now() - *since;
      const bool goes_on = run.done != done && run.done < run.segments;  // a long call may never sleep
      if (effort.alone && goes_on) health().check_interrupts([this] { return context(); });
      continue;
    }
    if (++idle < effort.looks) {
      if (idle == 1) idle_since = Deadline::last_tick();
      ::sched_yield();
      if (Deadline::last_tick() - idle_since > kLongestLooking) idle = effort.looks - 1;
      continue;
    }
    fetch();
    examine(effort.alone);  // before the last look: a header that it reads wakes no sleeper
    if (awaited == nullptr) return false;
    mesh_->about_to_sleep(ConnectionKind::collectives);
    if (progress(false)) {
      idle = 0;
      continue;
    }
    if (!run.asleep_since) run.asleep_since = Deadline::Clock::now();
    watch(awaited->pipes);
    return false;
  }
  complete();
  return true;
}

void MessageEngine::examine(bool closely) {
  const auto now = Deadline::Clock::now();
  closely = closely || now - run_->examined >= kExamineEvery;
  if (closely) run_->examined = now;
  health().examine(run_->waiting, closely ? Health::Look::ends : Health::Look::reports, now);
  report_wait_again();
}

void MessageEngine::watch(std::vector<Mesh::Watch>& pipes) const {
  pipes.clear();
  for (const auto& each : links_) {
    if (!each || each->pipe == nullptr) continue;
    // Not watched for reading, if its next frame is not taken now: its bytes would end every sleep at once.
    const Mesh::Watch watch{each->pipe, !each->reader->waits() || each->receiving >= 0, !each->queue.empty()};
    if (watch.reading || watch.writing) pipes.push_back(watch);
  }
}

bool MessageEngine::awaits(int peer) const {
  if (!links_[peer]) return false;
  if (links_[peer]->owes()) return true;
  for (size_t i = run_->first; i < run_->next; ++i) {
    if (!run_->finished[i % run_->window] && segments_[i % run_->window].awaits(peer)) return true;
  }
  return false;
}

int MessageEngine::awaited() const {
  for (size_t i = run_->first; i < run_->next; ++i) {
    const int peer = run_->finished[i % run_->window] ? -1 : segments_[i % run_->window].awaited();
    if (peer >= 0) return peer;
  }
  for (const auto& each : links_) {
    if (each && each->owes()) return each->peer;
  }
  return -1;
}

/// Checks also the pipes that the call does not use: their peers may report an error, be gone, or be in another call.
/// Reads all reports before it looks for ended pipes: the peer that knows the cause may not be the peer that is gone.
void MessageEngine::poll(Health::Look look) {
  const Hold hold{*this, std::unique_lock(pipes_, std::try_to_lock)};
  if (!hold.lock || has_left()) return;
  read_reports(look == Health::Look::all);
  if (look == Health::Look::reports) return;
  for (const auto& each : links_) {
    if (each && each->pipe != nullptr) look_for_end(*each);
  }
}

/// A pipe has not ended while messages of later calls or segments, read ahead, are still to be taken. Reports are taken
/// as they arrive, before this: of one that is not whole the rest never comes if the pipe has ended.
void MessageEngine::look_for_end(Link& link) {
  const bool ahead = link.reader->waits() && link.receiving < 0 && link.next_header()->kind == FrameKind::data;
  if (link.reader->has_more() || ahead || !link.pipe->ended()) return;
  health().on_closed(link.peer, link.pipe->memory_gone(), link.pipe->why_ended());
}

/// `calls`: also what the peers' data say of calls that this rank has not made. Their reports follow those data.
void MessageEngine::read_reports(bool calls) {
  for (int peer = 0; peer < world_; ++peer) {
    if (peer == rank_ || (!links_[peer] && mesh_->find(peer, ConnectionKind::collectives) == nullptr)) continue;
    Link& other = link(peer);
    if (!other.find(*mesh_) || other.receiving >= 0) continue;
    const FrameHeader* header = other.next_header();
    while (header != nullptr && header->kind != FrameKind::data) {
      header = on_report(other, *header) ? other.next_header() : nullptr;
    }
    if (header == nullptr) continue;
    if (header->call > calls_) {
      const std::string call = calls ? call_of(peer, *header) : "";
      if (calls) health().on_report(peer, {.kind = Health::Report::Kind::waiting, .call = header->call, .text = call});
    } else if (run_ != nullptr) {
      compare(other, *header);
    }
  }
}

std::string MessageEngine::call_of(int peer, const FrameHeader& header) const {
  return "rank " + std::to_string(peer) + " of " + std::to_string(world_) + " in " +
         describe({header.signature, header.count}, header.sequence);
}

/// Takes a frame that is no message; false while it has not arrived whole.
bool MessageEngine::on_report(Link& link, const FrameHeader& header) {
  if (header.bytes > FrameHeader::kMostText) {
    health().fail(ErrorKind::peer_lost, context() + ": rank " + std::to_string(link.peer) + " sent a report of " +
                                            std::to_string(header.bytes) + " bytes, more than a report can have");
  }
  link.text.resize(header.bytes);
  const iovec piece{link.text.data(), link.text.size()};
  const FrameHeader report = header;
  if (!link.reader->payload({&piece, 1})) return false;
  if (report.kind == FrameKind::taken) {
    on_taken(link, report);
    return true;
  }
  if (report.kind == FrameKind::waiting && run_ != nullptr && report.call <= calls_) compare(link, report);
  using Kind = Health::Report::Kind;
  Health::Report told{.kind = Kind::goodbye, .call = report.call, .text = link.text};
  std::string call;
  if (report.kind == FrameKind::error) {
    if (report.detail < 0 || report.detail > static_cast<int64_t>(ErrorKind::device_error)) return true;
    told.kind = Kind::error;
    told.error = static_cast<ErrorKind>(report.detail);
    told.origin = static_cast<int>(report.index);
  } else if (report.kind == FrameKind::waiting) {
    told.kind = Kind::waiting;
    told.suspect = {static_cast<int>(report.detail), report.index != 0};
    if (report.detail >= 0) call = call_of(link.peer, report);
    told.text = call;
  } else if (report.kind == FrameKind::in_message) {
    told.kind = Kind::in_message;
  } else if (report.kind != FrameKind::goodbye) {
    return true;
  }
  health().on_report(link.peer, told);
  return true;
}

/// The error or goodbye may follow messages of a call that this rank has not made and never will.
void MessageEngine::read_final_error(int peer) {
  const Hold hold{*this, std::unique_lock(pipes_, std::try_to_lock)};
  if (!hold.lock || has_left() || run_ != nullptr || !link(peer).find(*mesh_)) return;
  Link& gone = link(peer);
  std::vector<std::byte> unwanted;
  while (const FrameHeader* header = gone.next_header()) {
    if (header->kind != FrameKind::data) {
      if (!on_report(gone, *header)) return;
      continue;
    }
    if (header->bytes > kScratchBytes) return;  // no message is so long
    unwanted.resize(header->bytes);
    const iovec piece{unwanted.data(), unwanted.size()};
    if (!gone.reader->payload({&piece, unwanted.empty() ? size_t{0} : size_t{1}})) return;
  }
}

/// An error or a goodbye is queued in memory that is there already, and goes out in place of the data with stop().
bool MessageEngine::send(const Health::Report& report) noexcept try {
  using Kind = Health::Report::Kind;
  if (report.kind == Kind::waiting) return report_wait(report), true;
  if (report.kind == Kind::in_message) return report_message_wait(report);
  const std::lock_guard lock(reports_);
  if (report.kind == Kind::goodbye) {
    pending_goodbye_ = true;
  } else if (!std::exchange(has_error_, true)) {  // the first is the cause
    FrameHeader header;
    header.kind = FrameKind::error;
    header.detail = static_cast<int64_t>(report.error);
    header.index = static_cast<uint32_t>(report.origin);
    error_->set(header, in_words([&] { return std::string(report.text.substr(0, FrameHeader::kMostText)); }));
    pending_error_ = true;
  }
  return true;
} catch (const std::bad_alloc&) {  // the peers are not told in which call this rank waits
  return false;
}

/// Of the call in progress, by the thread that makes it.
void MessageEngine::report_wait(const Health::Report& report) {
  const auto words = std::make_shared<ReportFrame>(run_->header, "");
  words->header.kind = FrameKind::waiting;
  words->header.detail = report.suspect.rank;
  words->header.index = report.suspect.in_call ? 1 : 0;
  run_->said = words;
  send_to_connected(words);
}

/// Not during a collective, which sends its own reports.
bool MessageEngine::report_message_wait(const Health::Report& report) {
  const Hold hold{*this, std::unique_lock(pipes_, std::try_to_lock)};
  if (!hold.lock || has_left() || run_ != nullptr) return false;
  for (int peer = 0; peer < world_; ++peer) {
    if (peer != rank_ && mesh_->find(peer, ConnectionKind::collectives) != nullptr) link(peer).find(*mesh_);
  }
  FrameHeader header;
  header.kind = FrameKind::in_message;
  header.call = report.call;
  send_to_connected(std::make_shared<ReportFrame>(header, std::string(report.text.substr(0, FrameHeader::kMostText))));
  return true;
}

/// Tells the peers that have connected, or got data, since this rank said for whom it waits.
void MessageEngine::report_wait_again() noexcept try {
  if (run_->said) send_to_connected(run_->said);
} catch (const std::bad_alloc&) {  // they are not told
}

/// To all peers that are connected and have not been told, beside the data.
void MessageEngine::send_to_connected(const std::shared_ptr<const ReportFrame>& report) {
  for (const auto& each : links_) {
    if (!each || each->pipe == nullptr || each->mute || each->said == report || health().has_left(each->peer)) continue;
    each->said = report;
    each->queue_report(report);
    while (!each->queue.empty() && each->queue.front().report && each->send()) each->queue.pop_front();
  }
}

/// Best effort: a peer that gets no report fails at its deadline. If another thread holds the pipes, that thread sends
/// the reports: this thread wakes it if it sleeps, and it calls flush() when it has released the pipes.
void MessageEngine::flush() noexcept {
  std::unique_lock words(reports_);
  while (pending_error_ || pending_goodbye_) {
    const std::unique_lock pipes(pipes_, std::try_to_lock);
    if (!pipes) return mesh_->wake_all();
    const bool error = std::exchange(pending_error_, false);
    if (!error) pending_goodbye_ = false;
    words.unlock();
    send_to_all(error ? error_ : goodbye_);
    words.lock();  // before the pipes are released: a thread that found them held has posted by now
  }
}

/// A peer for which there is no memory to queue the report reads the end of the connection instead.
void MessageEngine::send_to_all(const std::shared_ptr<ReportFrame>& report) noexcept {
  if (has_left()) return;
  report->header.call = run_ != nullptr ? calls_ : calls_ + 1;
  if (report == error_) {
    final_error_ = report;
    refuse_connections();  // a peer that connects later has no other way to hear of it before this rank leaves
  }
  for (int peer = 0; peer < world_; ++peer) {
    Pipe* const pipe = peer == rank_ ? nullptr : mesh_->find(peer, ConnectionKind::collectives);
    if (pipe == nullptr) continue;
    try {
      Link& each = link(peer);
      if (!each.find(*mesh_) || each.mute) continue;
      each.queue.resize(each.writer->midway() ? 1 : 0, {0, -1, report});
      if (final_error_ && report != final_error_) each.queue.push_back({0, -1, final_error_});  // the pipe may be new
      each.queue.push_back({0, -1, report});
    } catch (const std::bad_alloc&) {
      pipe->finish();
    }
  }
  drain(Deadline::after(kFinalErrorTime));
}

/// Sends until the queues hold only frames that cannot be sent any more.
void MessageEngine::drain(const Deadline& deadline) noexcept {
  for (bool left = true; left && !deadline.passed();) {
    left = false;
    for (const auto& each : links_) {
      if (!each || each->pipe == nullptr) continue;
      while (!each->queue.empty() && each->send()) each->queue.pop_front();
      if (each->queue.empty() || each->pipe->ended()) continue;
      const Mesh::Watch watch{each->pipe, false, true};  // one of them: the sleep is short
      mesh_->sleep(ConnectionKind::collectives, {&watch, 1}, 1'000'000);
      left = true;
    }
  }
}

/// From now on a peer that connects reads the final error, or a goodbye.
void MessageEngine::refuse_connections() noexcept {
  const ReportFrame& last = final_error_ ? *final_error_ : *goodbye_;
  std::vector<std::byte> frame;
  try {
    frame = packed(last.header, last.text);
  } catch (const std::bad_alloc&) {  // then the handshake says that this rank has left
  }
  mesh_->retire(std::move(frame));
}

/// Departs from the region at the end of its scope, even if an interrupt ends the scope.
struct MessageEngine::Departing {
  ~Departing() {
    Transport* const local = mesh.local();
    if (local == nullptr) return;
    if (mesh.delivered()) local->retire();
    local->depart();
  }
  Mesh& mesh;
};

void MessageEngine::leave(bool, std::chrono::milliseconds patience) {
  const std::lock_guard lock(pipes_);
  const Departing departing{*mesh_};
  goodbye_->header.call = calls_ + 1;
  refuse_connections();
  health().leave();
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
