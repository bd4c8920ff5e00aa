// Algorithms that Python adds: before the first call with one, all ranks of the group agree on its schedules.
//
// Contract: agree_on_added() is a collective of its own where the group has not agreed yet: all ranks come to it in the
// same call. It throws InvalidUsage on all of them where an algorithm is wrong, or not the same on all.
// Thread safety: as a call of the group; takes the GIL where it has to.
#pragma once

#include <Python.h>

#include "comm/communicator.h"
#include "engine/selector.h"

namespace ringlet {

/// What a call takes as `algorithm=`: a name ("auto" gives null), or Python's own object. Throws InvalidUsage where the
/// collective has none of that name, or the object is another collective's. Needs the GIL.
const Algorithm* algorithm_of(PyObject* given, Collective collective);

/// For the algorithms of `call`, of which there is at least one that was added.
void agree_on(Communicator& group, const Call& call);

/// Costs a built-in algorithm one comparison.
inline void agree_on_added(Communicator& group, const Call& call) {
  const bool added =
      call.algorithm != nullptr ? call.algorithm->authored != nullptr : group.selector().names_authored();
  if (added) [[unlikely]]
    agree_on(group, call);
}

}  // namespace ringlet
