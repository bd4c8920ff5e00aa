// What `auto` means, as plain Python data: for `ringlet tune` and the tests.
#include "engine/selector.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "base/error.h"
#include "base/processor.h"
#include "bindings/arguments.h"
#include "bindings/module.h"
#include "engine/given_table.h"
#include "engine/message/message_engine.h"
#include "gpu/gpu_executors.h"

namespace py = pybind11;

namespace ringlet {
namespace {

py::tuple given() {
  const GivenTable table = given_table();
  if (!table.problem.empty()) throw InvalidUsage(table.problem);
  Selector(table.text, table.origin);  // refuses one that groups would refuse
  return py::make_tuple(table.origin, table.text);
}

std::string chosen(const std::string& collective, size_t bytes, int world, const std::string& medium,
                   const std::string& table) {
  Situation situation{checked_collective(collective),
                      bytes,
                      world,
                      medium == "registered",
                      medium == "apart" || medium == "hosts",
                      medium == "hosts"};
  const Selector selector(table, "the table");
  if (medium == "gpus") {
    const bool usual = bytes <= GpuExecutors::kPeerBytes || situation.collective == Collective::all_to_all;
    const Way way = selector.way_for(situation.collective, bytes, world).value_or(usual ? Way::peers : Way::nccl);
    return way == Way::peers ? "peers" : "nccl";
  }
  if (medium == "peers") situation.way = Way::peers;
  if (medium == "nccl") situation.way = Way::nccl;
  return selector.choose(situation).name;
}

}  // namespace

void bind_selector(py::module_& m) {
  m.def("built_in_rules", &built_in_rules, "The built-in rules, as text.");
  m.def("table_file", [] { return given_table().origin; }, "Where that table is, or would be.");
  m.def(
      "table_warning", [] { return given_table().warning; },
      "Why the table of the usual place is not used, for which no group fails; empty where nothing is wrong.");
  m.def("given_table", &given,
        "(file, text) of the table that this process's user gives, text empty where there is none; InvalidUsage where "
        "it cannot be read.");
  m.def("chosen", &chosen, py::arg("collective"), py::arg("bytes"), py::arg("world"), py::arg("medium"),
        py::arg("table") = "",
        "What `auto` means with that table: the algorithm's name. medium: registered, staged, hosts, apart, peers or "
        "nccl; gpus: which way calls go, peers or nccl.");
  m.def(
      "tuned",
      [](const std::string& table, const std::string& processor) {
        const Tuning tuning = parse_table(table, "the table", processor).tuning;
        py::dict found;
        for (const auto& [name, member] : kTuned) found[py::str(std::string(name))] = tuning.*member;
        return found;
      },
      py::arg("table"), py::arg("processor"), "The sizes of the pull engine with that table on that processor.");
  m.def("processor_model", &processor_model, "This processor, as a table names it.");
  m.def("message_segments", &MessageEngine::segments_of, py::arg("bytes"),
        "Into how many segments a message of so many bytes is cut where some ranks reach each other over a network "
        "only.");
}

}  // namespace ringlet
