#include "bindings/authored.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/arguments.h"
#include "bindings/gil.h"
#include "bindings/module.h"
#include "engine/authored.h"
#include "schedule/relabel.h"
#include "schedule/topology.h"

namespace py = pybind11;

namespace ringlet {
namespace {

/// The last name that a call of a collective gave. Python interns literals: the same name is mostly the same object.
struct LookedUp {
  py::object text;
  const Algorithm* newest;
  const Algorithm* found;
};
// Guarded by the GIL. Never destroyed, because the interpreter ends before this library.
auto& looked_up = *new std::array<LookedUp, kCollectives>;

PyObject* agreement = nullptr;  // Python's (ringlet/agreement.py): takes the group's handle, index_of() and the root

void agree(Communicator& group, const Algorithm& algorithm, int root) {
  if (group.has_agreed_on(algorithm, root)) return;
  {
    const GilTaken locked;
    if (agreement == nullptr) throw InvalidUsage("ringlet is not imported: import ringlet before the first call");
    const py::handle agree_in_python(agreement);
    agree_in_python(py::cast(&group, py::return_value_policy::reference), index_of(algorithm), root);
  }
  group.note_agreed(algorithm, root);
}

const Algorithm& checked_index(int index) {
  const Algorithm* found = authored_at(index);
  if (found == nullptr) throw InvalidUsage("no added algorithm has the number " + std::to_string(index));
  return *found;
}

/// [rounds, steps of each round ..., verb, peer, first, count of each step ...] as 32-bit integers.
Schedule unpacked(int parts, const std::string& bytes) {
  std::vector<int32_t> words(bytes.size() / sizeof(int32_t));
  std::memcpy(words.data(), bytes.data(), words.size() * sizeof(int32_t));
  size_t at = 0;
  const auto next = [&] {
    return at < words.size() ? words[at++] : throw InvalidUsage("a packed schedule ends too early");
  };
  std::vector<int32_t> steps(static_cast<size_t>(next()));
  for (int32_t& count : steps) count = next();
  Schedule schedule(parts);
  for (const int32_t count : steps) {
    Round& round = schedule.round();
    for (int32_t i = 0; i < count; ++i) {
      const auto verb = static_cast<Verb>(next());
      const int32_t peer = next(), first = next(), chunks = next();
      round.steps.push_back({verb, peer, first, chunks});
    }
  }
  return schedule;
}

std::string packed(const Schedule& schedule) {
  std::vector<int32_t> words{static_cast<int32_t>(schedule.rounds.size())};
  for (const Round& round : schedule.rounds) words.push_back(static_cast<int32_t>(round.steps.size()));
  for (const Round& round : schedule.rounds) {
    for (const Step& s : round.steps)
      words.insert(words.end(), {static_cast<int32_t>(s.verb), s.peer, s.first, s.count});
  }
  return {reinterpret_cast<const char*>(words.data()), words.size() * sizeof(int32_t)};
}

void hand_over_packed(int index, int root, const std::vector<int>& hosts, int parts,
                      const std::vector<py::bytes>& ranks) {
  std::vector<Schedule> schedules;
  for (const py::bytes& rank : ranks) schedules.push_back(unpacked(parts, rank));
  hand_over(checked_index(index), {static_cast<int>(ranks.size()), root, hosts}, std::move(schedules));
}

/// Turns schedules of positions, by position, into schedules of ranks, by rank.
std::vector<py::bytes> relabelled_packed(const std::string& collective, int parts,
                                         const std::vector<py::bytes>& positions, const std::vector<int>& rank_at) {
  Numbering numbering{rank_at, std::vector<int>(rank_at.size()), false};
  for (size_t p = 0; p < rank_at.size(); ++p)
    numbering.position_of.at(static_cast<size_t>(rank_at[p])) = static_cast<int>(p);
  const Collective which = checked_collective(collective);
  std::vector<py::bytes> ranks;
  for (size_t r = 0; r < rank_at.size(); ++r) {
    const py::bytes& of_position = positions.at(static_cast<size_t>(numbering.position_of[r]));
    ranks.emplace_back(packed(relabelled(unpacked(parts, of_position), which, numbering)));
  }
  return ranks;
}

}  // namespace

const Algorithm* algorithm_of(PyObject* given, Collective collective) {
  const auto by_name = [&] { return named_algorithm(collective, text_of(given, name(collective), "algorithm")); };
  if (PyUnicode_Check(given)) [[likely]] {
    LookedUp& last = looked_up.at(static_cast<size_t>(collective));
    if (last.text.ptr() != given || last.newest != newest_authored()) [[unlikely]] {
      const Algorithm* found = by_name();
      last = {py::reinterpret_borrow<py::object>(given), newest_authored(), found};
    }
    return last.found;
  }
  const py::object index = py::getattr(given, "slot", py::none());
  if (!PyLong_Check(index.ptr())) return by_name();  // by_name() refuses an object that is not a string
  const Algorithm& found = checked_index(index.cast<int>());
  if (found.collective == collective) return &found;
  throw InvalidUsage(std::string(name(collective)) + ": algorithm must be one of " + name(collective) + ", got \"" +
                     found.name + "\" of " + name(found.collective));
}

void agree_on(Communicator& group, const Call& call) {
  if (call.algorithm != nullptr) return agree(group, *call.algorithm, call.root);
  for (const Algorithm* named : group.selector().authored(call.collective, group.world(), group.topology()))
    agree(group, *named, call.root);
}

void bind_authored(py::module_& m) {
  m.def(
      "add_algorithm",
      [](const std::string& collective, const std::string& name, const std::string& summary) {
        return index_of(add_algorithm(checked_collective(collective), name, summary));
      },
      py::arg("collective"), py::arg("name"), py::arg("summary"),
      "Gives the algorithm a number in this process. InvalidUsage for a built-in algorithm's name.");
  m.def("hand_over", &hand_over_packed, py::arg("index"), py::arg("root"), py::arg("hosts"), py::arg("parts"),
        py::arg("ranks"), "Hands over all ranks' schedules for a place, packed as ringlet.schedule.packed packs them.");
  m.def("relabelled", &relabelled_packed, py::arg("collective"), py::arg("parts"), py::arg("positions"),
        py::arg("rank_at"), "Packed schedules of positions as those of the ranks that stand there.");
  m.def("set_agreement", [](py::object function) { agreement = function.release().ptr(); });
}

}  // namespace ringlet
