"""Supervises the processes of one job on this host: watches them, and ends all of them when one fails."""

from __future__ import annotations

import abc
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

GRACE_S = 5.0
"""Seconds that ranks get to end by themselves, once they are told to."""

_AGAIN_S = 0.02
_PR_SET_PDEATHSIG = 1


class Terminated(BaseException):
    """The signal of this number arrived."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def termination_raises() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a terminal that is gone, end the block as an exception does, and then the process. Not
    those that the program handles."""
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread() or not ours:
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:  # a shell sends it as it ends, and its terminal once more
            signal.signal(number, signal.SIG_IGN)
        raise Terminated(number)

    def again(lost: Any) -> None:
        """Python drops what is raised in a finalizer: the signal has to come once more, when that has ended."""
        if isinstance(lost.exc_value, Terminated):
            signal.signal(lost.exc_value.number, terminate)
            threading.Timer(_AGAIN_S, os.kill, (os.getpid(), lost.exc_value.number)).start()
        else:
            before(lost)

    before, sys.unraisablehook = sys.unraisablehook, again
    for number in ours:
        signal.signal(number, terminate)
    try:
        yield
    except Terminated as terminated:
        signal.signal(terminated.number, signal.SIG_DFL)
        os.kill(os.getpid(), terminated.number)
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
        sys.unraisablehook = before


def end_with_parent(parent: int) -> None:
    """This process is killed when the thread of `parent` that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that call
        os.kill(os.getpid(), signal.SIGKILL)


def signal_name(number: int) -> str:
    """SIGTERM. Of the real-time signals, only the first and the last have a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class End(NamedTuple):
    """How a rank ended, and when (time.monotonic()). code: of its exit, or minus the number of the signal."""

    code: int
    when: float


class RankProcesses(abc.ABC):
    """The processes of a job, by rank. A subclass starts them, and hears from them in `turn`.

    ends: the ranks that have ended, as `turn` has noted.
    """

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self.ends: dict[int, End] = {}

    @abc.abstractmethod
    def turn(self, seconds: float | None) -> None:
        """Waits, at most that long, until something comes from a rank or one of `running` ends. Notes what did."""

    @abc.abstractmethod
    def send(self, rank: int, number: int) -> None:
        """Sends a signal to a rank that runs."""

    @abc.abstractmethod
    def kill(self) -> None:
        """Kills what still runs, and reaps all processes."""

    @abc.abstractmethod
    def left(self, rank: int) -> tuple[float, bool] | None:
        """When the rank began to leave its groups (time.monotonic()), and whether because it lost a peer. None if it
        has not said so."""

    def running(self) -> list[int]:
        return [rank for rank in range(len(self.processes)) if rank not in self.ends]

    def failed(self) -> set[int]:
        """The ranks that are known to have failed."""
        return {rank for rank, end in self.ends.items() if end.code}

    def watch(self) -> int | None:
        """Waits until all ranks have ended well, or one has failed. Then ends the others, and returns the rank whose
        failure caused the others.

        A rank that fails may take longer to end than the ranks that lost it: they do not end before it, within limits.
        """
        while self.running() and not any(end.code for end in self.ends.values()):
            self.turn(None)
        self.turn(0)  # what the failed ranks have said
        until = time.monotonic() + GRACE_S
        while self._awaits_cause() and time.monotonic() < until:
            self.turn(until - time.monotonic())
        first = self._first()
        if first is not None:
            self.end(signal.SIGTERM)
        return first

    def end(self, number: int) -> None:
        """Ends the ranks that still run by that signal; by SIGKILL if they take too long or another signal arrives."""
        try:
            self.turn(0)
            for rank in self.running():
                self.send(rank, number)
            until = time.monotonic() + GRACE_S
            while self.running() and time.monotonic() < until:
                self.turn(until - time.monotonic())
        finally:
            self.kill()

    def ended_well_before(self, rank: int) -> list[int]:
        """Of a rank that lost a peer: the ranks that had ended without a failure, which may be what it lost."""
        left = self.left(rank)
        if left is None or not left[1]:
            return []
        well = {other: self.left(other) or (end.when, False) for other, end in self.ends.items() if not end.code}
        return sorted(other for other, (when, _) in well.items() if when <= self.ends[rank].when)

    def _first(self) -> int | None:
        return min(self.failed(), key=self._order, default=None)

    def _order(self, rank: int) -> tuple[bool, bool, float]:
        """Of ranks that failed, the least caused the others: not one that lost a peer, rather one that a signal ended,
        and the one that began to leave first."""
        left = self.left(rank)
        if left is None:
            return False, self.ends[rank].code >= 0, self.ends[rank].when
        when, lost_peer = left
        return lost_peer, True, when

    def _awaits_cause(self) -> bool:
        """Whether a rank still runs that may have failed before those that have ended."""
        first = self._first()
        if first is None:
            return False
        lost_peer, _, when = self._order(first)
        others = [self.left(rank) for rank in self.running()]
        return bool(others) if lost_peer else any(left is not None and left[0] < when for left in others)
