// What `ringlet doctor` reads from the core: the build, the CPU kernels, the GPU.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include <string>
#include <vector>

#include "base/error.h"
#include "bindings/gil.h"
#include "bindings/module.h"
#include "gpu/gpu.h"
#include "gpu/nccl_api.h"
#include "reduce/level.h"
#include "transport/address.h"
#include "transport/congestion.h"

namespace py = pybind11;

namespace ringlet {
namespace {

py::dict build_info() {
  py::dict info;
  info["ringlet"] = RINGLET_VERSION;
#if defined(__clang__)
  info["compiler"] = "clang " __clang_version__;
#else
  info["compiler"] = "gcc " __VERSION__;
#endif
  info["torch"] = TORCH_VERSION;
  info["python"] = PY_VERSION;
#if defined(NDEBUG)
  info["assertions"] = false;
#else
  info["assertions"] = true;
#endif
  return info;
}

py::dict kernels() {
  py::list available;
  for (const Level* level : available_levels()) available.append(level->name);
  return py::dict(py::arg("chosen") = cpu_kernels(), py::arg("available") = available);
}

py::dict gpu() {
  GpuStatus status;
  {
    const GilReleased unlocked;  // the driver's start takes seconds
    status = gpu_status();
  }
  return py::dict(py::arg("state") = status.state, py::arg("detail") = status.detail, py::arg("advice") = status.advice,
                  py::arg("runtime_version") = status.runtime_version,
                  py::arg("driver_version") = status.driver_version, py::arg("devices") = status.devices);
}

py::dict nccl() {
  const char* state = "absent";
  std::string detail;
  try {
    const NcclApi& api = nccl_api();
    state = "ready";
    detail = "NCCL " + api.dotted() + " in " + api.path;
  } catch (const DeviceError& error) {
    detail = error.what();
  }
  return py::dict(py::arg("state") = state, py::arg("detail") = detail);
}

std::vector<std::string> addresses(const std::string& interfaces) {
  std::vector<std::string> texts;
  for (const Address& address : own_addresses(interfaces)) texts.push_back(address.text());
  return texts;
}

}  // namespace

void bind_doctor(py::module_& m) {
  m.def("build_info", &build_info, "dict(ringlet, compiler, torch, python, assertions): what this was built with");
  m.def("kernels", &kernels, "dict(chosen, available): the CPU kernels of this machine, the best first");
  m.def("host_identity", &host_identity, "The same number for processes of one host.");
  m.def("addresses", &addresses, py::arg("interfaces"),
        "Where peers reach this process, best first. interfaces: as RINGLET_INTERFACE; empty for automatic choice.");
  m.def("find_congestion_control", &find_congestion_control,
        "What RINGLET_TCP_CONGESTION and the machine ask for now. InvalidUsage where it cannot be had.");
  m.def("congestion_control", &congestion_control,
        "Of ringlet's TCP connections, by the kernel's name. Raises InvalidUsage for a wrong RINGLET_TCP_CONGESTION.");
  m.def("gpu_status", &gpu,
        "dict(state, detail, advice, runtime_version, driver_version, devices); opens the CUDA library where there is "
        "one. state: ready, not built, not loaded, no driver, no device or error.");
  m.def("nccl_status", &nccl, "dict(state, detail): the NCCL that calls on GPUs would use. state: ready or absent.");
}

}  // namespace ringlet
