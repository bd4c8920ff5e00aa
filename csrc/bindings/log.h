// A group's last calls as Python data. Needs the GIL.
#pragma once

#include <pybind11/pybind11.h>

namespace ringlet {

class Communicator;

/// The oldest first; ringlet.Group.calls tells what is in them.
pybind11::list past_calls(const Communicator& group);

}  // namespace ringlet
