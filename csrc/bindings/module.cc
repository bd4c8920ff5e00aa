// The extension's table of contents: each file of bindings/ adds its own names.
#include "bindings/module.h"

#include <string>

#include "bindings/torch_version.h"

namespace ringlet {
namespace {

// Classes of another torch have other virtual functions: nothing may be made of them.
void refuse_another_torch() {
  const std::string built = std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR);
  const auto here = pybind11::module_::import("torch").attr("__version__").cast<std::string>();
  if (!here.starts_with(built + ".")) throw pybind11::import_error("it was built for torch " + built);
}

}  // namespace
}  // namespace ringlet

PYBIND11_MODULE(_C, m) {
  ringlet::refuse_another_torch();
  m.doc() = "ringlet's core; use the names of the package `ringlet`";
  ringlet::bind_errors(m);
  ringlet::bind_interrupts(m);
  ringlet::bind_schedule(m);
  ringlet::bind_authored(m);
  ringlet::bind_group(m);
  ringlet::bind_collectives(m);
  ringlet::bind_c10d(m);
  ringlet::bind_gradients(m);
  ringlet::bind_doctor(m);
  ringlet::bind_selector(m);
  ringlet::bind_log(m);
}
