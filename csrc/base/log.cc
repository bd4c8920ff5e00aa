#include "base/log.h"

#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/process.h"
#include "base/system_call.h"

namespace ringlet {

std::atomic<int> log_level{0};

namespace {

constexpr std::array<std::string_view, 4> kLevels{"off", "warning", "info", "debug"};

std::atomic<int> lines_to{STDERR_FILENO};
// Of UTC. Read when the library is loaded, because localtime takes a lock that a fork can leave held.
const long seconds_east = [] {
  const time_t now = ::time(nullptr);
  tm local{};
  return ::localtime_r(&now, &local) != nullptr ? local.tm_gmtoff : 0L;
}();

struct Configuration {
  std::mutex mutex;
  std::optional<std::string> file_name{};  // of lines_to; none before this process has chosen it
};
constinit OfProcess<Configuration> configuration_of_process;

std::string environment(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr ? value : "";
}

/// RINGLET_HOST_ID replaces the host's name, as it does when ranks detect which of them share a host.
std::string host_name() {
  if (std::string given = environment("RINGLET_HOST_ID"); !given.empty()) return given;
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown";
}

/// %h: the host's name, %p: the process's number.
std::string file_from(const std::string& pattern) {
  std::string name;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char next = pattern[i] == '%' && i + 1 < pattern.size() ? pattern[i + 1] : '\0';
    if (next == 'h') name += host_name();
    if (next == 'p') name += std::to_string(this_process());
    if (next == 'h' || next == 'p') {
      ++i;
    } else {
      name += pattern[i];
    }
  }
  return name;
}

/// Lines that other threads write meanwhile may go to the old or to the new file.
void open_lines(const std::string& name, std::optional<std::string>& file_name) {
  if (name == file_name) return;
  int fd = STDERR_FILENO;
  if (!name.empty()) {
    fd = repeated([&] { return ::open(name.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644); });
    if (fd < 0) throw_errno("RINGLET_LOG_FILE=" + name);
  }
  // The threads' descriptor stays open and then refers to the new file, so no thread writes to a closed descriptor.
  if (const int before = lines_to.load(); before == STDERR_FILENO || fd == STDERR_FILENO) {
    lines_to.store(fd);
  } else {
    repeated([&] { return ::dup3(fd, before, O_CLOEXEC); });
    ::close(fd);
  }
  file_name = name;
}

std::string clock_text(const timespec& now) {
  const long day = (now.tv_sec + seconds_east) % 86400;
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%02ld:%02ld:%02ld.%06ld", day / 3600, day / 60 % 60, day % 60,
                now.tv_nsec / 1000);
  return text.data();
}

std::string line_of(LogLevel level, const LogSource& source, std::string_view text, const timespec& now) {
  std::string line = "ringlet: [";
  if (source.rank >= 0) line += "rank " + std::to_string(source.rank) + "/" + std::to_string(source.world) + " ";
  line += host_name() + ":" + std::to_string(this_process());
  if (!source.group.empty()) line += " " + source.group;
  line += "] " + clock_text(now) + " " + std::string(kLevels[static_cast<size_t>(level)]) + ": ";
  line += text;
  std::replace(line.begin(), line.end(), '\n', ' ');
  return line + '\n';
}

void write_line(const std::string& line) noexcept {
  repeated([&] { return ::write(lines_to.load(std::memory_order_relaxed), line.data(), line.size()); });
}

}  // namespace

std::optional<LogLevel> parse_log_level(std::string_view text) noexcept {
  const auto same = [](char a, char b) { return (a >= 'A' && a <= 'Z' ? a - 'A' + 'a' : a) == b; };
  for (size_t i = 0; i < kLevels.size(); ++i) {
    if (std::equal(text.begin(), text.end(), kLevels[i].begin(), kLevels[i].end(), same)) return LogLevel(i);
  }
  return std::nullopt;
}

void log(LogLevel level, const LogSource& source, std::string_view text) noexcept {
  if (!logging(level)) return;
  try {
    timespec now{};
    ::clock_gettime(CLOCK_REALTIME, &now);
    write_line(line_of(level, source, text, now));
  } catch (const std::bad_alloc&) {  // the event is lost, and the program goes on
  }
}

void configure_log() {
  Configuration& configuration = configuration_of_process.get();
  const std::lock_guard lock(configuration.mutex);
  const std::string text = environment("RINGLET_LOG");
  const std::optional<LogLevel> level = text.empty() ? LogLevel::off : parse_log_level(text);
  if (!level) throw InvalidUsage("RINGLET_LOG=\"" + text + "\" is not one of off, warning, info, debug");
  open_lines(*level == LogLevel::off ? "" : file_from(environment("RINGLET_LOG_FILE")), configuration.file_name);
  log_level.store(static_cast<int>(*level));
}

std::string in_binary_units(uint64_t bytes) {
  constexpr std::array<const char*, 5> kUnits{"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  double size = static_cast<double>(bytes);
  for (; size >= 1024 && unit + 1 < kUnits.size(); ++unit) size /= 1024;
  std::array<char, 32> text{};
  const bool whole = size == static_cast<double>(static_cast<uint64_t>(size));
  std::snprintf(text.data(), text.size(), whole ? "%.0f %s" : "%.1f %s", size, kUnits[unit]);
  return text.data();
}

std::string in_time_units(double seconds) {
  std::array<char, 32> text{};
  const double us = seconds * 1e6;
  const auto [value, unit] = us < 1e3   ? std::pair(us, "us")
                             : us < 1e6 ? std::pair(us / 1e3, "ms")
                                        : std::pair(seconds, "s");
  std::snprintf(text.data(), text.size(), "%.1f %s", value, unit);
  return text.data();
}

}  // namespace ringlet
