"""Results on disk, their medians over rounds, and ratios paired within a round.

FILE.jsonl holds one object a line with the keys of `KEYS`. FILE.meta.json beside it has the circumstances of the whole
run (hardware, command, commit, versions). Of a file with another ending, the circumstances are in NAME.meta.json, where
NAME is its whole name.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch

import ringlet

from .cases import MPI_PEERS, NCCL, PEERS, BenchError, Config, bus_factor, format_bytes
from .run import Outcome, Row

_TIMES = ("time_us_min", "time_us_p50", "time_us_p99")
# Of a row, in their order. wrong is None if it was not checked, uplink_bytes outside of emulated hosts.
KEYS = (
    *("library", "collective", "algorithm", "transport", "memory", "via", "world", "bytes", "count", "dtype", "op"),
    *(*_TIMES, "algbw_gbps", "busbw_gbps", "wrong", "uplink_bytes", "round"),
)
RIVALS = {"best MPI": MPI_PEERS, "gloo": ("gloo",), "NCCL": (NCCL,)}

Meta = dict[str, Any]


class Call(NamedTuple):
    """The call that a row measures, without its size. Only rows of the same call can be compared."""

    world: int
    collective: str
    dtype: str
    op: str

    def __str__(self) -> str:
        op = "" if self.op in ("sum", "none") else f", {self.op}"
        return f"{self.collective} of {self.dtype}{op}"


def call_of(row: Row) -> Call:
    return Call(row["world"], row["collective"], row["dtype"], row["op"])


def config_of(row: Row) -> Config:
    return Config(row["library"], row["algorithm"], row["memory"], row["via"])


def by_call(rows: Iterable[Row]) -> list[tuple[Call, list[Row]]]:
    """The medians over rounds of each call, by size and configuration: the worlds ascending, the collectives in their
    order. `wrong` is the sum, `round` the number of rounds."""
    groups: dict[Call, dict[tuple[int, Config], list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        groups[call_of(row)][row["bytes"], config_of(row)].append(row)
    found = []
    for call, cases in groups.items():
        order = sorted(cases, key=lambda case: (case[0], _place(case[1])))
        found.append((call, [_median_row(cases[case]) for case in order]))
    return sorted(found, key=lambda one: one[0].world)


def _median_row(same: list[Row]) -> Row:
    merged = same[0] | {key: statistics.median(row[key] for row in same) for key in _TIMES}
    merged["algbw_gbps"] = merged["bytes"] / merged["time_us_p50"] / 1000
    factor = bus_factor(merged["collective"], merged["world"], merged["library"])
    merged["busbw_gbps"] = merged["algbw_gbps"] * factor
    for key, middle in (("wrong", sum), ("uplink_bytes", statistics.median)):
        known = [row[key] for row in same if row.get(key) is not None]
        merged[key] = middle(known) if known else None
    return merged | {"round": len(same)}


def _place(config: Config) -> tuple[Any, ...]:
    """The position of a configuration among others: ringlet first, registered memory first."""
    peer = PEERS.index(config.library) if config.library in PEERS else -1
    return (peer, config.via, config.memory != "registered", config.algorithm != "auto", config.algorithm)


@dataclass(frozen=True)
class Comparison:
    """rivals' time / ours: how many times faster one of ringlet's configurations is, at each size.

    rounds: by size, the ratio within each round. ratios: their medians.
    """

    call: Call
    config: Config
    rivals: str
    rounds: dict[int, list[float]]

    @property
    def ratios(self) -> dict[int, float]:
        return {size: statistics.median(self.rounds[size]) for size in sorted(self.rounds)}


def compare(rows: Iterable[Row], rivals_of: Mapping[str, Sequence[str]] = RIVALS) -> list[Comparison]:
    """Per size and round (fastest rival's p50 / ringlet's p50), for each set of rivals; `without_wrong`."""
    rows = without_wrong(rows)
    found = []
    for rivals, names in rivals_of.items():
        for (call, config), sizes in pairs(rows, names).items():
            if config.library == "ringlet":
                ratios = {size: [theirs / ours for ours, theirs in pairs] for size, pairs in sizes.items()}
                found.append(Comparison(call, config, rivals, ratios))
    order = list(dict.fromkeys(row["collective"] for row in rows))
    return sorted(found, key=lambda one: (one.call.world, order.index(one.call.collective), _place(one.config)))


def pairs(rows: list[Row], others: Sequence[str]) -> dict[tuple[Call, Config], dict[int, list[tuple[float, float]]]]:
    """By call, configuration and size: its p50 and that of the fastest of other libraries, of each round."""
    fastest: dict[tuple[Call, int, int], float] = {}
    for row in rows:
        if row["library"] in others:
            key = (call_of(row), row["bytes"], row["round"])
            fastest[key] = min(row["time_us_p50"], fastest.get(key, math.inf))
    found: dict[tuple[Call, Config], dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if base := fastest.get((call_of(row), row["bytes"], row["round"])):
            found[call_of(row), config_of(row)][row["bytes"]].append((row["time_us_p50"], base))
    return found


def wrong_elements(rows: Iterable[Row]) -> int:
    return sum(row["wrong"] or 0 for row in rows)


def without_wrong(rows: Iterable[Row]) -> list[Row]:
    """The rows of configurations that computed no wrong element of a call, at any size: the time of a wrong result
    compares with nothing."""
    rows = list(rows)
    wrong = {(call_of(row), config_of(row)) for row in rows if row["wrong"]}
    return [row for row in rows if (call_of(row), config_of(row)) not in wrong]


def require_right(rows: Iterable[Row]) -> None:
    """BenchError that names each algorithm and size with wrong elements."""
    rows = [row for row in rows if row["wrong"]]
    if rows:
        where = dict.fromkeys(f"{row['algorithm']} at {format_bytes(row['bytes'])}" for row in rows)
        raise BenchError(
            f"{rows[0]['collective']}: {wrong_elements(rows)} wrong elements by {', '.join(where)}: no rule can choose "
            "among algorithms of which one is wrong"
        )


@contextlib.contextmanager
def recorder(path: Path | None) -> Iterator[Callable[[Row | None], None]]:
    """Writes rows as they come, so that a run that breaks off leaves its measurements. Removes the circumstances of the
    rows that it replaces."""
    if path is None:
        yield lambda row: None
        return
    with open(path, "w") as file:
        meta_file(path).unlink(missing_ok=True)
        yield lambda row: print(json.dumps(row), file=file, flush=True) if row else None


def meta_file(path: Path) -> Path:
    """The file of circumstances of the rows in `path`."""
    return path.with_name(f"{path.name.removesuffix('.jsonl')}.meta.json")


def write_meta(path: Path, meta: Meta) -> None:
    meta_file(path).write_text(json.dumps(meta, indent=2) + "\n")


def circumstances(load: float, outcome: Outcome | None = None) -> Meta:
    """The circumstances of a figure: hardware, command, commit and versions. load: its average before the run. outcome:
    of a sweep; None: of a program with ringlet and torch."""
    outcome = outcome or Outcome(versions={"ringlet": ringlet.__version__, "torch": torch.__version__})
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(),
        "command": _command(),
        "commit": _commit(),
        "load_before": round(load, 2),
        "versions": {"python": platform.python_version(), **outcome.versions},
        "settings": outcome.settings,
        "refused": outcome.refused,
    }


def _command() -> str:
    """The command as a user types it: the program or the module by its name, given files by theirs."""
    module = sys.modules["__main__"].__spec__
    program = ["python", "-m", module.name.removesuffix(".__main__")] if module else [Path(sys.argv[0]).name]
    return shlex.join([*program, *(Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])])


def machine() -> dict[str, Any]:
    """Processor, cores, memory, kernel; `name` is short enough for a file name."""
    about = Path("/proc/cpuinfo")
    lines = [line.partition(":") for line in (about.read_text().splitlines() if about.exists() else ())]
    told = {key.strip(): value.strip() for key, _, value in lines}
    model = told.get("model name") or platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0))
    words = [word for word in model.replace("(R)", "").replace("(TM)", "").lower().split() if word not in ("cpu", "@")]
    name = "-".join("".join(letter for letter in word if letter.isalnum()) for word in words[:3])
    return {
        "name": f"{name}-{cores}-cores",
        "processor": model + (" (virtual machine)" if "hypervisor" in told.get("flags", "").split() else ""),
        "cores": cores,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)),
        "kernel": platform.release().partition("-")[0],
    }


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    try:
        changed = " with uncommitted changes" if git("status", "--porcelain", "-uno") else ""
        commit = git("rev-parse", "--short=12", "HEAD")
    except OSError:
        commit = ""
    return commit + changed if commit else "unknown"
