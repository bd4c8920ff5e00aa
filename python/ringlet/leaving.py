"""When a rank of `ringlet run` began to leave its groups, and why: then the launcher knows which rank failed first.

A rank that fails takes longer to end than ranks need to notice that it left, so the order of their ends says nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

from ringlet.errors import PeerLost

_VARIABLE = "_RINGLET_LEAVING"  # the launcher's process, whose children only are ranks, and the path of the note


def environment(note: Path) -> dict[str, str]:
    """The variables of a rank that is to leave its note there."""
    return {_VARIABLE: f"{os.getpid()}:{note}"}


def leave() -> None:
    """Notes that this rank leaves; the first note counts."""
    launcher, _, note = os.environ.get(_VARIABLE, "").partition(":")
    if launcher != str(os.getppid()):
        return
    # At exit, the exception that ended the program.
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    lost_peer = isinstance(error, PeerLost) or getattr(error, "reported", False)
    with contextlib.suppress(OSError), open(note, "x") as file:  # it is there, or the launcher is gone
        file.write(f"{time.monotonic()} {int(lost_peer)}")


def read(note: Path) -> tuple[float, bool] | None:
    """When the rank began to leave (time.monotonic()), and whether because it lost a peer."""
    try:
        when, lost_peer = note.read_text().split()
        return float(when), lost_peer == "1"
    except (OSError, ValueError):  # not there, or not written yet
        return None
