// How a group ends that Python let go of, from whatever thread.
#pragma once

#include <Python.h>

#include "comm/communicator.h"

namespace ringlet {

/// A deleter. A group's end joins its threads, which may be waiting for the GIL to let tensors go.
struct GroupEnd {
  void operator()(Communicator* group) const noexcept {
    PyThreadState* held = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    Communicator::dispose(group);
    if (held != nullptr) PyEval_RestoreThread(held);
  }
};

}  // namespace ringlet
