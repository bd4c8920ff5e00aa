"""Events of groups, reducers and calls: on standard error by RINGLET_LOG, and in Python's logging.

The core logs them (csrc/base/log.h), from any thread and without Python's lock. Events for Python's logging pass
through a queue, which a thread of this module reads. ringlet reads both levels when it makes a group.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Iterable
from typing import Any

import torch

from ringlet import _C, interruptible

LOGGER = logging.getLogger("ringlet")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
_PATIENCE_S = 60.0


class _Reader(threading.Thread):
    """Gives the queue's events to the logger until the program ends."""

    def __init__(self) -> None:
        super().__init__(name="ringlet-log", daemon=True)
        self.process = os.getpid()  # a forked child has this object, and not the thread
        self.ending = False

    def run(self) -> None:
        while not self.ending:
            hand_over(_PATIENCE_S)


_reader: _Reader | None = None
_introduced = 0  # the process that told what it is


def configure(rank: int, world: int) -> float:
    """Before a group is made: takes the levels from the environment and from the logger. Returns the time, for `made`.

    Raises InvalidUsage for a RINGLET_LOG that is no level, ResourceError for a RINGLET_LOG_FILE that cannot be written.
    """
    global _introduced, _reader
    keep_standard_descriptors()
    own = LOGGER.level
    wanted = next((name for name, level in _LEVELS.items() if own <= level), "off") if own else "off"
    _C.configure_log(wanted)
    if wanted != "off" and (_reader is None or _reader.process != os.getpid()):
        _reader = _Reader()
        interruptible.start(_reader, "the log")
    if _introduced != os.getpid() and _C.logs("info"):
        _introduced = os.getpid()
        info(_introduction(), rank, world)
    return time.monotonic()


def keep_standard_descriptors() -> None:
    """Opens the null device as what is closed of standard input, output and error. Else the next file that is opened,
    such as a store or a connection, would be standard error, and lines of logs would be written into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one


def made(group: Any, began: float) -> Any:
    """Logs that a group (or backend) is made, and returns it. began: the result of `configure`."""
    group.tell_made(time.monotonic() - began)
    return group


def info(text: str, rank: int, world: int, group: str = "") -> None:
    """Logs one event of that rank of that group."""
    _C.log("info", text, rank, world, group)


def hand_over(patience: float = 0.0) -> None:
    """Gives the queue's events to the logger, after a wait of so many seconds for the first event."""
    for level, moment, rank, world, group, text in _C.take_log_events(patience):
        place = f"rank {rank}/{world} " if rank >= 0 else ""
        message = f"[{place}{group}] {text}" if group else f"[{place.rstrip()}] {text}"
        known = {"rank": rank, "world": world, "group": group}
        record = LOGGER.makeRecord(LOGGER.name, _LEVELS[level], __file__, 0, message, (), None, None, known)
        record.created, record.msecs = moment, moment % 1 * 1000
        LOGGER.handle(record)


def _introduction() -> str:
    from ringlet import __version__

    processors = ranges(os.sched_getaffinity(0))
    return (
        f"ringlet {__version__}, torch {torch.__version__}, {_C.cpu_kernels()} kernels, processors {processors}, "
        f"registered heap up to {_C.heap()['bytes'] >> 20} MiB"
    )


def ranges(numbers: Iterable[int]) -> str:
    """0-3,8 of 0, 1, 2, 3, 8."""
    text: list[list[int]] = []
    for number in sorted(numbers):
        if text and text[-1][-1] == number - 1:
            text[-1] = [text[-1][0], number]
        else:
            text.append([number])
    return ",".join("-".join(map(str, run)) for run in text)


def _end() -> None:
    """At the program's end: what is still in the queue, those events included that ending groups told."""
    global _reader
    if _reader is None or _reader.process != os.getpid():
        return
    _reader.ending = True
    _C.end_log_queue()
    _reader.join(2)
    hand_over()
    _reader = None


keep_standard_descriptors()  # before the core opens files
atexit.register(_end)  # before groups register their ends: it runs after them
