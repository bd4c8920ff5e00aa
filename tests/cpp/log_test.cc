// The log: its lines, its files, and threads that log while it is set up anew.
#include "base/log.h"

#include <unistd.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "engine/call_log.h"
#include "log_place.h"

using namespace ringlet;
using std::chrono::milliseconds;

namespace {

[[maybe_unused]] const int time_zone = ::setenv("TZ", "UTC", 1);

TEST(levels_are_read) {
  CHECK(parse_log_level("DEBUG") == LogLevel::debug);
  CHECK(parse_log_level("Warning") == LogLevel::warning);
  CHECK(!parse_log_level("loud"));
  CHECK(!parse_log_level(""));
  LogPlace place;
  place.set("loud", "");
  CHECK_HAS(CHECK_THROWS(InvalidUsage, configure_log()),
            "RINGLET_LOG=\"loud\" is not one of off, warning, info, debug");
  place.set("info", "");
  configure_log();
  CHECK(logging(LogLevel::info));
  CHECK(!logging(LogLevel::debug));
  place.set(nullptr, "");
  configure_log();
  CHECK(!logging(LogLevel::warning));
}

TEST(a_line_says_who_and_when) {
  LogPlace place;
  ::setenv("RINGLET_HOST_ID", "here", 1);
  place.set("info", place.file("%h-%p-%x.log"));
  configure_log();
  log(LogLevel::info, {2, 4, "workers"}, "two\nlines");
  log(LogLevel::warning, {}, "of no group");
  log(LogLevel::debug, {2, 4, ""}, "not wanted");
  const std::string self = std::to_string(::getpid());
  const std::string text = place.text("here-" + self + "-%x.log");
  CHECK(text.starts_with("ringlet: [rank 2/4 here:" + self + " workers] "));
  CHECK_HAS(text, " info: two lines\n", "ringlet: [here:" + self + "] ", " warning: of no group\n");
  CHECK(text.find("not wanted") == text.npos);
  ::unsetenv("RINGLET_HOST_ID");
}

TEST(lines_go_to_the_file_that_was_named_last) {
  LogPlace place;
  for (const char* name : {"first", "second", "second"}) {
    place.set("warning", place.file(name));
    configure_log();
    log(LogLevel::warning, {}, std::string("to ") + name);
  }
  place.set("warning", place.file("no folder/log"));
  CHECK_HAS(CHECK_THROWS(ResourceError, configure_log()), "RINGLET_LOG_FILE=");
  log(LogLevel::warning, {}, "still there");
  const std::string first = place.text("first"), second = place.text("second");
  CHECK(first.ends_with("to first\n"));
  CHECK_HAS(second, "to second", "still there");
}

TEST(threads_log_while_it_is_set_up_anew) {
  constexpr int kThreads = 3, kEvents = 500;
  LogPlace place;
  place.begin("info", "even");
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kThreads; ++rank) {
    threads.emplace_back([rank] {
      for (int i = 0; i < kEvents; ++i) log(LogLevel::info, {rank, kThreads, ""}, "event " + std::to_string(i));
    });
  }
  for (int i = 0; i < 50; ++i) place.begin(i % 3 == 0 ? "debug" : "info", i % 2 == 0 ? "odd" : "even");
  for (std::thread& thread : threads) thread.join();
  const std::string text = place.text("even") + place.text("odd");
  CHECK_EQ(std::count(text.begin(), text.end(), '\n'), kThreads * kEvents);
}

TEST(calls_are_logged_and_named_in_errors) {
  LogPlace place;
  place.begin("debug", "calls");
  CallLog calls;
  calls.set_source({0, 2, "g"});
  const Algorithm* ring = find_algorithm(Collective::all_reduce, "ring");
  Call call{.collective = Collective::all_reduce, .dtype = DType::float32, .count = 1000};
  const CallSignature signature = call_signature(call);
  for (uint64_t i = 0; i < 3; ++i) {
    calls.begin(signature, i);
    calls.tell(call, {ring, "staged", 1, 4000, 4000}, Selector(), {Collective::all_reduce, 4000, 2, false});
    calls.chosen(*ring, false, 1);
    calls.end();
  }
  call.count = 7;
  calls.begin(call_signature(call), 3);
  calls.waited(1, milliseconds(2));
  calls.failed(ErrorKind::timeout, "too late");
  const std::string said = calls.with_last_calls(ErrorKind::timeout, "too late");
  CHECK_HAS(said, "too late; last calls: #3 all_reduce (auto, sum, float32, 7 elements) unfinished; #0..#2 all_reduce");
  CHECK_EQ(calls.with_last_calls(ErrorKind::invalid_usage, "wrong"), std::string("wrong"));
  CHECK_EQ(calls.calls().size(), 4u);
  CHECK(calls.waited_seconds() > 0.0019);
  const std::string text = place.text("calls");
  CHECK_HAS(text, "all_reduce #0 (auto, sum, float32, 1000 elements) begins\n",
            "all_reduce of 3.9 KiB: ring (the built-in rules: all_reduce ", "staged, 1 segment\n",
            ": 3.9 KiB, ring, 1 segment\n", "waited 2.0 ms for rank 1\n", "Timeout: too late\n");
  for (uint64_t i = 4; i < 100; ++i) calls.begin(signature, i);
  CHECK_EQ(calls.calls().size(), CallLog::kKept);
  CHECK_EQ(calls.calls().front().call.sequence, 100 - CallLog::kKept);
}

TEST(sizes_and_times_have_units) {
  CHECK_EQ(in_binary_units(4), std::string("4 B"));
  CHECK_EQ(in_binary_units(1536), std::string("1.5 KiB"));
  CHECK_EQ(in_binary_units(uint64_t{64} << 20), std::string("64 MiB"));
  CHECK_EQ(in_binary_units(uint64_t{4096} << 40), std::string("4096 TiB"));
  CHECK_EQ(in_time_units(4.2e-6), std::string("4.2 us"));
  CHECK_EQ(in_time_units(1.5e-3), std::string("1.5 ms"));
  CHECK_EQ(in_time_units(2), std::string("2.0 s"));
}

}  // namespace
