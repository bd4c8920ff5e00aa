"""Events of groups, reducers and calls, on standard error by RINGLET_LOG. The core writes them (csrc/base/log.h)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

import torch

from ringlet import _C

_introduced = 0  # the process that told what it is


def configure(rank: int, world: int) -> None:
    """Before a group is made: takes the level from the environment.

    Raises InvalidUsage for a RINGLET_LOG that is no level, ResourceError for a RINGLET_LOG_FILE that cannot be written.
    """
    global _introduced
    keep_standard_descriptors()
    _C.configure_log()
    if _introduced != os.getpid() and _C.logs("info"):
        _introduced = os.getpid()
        info(_introduction(), rank, world)


def keep_standard_descriptors() -> None:
    """Opens the null device as what is closed of standard input, output and error. Else the next file that is opened,
    such as a store or a connection, would be standard error, and lines of logs would be written into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one


def group_made(group: Any, began: float) -> Any:
    """Logs that a group (or backend) is made, and returns it. began: when that began."""
    group.tell_made(time.monotonic() - began)
    return group


def info(text: str, rank: int, world: int, group: str = "") -> None:
    """Logs one event of that rank of that group."""
    _C.log("info", text, rank, world, group)


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


keep_standard_descriptors()  # before the core opens files
