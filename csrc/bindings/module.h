// What each file of bindings/ adds to the extension module.
#pragma once

#include <pybind11/pybind11.h>

namespace ringlet {

void bind_errors(pybind11::module_& m);       // errors.cc: C++ errors as Python's
void bind_interrupts(pybind11::module_& m);   // interrupts.cc: signals in waits
void bind_schedule(pybind11::module_& m);     // schedule.cc: schedules as data
void bind_authored(pybind11::module_& m);     // authored.cc: algorithms that Python adds
void bind_group(pybind11::module_& m);        // group.cc: communicators, memory
void bind_collectives(pybind11::module_& m);  // collectives.cc: the calls themselves
void bind_c10d(pybind11::module_& m);         // c10d_module.cc: torch.distributed
void bind_gradients(pybind11::module_& m);    // gradient_arrivals.cc: the gradient reducer's hooks
void bind_doctor(pybind11::module_& m);       // doctor.cc: what was built and what works here
void bind_log(pybind11::module_& m);          // log.cc: the log, the last calls
void bind_selector(pybind11::module_& m);     // selector.cc: what `auto` means

}  // namespace ringlet
