"""Results on disk, their medians over rounds, and ratios paired within a round.

FILE.jsonl holds one object a line with the keys of `KEYS`. FILE.meta.json beside it has the circumstances of the whole
run (hardware, command, commit, versions). Of a file with another ending, the circumstances are in NAME.meta.json, where
NAME is its whole name.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from ringlet.group import congestion_controls

from . import repository
from .cases import MPI_PEERS, NCCL, PEERS, Config, bus_factor_of, format_bytes
from .exceptions import BenchError
from .run import Outcome, Row

# The keys of a row, in their order: text, or a kind of number and the least that is good for medians and ratios.
_TIME, _RATE, _WHOLE = (float, 1e-6), (float, 0), (int, 0)
_ROW: dict[str, Any] = {
    "library": str, "collective": str, "algorithm": str, "transport": str, "memory": str, "via": str,
    "world": (int, 1), "bytes": _WHOLE, "count": _WHOLE, "dtype": str, "op": str,
    "time_us_min": _TIME, "time_us_p50": _TIME, "time_us_p99": _TIME, "algbw_gbps": _RATE, "busbw_gbps": _RATE,
    "wrong": _WHOLE, "uplink_bytes": _WHOLE, "round": _WHOLE,
}  # fmt: skip
KEYS = tuple(_ROW)
_OPTIONAL = ("wrong", "uplink_bytes")  # None: not checked; not on emulated hosts
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


def median_rows(rows: Iterable[Row]) -> list[Row]:
    """One row per case and configuration: medians over rounds, wrong elements summed, `round` the number of rounds."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[(call_of(row), row["bytes"], config_of(row))].append(row)
    found = []
    for same in groups.values():
        merged = dict(same[0])
        for key in ("time_us_min", "time_us_p50", "time_us_p99"):
            merged[key] = statistics.median(row[key] for row in same)
        merged["algbw_gbps"] = merged["bytes"] / merged["time_us_p50"] / 1000
        merged["busbw_gbps"] = merged["algbw_gbps"] * bus_factor_of(
            merged["library"], merged["collective"], merged["world"]
        )
        checked = [row["wrong"] for row in same if row["wrong"] is not None]
        merged["wrong"] = sum(checked) if checked else None
        counted = [row["uplink_bytes"] for row in same if row.get("uplink_bytes") is not None]
        merged["uplink_bytes"] = statistics.median(counted) if counted else None
        merged["round"] = len(same)
        found.append(merged)
    return sorted(found, key=lambda row: (row["world"], row["bytes"], _place(config_of(row))))


def by_call(rows: list[Row]) -> list[tuple[Call, list[Row]]]:
    """The medians of each call: the worlds ascending, the collectives in their order."""
    merged: dict[Call, list[Row]] = {call: [] for call in dict.fromkeys(map(call_of, rows))}
    for row in median_rows(rows):
        merged[call_of(row)].append(row)
    return sorted(merged.items(), key=lambda one: one[0].world)


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
    def world(self) -> int:
        return self.call.world

    @property
    def collective(self) -> str:
        return self.call.collective

    @property
    def ratios(self) -> dict[int, float]:
        return {size: statistics.median(self.rounds[size]) for size in sorted(self.rounds)}

    @property
    def geometric_mean(self) -> float:
        return geometric_mean(self.ratios.values())


def geometric_mean(ratios: Iterable[float]) -> float:
    return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))


def compare(rows: Iterable[Row], rivals_of: Mapping[str, Sequence[str]] = RIVALS) -> list[Comparison]:
    """Per size and round (fastest rival's p50 / ringlet's p50), for each set of rivals; `without_wrong`."""
    rows = without_wrong(rows)
    found = []
    for rivals, names in rivals_of.items():
        for (call, config), sizes in _pairs(rows, names).items():
            if config.library == "ringlet":
                ratios = {size: [theirs / ours for ours, theirs in pairs] for size, pairs in sizes.items()}
                found.append(Comparison(call, config, rivals, ratios))
    order = list(dict.fromkeys(row["collective"] for row in rows))
    return sorted(found, key=lambda one: (one.world, order.index(one.collective), _place(one.config)))


def relative_to(library: str, rows: Iterable[Row]) -> dict[tuple[Call, int, Config], float]:
    """(call, bytes, configuration) -> its p50 over that of `library`: medians over rounds of ratios within a round, of
    configurations without wrong elements. Empty if the library was not measured."""
    return {
        (call, size, config): statistics.median(own / base for own, base in pairs)
        for (call, config), sizes in _pairs(without_wrong(rows), (library,)).items() if config.library != library
        for size, pairs in sizes.items()
    }  # fmt: skip


def _pairs(rows: list[Row], others: Sequence[str]) -> dict[tuple[Call, Config], dict[int, list[tuple[float, float]]]]:
    """By call, configuration and size: its p50 and that of the fastest of other libraries, of each round."""
    fastest: dict[tuple[Call, int, int], float] = {}
    for row in rows:
        if row["library"] in others:
            key = (call_of(row), row["bytes"], row["round"])
            fastest[key] = min(row["time_us_p50"], fastest.get(key, math.inf))
    found: dict[tuple[Call, Config], dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        call, size = call_of(row), row["bytes"]
        if (call, size, row["round"]) in fastest:
            found[call, config_of(row)][size].append((row["time_us_p50"], fastest[call, size, row["round"]]))
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


def read(path: Path) -> tuple[list[Row], Meta]:
    """The rows of a .jsonl file and, if they lie beside it, the run's circumstances. BenchError if they are none."""
    beside = meta_file(path)
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        meta = json.loads(beside.read_text()) if beside.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise BenchError(f"--from: cannot read {path}: {error}") from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not all(_fits(key, row.get(key)) for key in KEYS):
            raise BenchError(f"--from: line {number} of {path} holds no results of `ringlet bench --json`")
    if not rows:
        raise BenchError(f"--from: {path} holds no results of `ringlet bench --json`")
    return rows, meta


def _fits(key: str, value: Any) -> bool:
    if _ROW[key] is str:
        return isinstance(value, str)
    kind, least = _ROW[key]
    right = isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
    return least <= value <= 1 << 63 if right else value is None and key in _OPTIONAL


def circumstances(load: float, outcome: Outcome | None = None, cluster: Any = None) -> Meta:
    """The circumstances of a figure: hardware, command, commit and versions. load: its average before the run. outcome:
    of a sweep; None: of a program with ringlet and torch."""
    outcome = outcome or Outcome(versions={"ringlet": ringlet.__version__, "torch": torch.__version__})
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(),
        **({"cluster": dataclasses.asdict(cluster), "congestion_control": _congestion_control()} if cluster else {}),
        "command": _command(),
        "commit": _commit(),
        "load_before": round(load, 2),
        "versions": {"python": platform.python_version(), **outcome.versions},
        "settings": outcome.settings,
        "refused": outcome.refused,
        **({"limit": repository.module("machine_limit").summary(outcome.limits)} if outcome.limits else {}),
    }


def _command() -> str:
    """The command as a user types it: the program by its folder and name, given files by their names."""
    program = Path(sys.argv[0])
    name = f"{program.parent.name}/{program.name}" if program.suffix == ".py" else program.name
    named = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return shlex.join(["ringlet" if program.name == "__main__.py" else name, *named])


def machine() -> dict[str, Any]:
    """Processor, cores, memory, kernel; `name` is short enough for a file name."""
    model = platform.processor() or platform.machine()
    hypervisor = False
    about = Path("/proc/cpuinfo")
    for line in about.read_text().splitlines() if about.exists() else ():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "model name":
            model = value
        hypervisor |= key == "flags" and "hypervisor" in value.split()
    cores = len(os.sched_getaffinity(0))
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    words = [word for word in model.replace("(R)", "").replace("(TM)", "").lower().split() if word not in ("cpu", "@")]
    name = "-".join("".join(letter for letter in word if letter.isalnum()) for word in words[:3])
    return {
        "name": f"{name}-{cores}-cores",
        "processor": model + (" (virtual machine)" if hypervisor else ""),
        "cores": cores,
        "memory_gib": round(memory_gib),
        "kernel": platform.release().partition("-")[0],
    }


def _congestion_control() -> str:
    """The machine's congestion control, which the peers use, and ringlet's."""
    machines, used = congestion_controls()
    return machines if used == machines else f"{machines}; of ringlet's connections {used}"


def _commit() -> str:
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        changed = " with uncommitted changes" if git("status", "--porcelain", "-uno") else ""
        return commit + changed if commit else "unknown"
    except OSError:
        return "unknown"
