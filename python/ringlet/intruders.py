"""Ranks of two jobs at one port, if the launcher does not name the jobs: then only a rank too many tells.

A rank that comes late for a rank of an open group is refused (`too_late`). If it looks as much like one of rank 0's job
as the rank in its place does, the group fails too (`Intruders`).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable

from torch.distributed import Store

from ringlet.claim import Claim, claim_from, peek
from ringlet.interruptible import start

LATE_S = 2.0  # after which a process whose rank another one has in an open group is refused
APART = ": if two jobs use one MASTER_PORT, set another port for one of them"


def too_late(store: Store, name: str, claim: Claim) -> str:
    """An error text if another process has this rank in an open group of a job that nothing names."""
    if claim.job is not None:
        return ""
    found = [claim_from(text) for text in json.loads(peek(store, f"{name}/members") or "[]")]
    members = [member for member in found if member is not None]  # all or none: they are of one version
    if claim.rank >= len(members) or any(member.process == claim.process for member in members):
        return ""  # a member has left the group already, and joins the next one
    member, here = members[claim.rank], socket.gethostname()
    if member.origin[0] == here and not _is_there(int(member.process.split()[1])):
        return ""  # its rank is free
    text = (
        f"two processes say that they are rank {claim.rank} of {claim.world}: {member.process}, which is in a group, "
        f"and {claim.process}" + APART
    )
    if _alike(claim, members[0]) >= _alike(member, members[0]):
        store.set(f"{name}/mixed", text)
    return text


def _alike(claim: Claim, other: Claim) -> int:
    return sum(a == b for a, b in zip(claim.origin, other.origin, strict=False))


def _is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


class Intruders:
    """Rank 0's watch over the open group of a job that nothing names. It calls `fail(reason)` when a process comes that
    may be of this job, and then a rank of the group may not be."""

    def __init__(self, store: Store, name: str, fail: Callable[[str], None]) -> None:
        self._store, self._name, self._fail = store, name, fail
        self._process = os.getpid()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ringlet-intruders", daemon=True)
        start(self._thread, "the watch over the group's ranks")

    def _watch(self) -> None:
        while not self._ended.wait(LATE_S / 2):
            with contextlib.suppress(RuntimeError):
                if text := peek(self._store, f"{self._name}/mixed"):
                    self._fail(f"this group may have ranks of two jobs: {text}")
                    return

    def end(self) -> None:
        """The group is closed: processes that come may join the next one."""
        if self._process != os.getpid() or self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(LATE_S)  # a look at the store that this process serves takes no longer
        with contextlib.suppress(RuntimeError):
            for key in ("members", "mixed"):  # not deleted, because another process may be about to read it
                self._store.set(f"{self._name}/{key}", "")
