// What happens, told in lines, rank first: RINGLET_LOG=warning, info or debug; nothing by default.
//
// Contract: whoever has something to tell asks logging(level) first: one load and one branch, and no text is made when
// nobody listens. Two listeners, each with its own level: standard error (or RINGLET_LOG_FILE), which gets a line by
// one write(2), and a queue that Python's logging reads. No caller ever waits for a listener or needs Python's lock:
// the queue has a bound and counts what it drops.
// Thread safety: all calls from any thread. A forked child writes lines, and leaves its parent's queue alone.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ringlet {

enum class LogLevel : int { off, warning, info, debug };

/// "off", "warning", "info" or "debug", in small letters or capitals.
std::optional<LogLevel> parse_log_level(std::string_view text) noexcept;

extern std::atomic<int> log_level;  ///< the listeners' highest

inline bool logging(LogLevel level) noexcept {
  return log_level.load(std::memory_order_relaxed) >= static_cast<int>(level);
}

/// Which rank of which group tells it. rank -1: the process, of no group.
struct LogSource {
  int rank = -1;
  int world = 0;
  std::string group{};
};

/// One event, one line: line breaks in `text` become spaces. Loses it if there is no memory.
void log(LogLevel level, const LogSource& source, std::string_view text) noexcept;

/// Takes RINGLET_LOG and RINGLET_LOG_FILE from the environment, and the level of the queue. Throws InvalidUsage for a
/// level that is none, SystemError for a file that cannot be written.
void configure_log(LogLevel queue);

struct LogEvent {
  LogLevel level;
  double time;  ///< seconds since 1970
  LogSource source;
  std::string text;
};
/// What is in the queue, after a wait of at most `patience` for the first event.
std::vector<LogEvent> take_log_events(std::chrono::milliseconds patience);
/// Ends such waits, now and later.
void end_log_queue() noexcept;

/// "4 B", "1.5 KiB", "64 MiB".
std::string in_binary_units(uint64_t bytes);
/// "4.2 us", "1.5 ms", "2.0 s".
std::string in_time_units(double seconds);

}  // namespace ringlet
