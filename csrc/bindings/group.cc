// Groups, registered memory, work handles.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "base/error.h"
#include "bindings/arguments.h"
#include "bindings/gil.h"
#include "bindings/group_end.h"
#include "bindings/log.h"
#include "bindings/module.h"
#include "bindings/on_device.h"
#include "bindings/tensors.h"
#include "bindings/torch_store.h"
#include "comm/communicator.h"
#include "comm/group_init.h"
#include "engine/given_table.h"
#include "engine/pull/pull_engine.h"
#include "engine/selector.h"
#include "memory/heap.h"
#include "reduce/level.h"
#include "reduce/reduce.h"
#include "schedule/topology.h"
#include "transport/in_process.h"

namespace py = pybind11;

namespace ringlet {
namespace {

using std::chrono::milliseconds;

void check_place(int rank, int world) {
  if (world < 1 || rank < 0 || rank >= world) {
    throw InvalidUsage("rank " + std::to_string(rank) + " of world " + std::to_string(world) + " does not exist");
  }
}

/// Without a limit for None.
milliseconds wait_limit(const py::object& timeout) {
  return timeout_of(timeout.ptr(), /*may_be_zero=*/true).value_or(kLongestTimeout);
}

std::shared_ptr<Communicator> own(std::unique_ptr<Engine> engine, milliseconds timeout) {
  return {new Communicator(std::move(engine), timeout), GroupEnd{}};
}

std::shared_ptr<Communicator> make_joined(const c10::intrusive_ptr<c10d::Store>& store, const std::string& name,
                                          int rank, int world, milliseconds timeout, const std::string& transport) {
  check_place(rank, world);
  const Carrier carrier = parse_carrier(transport);
  return own(join(store, name, {rank, world}, carrier, timeout), timeout);
}

std::shared_ptr<Communicator> make_threads(const std::string& name, int rank, int world, milliseconds timeout) {
  check_place(rank, world);
  check_cpu_kernels();
  const GivenTable table = given_table();
  if (!table.problem.empty()) throw InvalidUsage(table.problem);
  Selector selector(table.text, table.origin);
  auto transport = join_threads(name, rank, world, Deadline::after(timeout));
  auto engine = std::make_unique<PullEngine>(std::move(transport), std::move(selector));
  engine->calls().set_source({rank, world, name});
  return own(std::move(engine), timeout);
}

std::string algorithm_for(const Communicator& group, const std::string& collective, size_t nbytes, bool registered) {
  return group.algorithm_for(checked_collective(collective), nbytes, registered).name;
}

/// The hosts that schedules are made for: every rank's host, or one host for all.
std::vector<int> schedule_hosts(const Communicator& group) {
  std::vector<int> hosts(static_cast<size_t>(group.world()), 0);
  if (const Topology* topology = group.topology()) {
    for (int rank = 0; rank < group.world(); ++rank) hosts[static_cast<size_t>(rank)] = topology->host(rank);
  }
  return hosts;
}

void bind_work(py::module_& m) {
  py::class_<Work, std::shared_ptr<Work>>(m, "Work", "Handle of an asynchronous call.")
      .def("is_completed", &Work::test, py::call_guard<GilReleased>(),
           "Whether the call is complete (well or not). Carries it on meanwhile, as far as it goes without a wait.")
      .def("__repr__", [](const Work& work) { return "<ringlet.Work " + work.describe() + ">"; })
      .def(
          "wait",
          [](Work& work, const py::object& timeout) {
            const milliseconds limit = wait_limit(timeout);
            const GilReleased unlocked;
            work.wait(limit);
          },
          py::arg("timeout") = py::none(),
          "Returns when the call is complete and raises its error, if any. timeout: datetime.timedelta or seconds; "
          "Timeout if it passes first (the call goes on).");
  py::class_<DeviceWork, Work, std::shared_ptr<DeviceWork>>(m, "DeviceWork",
                                                            "Handle of an asynchronous call on a GPU's tensors.")
      .def("__repr__",
           [](const DeviceWork& work) {
             return "<ringlet.DeviceWork on " + work.calls.stream.device().str() + ": " + work.calls.work->describe() +
                    ">";
           })
      .def(
          "wait",
          [](const DeviceWork& work, const py::object& timeout) {
            const milliseconds limit = wait_limit(timeout);
            const bool given = !timeout.is_none();
            const GilReleased unlocked;
            if (given) work.calls.work->wait(limit);
            work.calls.wait();
          },
          py::arg("timeout") = py::none(),
          "Lets the current stream wait for the call, and raises the call's error, if there is one already. timeout: "
          "datetime.timedelta or seconds; with one the host waits too, and Timeout is raised if it passes first.");
}

}  // namespace

void bind_group(py::module_& m) {
  py::class_<Communicator, std::shared_ptr<Communicator>>(m, "Group")
      .def_static("join", &make_joined, py::arg("store"), py::arg("name"), py::arg("rank"), py::arg("world"),
                  py::arg("timeout"), py::arg("transport"), py::call_guard<GilReleased>())
      .def_static("threads", &make_threads, py::arg("name"), py::arg("rank"), py::arg("world"), py::arg("timeout"),
                  py::call_guard<GilReleased>())
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("world", &Communicator::world)
      .def_property_readonly("transport", &Communicator::transport)
      .def_property_readonly("hosts", &Communicator::host_of_rank)
      .def_property_readonly("schedule_hosts", &schedule_hosts)
      .def("gpu_transport", &gpu_transport, py::arg("device"), py::call_guard<GilReleased>())
      .def("algorithm_for", &algorithm_for, py::arg("collective"), py::arg("nbytes"), py::arg("registered"))
      .def_property_readonly("bytes_received", &Communicator::bytes_received)
      .def_property_readonly("bytes_sent", &Communicator::bytes_sent)
      .def_property_readonly("connections", &Communicator::connections)
      .def("calls", [](const Communicator& group) { return past_calls(group); })
      .def("tell_made", &Communicator::tell_made, py::arg("seconds"))
      .def_property_readonly("sequence", &Communicator::sequence)
      .def_property_readonly("failure",
                             [](const Communicator& group) {
                               const std::optional<ErrorKind> kind = group.health().failure();
                               return kind ? std::optional<std::string>(name(*kind)) : std::nullopt;
                             })
      .def_property("max_ctas", &Communicator::max_ctas, &Communicator::set_max_ctas)
      .def_property("timeout", &Communicator::timeout, &Communicator::set_timeout)
      .def("abort", &Communicator::abort, py::arg("reason"), py::call_guard<GilReleased>())
      .def("close", &Communicator::close, py::arg("patience"), py::call_guard<GilReleased>());
  bind_work(m);

  m.def(
      "empty",
      [](const std::vector<int64_t>& sizes, py::object dtype, const c10::Device& device) {
        if (!THPDtype_Check(dtype.ptr()))
          throw InvalidUsage("empty: dtype must be a torch.dtype, got " + py::repr(dtype).cast<std::string>());
        return empty_registered(sizes, reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type, device);
      },
      py::arg("sizes"), py::arg("dtype"), py::arg("device"));
  m.def("is_registered", &is_registered);
  m.def("has_registered", &has_registered);
  m.def("heap", [] {
    const auto& heap = Heap::process();
    heap->free_unused();
    return py::dict(py::arg("bytes") = heap->bytes(), py::arg("allocated_bytes") = heap->allocated_bytes());
  });
  m.def("check_max_ctas", &check_max_ctas);
  m.def("cpu_kernels", &cpu_kernels);
}

}  // namespace ringlet
