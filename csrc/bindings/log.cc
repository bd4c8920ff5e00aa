// The log as Python sees it: its levels, events for Python's logging, and the last calls.
#include "bindings/log.h"

#include <pybind11/stl.h>

#include "base/error.h"
#include "base/log.h"
#include "bindings/module.h"
#include "comm/communicator.h"

namespace py = pybind11;

namespace ringlet {
namespace {

LogLevel level_of(const std::string& text) {
  if (const auto level = parse_log_level(text)) return *level;
  throw InvalidUsage("log level must be one of off, warning, info, debug, got \"" + text + "\"");
}

const char* name(LogLevel level) {
  constexpr const char* kNames[] = {"off", "warning", "info", "debug"};
  return kNames[static_cast<size_t>(level)];
}

py::list take_events(double patience) {
  std::vector<LogEvent> events;
  {
    const py::gil_scoped_release unlocked;
    events = take_log_events(std::chrono::milliseconds(static_cast<int64_t>(patience * 1000)));
  }
  py::list list;
  for (const LogEvent& event : events) {
    const LogSource& source = event.source;
    list.append(py::make_tuple(name(event.level), event.time, source.rank, source.world, source.group, event.text));
  }
  return list;
}

}  // namespace

py::list past_calls(const Communicator& group) {
  py::list list;
  for (const PastCall& past : group.calls().calls()) {
    const Call& call = past.call;
    const bool data = call.collective != Collective::barrier;
    py::dict one(py::arg("sequence") = call.sequence, py::arg("collective") = name(call.collective));
    one["op"] = is_reduction(call.collective) ? py::cast(name(call.op)) : py::none();
    one["dtype"] = data ? py::cast(name(call.dtype)) : py::none();
    one["count"] = call.count;
    one["root"] = has_root(call.collective) ? py::cast(call.root) : py::none();
    one["named"] = call.algorithm != nullptr ? py::cast(call.algorithm->name) : py::none();
    one["algorithm"] = past.chosen != nullptr ? py::cast(past.chosen->name) : py::none();
    one["in_place"] = past.in_place;
    one["segments"] = past.segments;
    one["done"] = past.done;
    one["seconds"] = past.seconds > 0 ? py::cast(past.seconds) : py::none();
    list.append(one);
  }
  return list;
}

void bind_log(py::module_& m) {
  m.def(
      "configure_log", [](const std::string& level) { configure_log(level_of(level)); }, py::arg("queue"),
      "Takes RINGLET_LOG and RINGLET_LOG_FILE from the environment, and the level of the queue for Python's logging.");
  m.def(
      "logs", [](const std::string& level) { return logging(level_of(level)); }, py::arg("level"),
      "Whether anybody listens to events of that level.");
  m.def(
      "log",
      [](const std::string& level, const std::string& text, int rank, int world, std::string group) {
        log(level_of(level), {rank, world, std::move(group)}, text);
      },
      py::arg("level"), py::arg("text"), py::arg("rank"), py::arg("world"), py::arg("group"));
  m.def("take_log_events", &take_events, py::arg("patience"),
        "Events of the queue as (level, seconds since 1970, rank, world, group, text), after a wait of so many seconds "
        "for the first.");
  m.def("end_log_queue", &end_log_queue);
}

}  // namespace ringlet
