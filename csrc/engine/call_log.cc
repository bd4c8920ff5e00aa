#include "engine/call_log.h"

#include <algorithm>
#include <bit>

namespace ringlet {
namespace {

constexpr size_t kRunsInMessage = 4;  // more lines would hide the message

int64_t now_ns() noexcept { return std::chrono::steady_clock::now().time_since_epoch().count(); }

/// Whether both differ only in their sequence numbers.
bool alike(const PastCall& a, const PastCall& b) {
  const Call &x = a.call, &y = b.call;
  return a.done == b.done && x.collective == y.collective && x.dtype == y.dtype && x.op == y.op && x.root == y.root &&
         x.label == y.label && x.count == y.count && x.algorithm == y.algorithm;
}

}  // namespace

void CallLog::tell_begin() {
  current_->took.store(0, std::memory_order_release);
  current_->began.store(now_ns(), std::memory_order_release);
  current_->timed.store(made(), std::memory_order_release);
  if (!logging(LogLevel::debug)) return;
  log(LogLevel::debug, source_, describe(read(made() - 1).call) + " begins");
}

void CallLog::tell_end() {
  if (current_->timed.load(std::memory_order_relaxed) != made()) return;  // the log was off when it began
  current_->took.store(now_ns() - current_->began.load(std::memory_order_relaxed), std::memory_order_release);
  if (!logging(LogLevel::debug)) return;
  const PastCall past = read(made() - 1);
  const size_t bytes = past.call.count * element_size(past.call.dtype);
  std::string text = std::string(name(past.call.collective)) + " #" + std::to_string(past.call.sequence) + " done in " +
                     in_time_units(past.seconds) + ": " + in_binary_units(bytes);
  if (past.chosen != nullptr) {
    text += std::string(", ") + past.chosen->name + (past.in_place ? ", in place, " : ", ") +
            std::to_string(past.segments) + (past.segments == 1 ? " segment" : " segments");
  }
  log(LogLevel::debug, source_, text);
}

void CallLog::tell(const Call& call, const Choice& choice, const Selector& selector, const Situation& situation) {
  if (call.observer != nullptr) call.observer->chosen(choice);
  if (!logging(LogLevel::info)) return;
  const uint64_t size_class = uint64_t{1} << (std::bit_width(choice.bytes) % 64);
  uint64_t& told = told_[static_cast<size_t>(call.collective)];
  if ((told & size_class) != 0) return;
  told |= size_class;
  const std::string why = call.algorithm != nullptr ? "named by the caller" : selector.rule_for(situation).source;
  std::string text = std::string(name(call.collective)) + " of " + in_binary_units(choice.bytes) + ": " +
                     choice.algorithm->name + " (" + why + "), " + choice.memory + ", ";
  text += choice.segments == 1
              ? "1 segment"
              : std::to_string(choice.segments) + " segments of " + in_binary_units(choice.segment_bytes);
  log(LogLevel::info, source_, text);
}

void CallLog::waited(int peer, std::chrono::steady_clock::duration time) {
  waited_.fetch_add(std::chrono::duration_cast<std::chrono::nanoseconds>(time).count(), std::memory_order_relaxed);
  if (!logging(LogLevel::debug)) return;
  std::string text = "waited " + in_time_units(std::chrono::duration<double>(time).count());
  if (peer >= 0) text += " for rank " + std::to_string(peer);
  log(LogLevel::debug, source_, text);
}

void CallLog::failed(ErrorKind kind, const std::string& message) const noexcept {
  if (!logging(LogLevel::warning)) return;
  log(LogLevel::warning, source_, in_words([&] { return std::string(name(kind)) + ": " + message; }));
}

PastCall CallLog::read(uint64_t at) const noexcept {
  const auto load = [](const auto& field) { return field.load(std::memory_order_acquire); };
  const Record& record = records_[at % kRecords];
  const uint64_t progress = load(record.progress);
  PastCall past{.call = call_of({load(record.signature), load(record.count)})};
  past.call.sequence = load(record.sequence);
  past.segments = progress >> kSegments;
  past.chosen = past.segments > 0 ? load(record.chosen) : nullptr;
  past.in_place = (progress & kInPlace) != 0;
  past.done = (progress & kDone) != 0;
  past.seconds = load(record.timed) == at + 1 ? static_cast<double>(load(record.took)) * 1e-9 : 0;
  return past;
}

std::vector<PastCall> CallLog::calls() const {
  std::vector<PastCall> calls;
  const uint64_t end = made();
  for (uint64_t at = end - std::min<uint64_t>(end, kKept); at < end; ++at) {
    const PastCall past = read(at);
    if (made() < at + kRecords) calls.push_back(past);  // otherwise a newer call may have overwritten it
  }
  return calls;
}

std::string CallLog::with_last_calls(ErrorKind kind, const std::string& message) const {
  if (kind != ErrorKind::timeout && kind != ErrorKind::peer_lost) return message;
  const std::vector<PastCall> all = calls();
  std::string text;
  size_t runs = 0;
  for (auto last = all.rbegin(); last != all.rend() && runs < kRunsInMessage; ++runs) {
    const auto end = std::find_if_not(last, all.rend(), [&](const PastCall& past) { return alike(past, *last); });
    const uint64_t to = last->call.sequence, from = std::prev(end)->call.sequence;
    text += text.empty() ? "; last calls: " : "; ";
    text += '#';
    if (from != to) text += std::to_string(from) + "..#";
    text += std::to_string(to) + " " + name(last->call.collective) + " " + arguments(last->call);
    text += last->done ? " done" : " unfinished";
    last = end;
  }
  return message + text;
}

}  // namespace ringlet
