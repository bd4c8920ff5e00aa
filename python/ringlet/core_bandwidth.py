"""What two cores of this machine can do without any library: measured by csrc/bindings/limit.cc on two threads, each on
a processor of its own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from . import _C
from .errors import InvalidUsage

# Blocks that one core writes and the other reads: the highest rate counts, because an engine may cut a message so.
_BLOCKS = tuple(16 << 10 << shift for shift in (0, 2, 4, 6, 8))
_LINE_ROUNDS, _MOST_ROUNDS, _ROUND_BYTES = 9, 15, 64 << 20


@dataclass(frozen=True)
class Cores:
    """line_us: of a line there and back. foreign_gbps: of one core that reads what the other has just written.
    copy_gbps, add_gbps: of memory, read and written by each of two cores at once, within `bytes` of its own."""

    bytes: int
    line_us: float
    foreign_gbps: float
    copy_gbps: float
    add_gbps: float


def processors() -> tuple[int, int] | None:
    """Two usable processors, of different cores if there are such; None: there is only one."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        return None
    apart = [other for other in usable[1:] if other not in _siblings(usable[0])]
    return usable[0], (apart or usable[1:])[0]


def _siblings(processor: int) -> set[int]:
    """The processors of the same core."""
    try:
        text = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list").read_text()
        spans = [span.split("-") for span in text.strip().split(",")]
        return {number for span in spans for number in range(int(span[0]), int(span[-1]) + 1)}
    except (OSError, ValueError):
        return {processor}


def measure(size: int) -> Cores:
    """What the cores do now; memory within `size` bytes a core. ringlet.InvalidUsage if there is one processor only."""
    pair = processors()
    if pair is None:
        raise InvalidUsage("measuring two cores needs two processors, and this process may use one only")
    rounds = max(2, min(_MOST_ROUNDS, _ROUND_BYTES // max(size, 1)))
    foreign = max(_C.read_written_gbps(pair, block, max(3, min(_MOST_ROUNDS, (4 << 20) // block))) for block in _BLOCKS)
    memory = _C.memory_gbps(pair, max(size, 1), rounds)
    return Cores(size, _C.line_round_trip_ns(pair, _LINE_ROUNDS) / 1000, foreign, *memory)
