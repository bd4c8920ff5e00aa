// Schedules as plain Python data: what the prover, the cost model, the drawings and the tests read.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/module.h"
#include "schedule/registry.h"
#include "schedule/topology.h"

namespace py = pybind11;

namespace ringlet {
namespace {

constexpr int kMaxWorld = 1 << 16;

py::str verb_name(Verb verb) {
  static constexpr const char* kNames[] = {"send", "recv", "reduce", "copy"};
  return kNames[static_cast<int>(verb)];
}

py::tuple pair(Chunks chunks) { return py::make_tuple(chunks.first, chunks.count); }

const Algorithm& checked_algorithm(const std::string& algorithm, const std::string& collective) {
  const Collective which = checked_collective(collective);
  const Algorithm* found = find_algorithm(which, algorithm);
  if (!found) {
    throw InvalidUsage(collective + ": algorithm must be one of " + algorithm_names(which) + ", got \"" + algorithm +
                       '"');
  }
  return *found;
}

void check_place(const Algorithm& algorithm, int world, int root) {
  if (world < 1 || world > kMaxWorld) {
    throw InvalidUsage("world must be from 1 to " + std::to_string(kMaxWorld) + ", got " + std::to_string(world));
  }
  check_root(algorithm.collective, root, world);
  if (root != 0 && !has_root(algorithm.collective)) {
    throw InvalidUsage(std::string(name(algorithm.collective)) + " has no root: root must be 0, got " +
                       std::to_string(root));
  }
}

py::list rounds_of(const Schedule& schedule) {
  py::list rounds;
  for (const Round& round : schedule.rounds) {
    py::list steps;
    for (const Step& s : round.steps) steps.append(py::make_tuple(verb_name(s.verb), s.peer, s.first, s.count));
    rounds.append(steps);
  }
  return rounds;
}

Topology checked_topology(const std::optional<std::vector<int>>& hosts, int world) {
  if (hosts && hosts->size() != static_cast<size_t>(world)) {
    throw InvalidUsage("hosts must name the host of each of " + std::to_string(world) + " ranks, got " +
                       std::to_string(hosts->size()) + " hosts");
  }
  return Topology(hosts ? *hosts : std::vector<int>(world, 0));
}

py::dict schedule_of_all_ranks(const std::string& algorithm, const std::string& collective, int world, int root,
                               const std::optional<std::vector<int>>& hosts) {
  const Algorithm& found = checked_algorithm(algorithm, collective);
  check_place(found, world, root);
  const Topology topology = checked_topology(hosts, world);
  py::list ranks, inputs, outputs;
  int parts = 0;
  for (int rank = 0; rank < world; ++rank) {
    const RankInfo info{rank, world, root, &topology};
    const Schedule schedule = schedule_of(found, info);
    parts = schedule.parts;
    ranks.append(rounds_of(schedule));
    inputs.append(pair(input_chunks(found.collective, info, parts)));
    outputs.append(pair(output_chunks(found.collective, info, parts)));
  }
  py::dict result;
  result["parts"] = parts;
  result["ranks"] = ranks;
  result["inputs"] = inputs;
  result["outputs"] = outputs;
  return result;
}

py::list list_algorithms() {
  py::list rows;
  for (const Algorithm& a : algorithms()) rows.append(py::make_tuple(a.name, name(a.collective), a.summary));
  return rows;
}

py::tuple orders(const std::vector<int>& hosts) {
  if (hosts.empty()) throw InvalidUsage("hosts must name the host of at least one rank, got none");
  const Topology topology(hosts);
  return py::make_tuple(topology.along().rank_at, topology.across().rank_at);
}

}  // namespace

void bind_schedule(py::module_& m) {
  m.def("algorithms", &list_algorithms, "[(name, collective, summary), ...] in the registry's order");
  m.def("orders", &orders, py::arg("hosts"),
        "(along, across): the ranks host after host, as the ring goes round, and round robin over the hosts, as the\n"
        "circulant does. hosts[r]: any number for rank r's host.");
  m.def("schedule", &schedule_of_all_ranks, py::arg("algorithm"), py::arg("collective"), py::arg("world"),
        py::arg("root") = 0, py::arg("hosts") = py::none(),
        "dict(parts, ranks, inputs, outputs): ranks[r][round] = [(verb, peer, first, count), ...]; inputs[r] and\n"
        "outputs[r] = (first, count). hosts[r]: any number for rank r's host; None: all on one.\n"
        "ValueError for an unknown name or an impossible world, root or hosts.");
}

}  // namespace ringlet
