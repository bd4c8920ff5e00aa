// Ends a group when Python drops its last reference, on any thread.
#pragma once

#include <Python.h>

#include "bindings/gil.h"
#include "comm/communicator.h"

namespace ringlet {

/// A deleter that releases the GIL: the group's threads, which it joins, may wait for the GIL to release tensors.
struct GroupEnd {
  void operator()(Communicator* group) const noexcept {
    PyThreadState* held = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    Communicator::dispose(group);
    if (held != nullptr) take_gil_back(held);
  }
};

}  // namespace ringlet
