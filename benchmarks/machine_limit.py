"""The least time of a collective on one host, from what two cores of this machine can do without any library.

docs/performance.md#the-limit has the model. machine_limit.cc measures, on two threads, each on a processor of its own;
it is compiled at first use. The measurements take turns with the libraries as a peer does, so the machine's drift is
theirs too.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.uplinks import relative_to

from ringlet.bench.cases import LIMIT, bus_factor, format_bytes
from ringlet.bench.jobs import BenchError
from ringlet.bench.ranks.case import Case
from ringlet.bench.report import Table, time_text
from ringlet.bench.results import Row, by_call, config_of
from ringlet.errors import InvalidUsage

_LONGEST_S = 300  # of a compiler or a measurement, which take seconds
_SOURCE = Path(__file__).resolve().with_suffix(".cc")
# Blocks that one core writes and the other reads: the highest rate counts, because an engine may cut a message so.
_BLOCKS = tuple(16 << 10 << shift for shift in (0, 2, 4, 6, 8))
_LINE_ROUNDS, _MOST_ROUNDS, _ROUND_BYTES = 9, 15, 64 << 20
# Ranks of these calls send and do not wait: calls in a loop overlap, and a line's way counts in none of them.
_ONE_WAY = ("broadcast", "reduce", "gather", "scatter")


@dataclass(frozen=True)
class Cores:
    """line_us: of a line there and back. foreign_gbps: of one core that reads what the other has just written.
    copy_gbps, add_gbps: of memory, read and written by each of two cores at once, within `bytes` of its own."""

    bytes: int
    line_us: float
    foreign_gbps: float
    copy_gbps: float
    add_gbps: float


class Limit:
    """Stands among the jobs of a sweep: answers with the least time of each call, measured in this process while the
    ranks wait for their turns. measured: where it notes what it measures."""

    version = settings = ""

    def __init__(self, measured: list[Cores]) -> None:
        self._measured, self._least = measured, 0.0

    def ask(self, command: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        if command["do"] == "measure":
            return [dict.fromkeys(("min", "p50", "p99"), self._least)]
        case = Case(**command["case"])
        if why := refusal(case.world):
            return [{"refused": why}]
        self._measured.append(measure(case.bytes))
        self._least = least_us(case, self._measured[-1])
        return [{"estimate_us": self._least, "wrong": None, "transport": "none"}]


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
    """What the cores do now; memory within `size` bytes a core. ringlet.InvalidUsage if there is one processor only,
    BenchError if nothing can be compiled or measured."""
    pair = processors()
    if pair is None:
        raise InvalidUsage("measuring two cores needs two processors, and this process may use one only")
    rounds = max(2, min(_MOST_ROUNDS, _ROUND_BYTES // max(size, 1)))
    wanted: list[object] = ["line", _LINE_ROUNDS, "memory", max(size, 1), rounds]
    for block in _BLOCKS:
        wanted += ["written", block, max(3, min(_MOST_ROUNDS, (4 << 20) // block))]
    line, (copied, added), *written = ([float(one) for one in row.split()] for row in _run(_program(), *pair, *wanted))
    return Cores(size, line[0] / 1000, max(one[0] for one in written), copied, added)


def line_ns() -> float:
    """Nanoseconds of a line between the first two usable processors, there and back."""
    return float(_run(_program(), *sorted(os.sched_getaffinity(0))[:2], "line", 50)[0])


def _program() -> Path:
    """machine_limit.cc, compiled for this machine."""
    made = _SOURCE.parents[1] / "build" / "machine_limit"
    if not made.exists() or made.stat().st_mtime < _SOURCE.stat().st_mtime:
        made.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent) as folder:
            fresh = Path(folder, made.name)
            _run(os.environ.get("CXX", "c++"), "-std=c++20", "-O3", "-pthread", _SOURCE, "-o", fresh)
            fresh.replace(made)
    return made


def _run(*words: object) -> list[str]:
    try:
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=_LONGEST_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"the limit cannot be measured: {error}") from None
    if done.returncode != 0:
        raise BenchError(f"the limit cannot be measured: {done.stderr.strip()}")
    return done.stdout.splitlines()


def refusal(world: int) -> str | None:
    """Why there is no limit for so many ranks; None: there is one."""
    usable = len(os.sched_getaffinity(0))
    if world < 2 or usable < 2:
        return "the limit is that of two ranks or more, on two processors or more"
    if world > usable:
        return f"{world} ranks on {usable} processors take turns: the limit is that of ranks with a processor each"
    return None


def touched_factor(collective: str, world: int) -> float:
    """Bytes of buffers that the busiest rank must read or write, whoever's caches they are in, per byte of the
    buffer."""
    return {
        "reduce_scatter": 1 + 1 / world,
        "all_gather": 1 + 1 / world,
        "broadcast": 1.0,
        "gather": 1.0,
        "scatter": 1.0,
    }.get(collective, 2.0)


def least_us(case: Case, cores: Cores) -> float:
    """The least time of a call. From others the busiest rank must read bus_factor bytes per byte of the buffer."""
    collective = case.moves
    way = 0.0 if collective in _ONE_WAY else cores.line_us / 2
    foreign = bus_factor(collective, case.world) * case.bytes / cores.foreign_gbps / 1000
    memory = touched_factor(collective, case.world) * case.bytes / cores.copy_gbps / 1000
    return max(way + foreign, memory)


def summary(measured: Sequence[Cores]) -> dict[str, float]:
    """Medians of what the limit is made of; the rates of memory are of the largest size."""
    most = max(one.bytes for one in measured)
    largest = [one for one in measured if one.bytes == most]
    return {
        "line_round_trip_us": round(statistics.median(one.line_us for one in measured), 4),
        "read_written_gbps": round(statistics.median(one.foreign_gbps for one in measured), 2),
        "memory_bytes": most,
        "copy_gbps": round(statistics.median(one.copy_gbps for one in largest), 2),
        "add_gbps": round(statistics.median(one.add_gbps for one in largest), 2),
    }


def tables(rows: list[Row]) -> list[Table]:
    """One table per call: times in those of the limit."""
    ratios, found = relative_to(LIMIT, rows), []
    for call, here in by_call(rows):
        lines = [
            [str(config_of(row)), str(row["bytes"]), time_text(row["time_us_p50"]), f"{ratio:.2f}"]
            for row in here if (ratio := ratios.get((call, row["bytes"], config_of(row))))
        ]  # fmt: skip
        columns = ["library", "size (B)", "p50 (us)", "p50/limit"]
        found += [Table(f"{call}, {call.world} ranks: in times of the limit", columns, lines)] if lines else []
    return found


def facts(found: Mapping[str, float]) -> list[tuple[str, str]]:
    """The line of a report on the limit: `found` is a `summary`."""
    told = (
        f"a line there and back {1000 * found['line_round_trip_us']:.0f} ns; a core reads what the other has just "
        f"written at {found['read_written_gbps']:.1f} GB/s; each core moves {found['copy_gbps']:.1f} GB/s in a copy of "
        f"{format_bytes(int(found['memory_bytes']))}, {found['add_gbps']:.1f} GB/s in read + read + write"
    )
    return [("the limit's measurements", told)]
