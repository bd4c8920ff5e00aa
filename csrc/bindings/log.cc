// The log as Python sees it, and the last calls.
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
  m.def("configure_log", &configure_log, "Takes RINGLET_LOG and RINGLET_LOG_FILE from the environment.");
  m.def(
      "logs", [](const std::string& level) { return logging(level_of(level)); }, py::arg("level"),
      "Whether events of that level are logged.");
  m.def(
      "log",
      [](const std::string& level, const std::string& text, int rank, int world, std::string group) {
        log(level_of(level), {rank, world, std::move(group)}, text);
      },
      py::arg("level"), py::arg("text"), py::arg("rank"), py::arg("world"), py::arg("group"));
}

}  // namespace ringlet
