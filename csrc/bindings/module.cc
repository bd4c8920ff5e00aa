// The extension's table of contents: each file of bindings/ adds its own names.
#include "bindings/module.h"

PYBIND11_MODULE(_C, m) {
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
  ringlet::bind_limit(m);
  ringlet::bind_log(m);
}
