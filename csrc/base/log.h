// The log: one line an event, which begins with the rank. RINGLET_LOG is warning, info or debug; by default it is off.
//
// Contract: a caller asks logging(level) first, which costs one load and one branch, and makes no text if the answer is
// no. Each line goes to standard error (or RINGLET_LOG_FILE) by one write(2), without Python's lock.
// Thread safety: all calls from any thread, and in a forked child.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace ringlet {

enum class LogLevel : int { off, warning, info, debug };

/// "off", "warning", "info" or "debug", in small letters or capitals.
std::optional<LogLevel> parse_log_level(std::string_view text) noexcept;

extern std::atomic<int> log_level;

inline bool logging(LogLevel level) noexcept {
  return log_level.load(std::memory_order_relaxed) >= static_cast<int>(level);
}

/// The rank and group of an event. rank -1: the process, in no group.
struct LogSource {
  int rank = -1;
  int world = 0;
  std::string group{};
};

/// Logs one event. Line breaks in `text` become spaces. The event is lost if there is no memory.
void log(LogLevel level, const LogSource& source, std::string_view text) noexcept;

/// Reads RINGLET_LOG and RINGLET_LOG_FILE. Throws InvalidUsage if RINGLET_LOG is not a level, ResourceError if the file
/// cannot be written.
void configure_log();

/// "4 B", "1.5 KiB", "64 MiB".
std::string in_binary_units(uint64_t bytes);
/// "4.2 us", "1.5 ms", "2.0 s".
std::string in_time_units(double seconds);

}  // namespace ringlet
