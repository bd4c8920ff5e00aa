// Algorithms that Python adds: before the first call with one, all ranks of the group agree on its schedules.
//
// Contract: if the group has not agreed yet, agree_on_added() is a collective, which all ranks enter in the same call.
// It throws InvalidUsage on all ranks if an algorithm is wrong, or differs between ranks.
// Thread safety: as a call of the group; takes the GIL if necessary.
#pragma once

#include <Python.h>

#include "comm/communicator.h"
#include "engine/selector.h"

namespace ringlet {

/// Converts `algorithm=`: a name ("auto" gives null), or Python's object of an added algorithm. Throws InvalidUsage if
/// the collective has no algorithm of that name, or the object belongs to another collective. Needs the GIL.
const Algorithm* algorithm_of(PyObject* given, Collective collective);

/// Lets the ranks agree on the algorithms of `call`, at least one of which was added.
void agree_on(Communicator& group, const Call& call);

/// The same for any call. A built-in algorithm costs one comparison.
inline void agree_on_added(Communicator& group, const Call& call) {
  const bool added =
      call.algorithm != nullptr ? call.algorithm->authored != nullptr : group.selector().names_authored();
  if (added) [[unlikely]]
    agree_on(group, call);
}

}  // namespace ringlet
