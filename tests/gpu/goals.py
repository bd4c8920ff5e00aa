"""What a run on a GPU must show, judged by what the parts' logs say.

A goal is met, not met, or not measured. Where a part failed, a figure in its log may still show that a goal is not met,
and cannot show that it is.
"""

from __future__ import annotations

import contextlib
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from parts import Logs

MIB = 1 << 20
COPY_SHARE = 0.90  # of the copy's bandwidth
NCCL_SHARE = 0.9  # of ncclAllReduce's speed, over the same messages
LARGE_BYTES = (64 * MIB, 256 * MIB)
SMALL_BYTES = 256 << 10
NO_GPU = 2  # gpu_check's exit status
IN_TIME_SLICES = 2  # ranks of benchmarks/sweeps/gpu-large.toml

# In tests/gpu/test_cuda.py, whose tests have these names.
CONTRACT = (
    *("every_dtype_and_op[2-{}]", "every_algorithm_count_and_root[2-{}]"),
    *("some_dtypes_and_ops[3-{}]", "every_algorithm_at_two_counts[3-{}]"),
    *("some_dtypes_and_ops[4-{}]", "every_algorithm_at_two_counts[4-{}]"),
)
GRAPH = "a_graph_is_replayed_1000_times[{}]"
TRAINING = tuple(
    f"training_equals_the_cpu_within_rounding[{wrap}-{way}]"
    for wrap in ("DDP", "reducer")
    for way in ("nccl", "by_size")
)
# Which part runs the tests of which way.
PART_OF = {"peers": "peers", "nccl": "messages"}

# A figure for the page, and whether it is as it must be; None: it was not measured.
Verdict = tuple[str, bool | None]


@dataclass(frozen=True)
class Goal:
    what: str
    judge: Callable[[Logs], Verdict]

    def verdict(self, logs: Logs) -> Verdict:
        try:
            return self.judge(logs)
        except Exception as error:  # a log may hold anything
            return f"not understood: {type(error).__name__}: {error}", None


def goals() -> list[Goal]:
    both = [("peers", GRAPH.format("peers")), ("messages", GRAPH.format("nccl"))]
    return [
        Goal("kernels: every result right", said_ok("kernels")),
        Goal(f"sum of two of float32, 256 MiB: {COPY_SHARE} of the copy's bandwidth", share_of_copy("float32")),
        Goal(f"sum of two of bfloat16, 256 MiB: {COPY_SHARE} of the copy's bandwidth", share_of_copy("bfloat16")),
        Goal("pull engine: contract, worlds 2 3 4 8, one process", said_ok("pull")),
        Goal("pull engine: contract, worlds 2 3 4, ranks as processes", contract("peers")),
        Goal("NCCL's messages: contract, worlds 2 3 4, one process", said_ok("nccl")),
        Goal("NCCL's messages: contract, worlds 2 3 4, ranks as processes", contract("nccl")),
        Goal("one_shot faster than ncclAllReduce up to 256 KiB (its time / ringlet's, the least)", one_shot),
        Goal(f"ring over NCCL's messages: {NCCL_SHARE} of ncclAllReduce's speed at 64 and 256 MiB (the least)", ring),
        Goal("a CUDA graph replayed 1000 times, through peers' memory and NCCL", lambda logs: tests_passed(logs, both)),
        Goal("training as on the CPU, with DDP and the reducer",
             lambda logs: tests_passed(logs, [("messages", name) for name in TRAINING])),
        Goal("compute-sanitizer finds nothing in the kernels and the pull engine", sanitized),
    ]  # fmt: skip


def met(right: bool | None) -> str:
    return "not measured" if right is None else "met" if right else "not met"


def right_if(enough: bool, everything: bool) -> bool | None:
    """A figure that is not enough decides; one that is does so where it stands for everything."""
    return False if not enough else True if everything else None


def failed(logs: Logs, part: str) -> bool:
    record = logs.record(part)
    return record is not None and record.failed


def passed(logs: Logs, part: str) -> bool:
    record = logs.record(part)
    return record is not None and record.passed


def figures(text: str) -> dict[str, float]:
    """The lines "name<TAB>figure<TAB>unit" of a log."""
    found = {}
    for line in text.splitlines():
        cells = line.split("\t")
        if len(cells) == 3:
            with contextlib.suppress(ValueError):
                found[cells[0]] = float(cells[1])
    return found


def said_ok(part: str) -> Callable[[Logs], Verdict]:
    """The part's own last line: "gpu_check: ok" or "gpu_check: FAILED"."""

    def judge(logs: Logs) -> Verdict:
        text, record = logs.text(part), logs.record(part)
        if record is None or record.rc == NO_GPU:
            return "", None
        if record.failed or re.search(r"^gpu_check: FAILED", text, re.MULTILINE):
            return record.outcome, False
        cases = sum(count for name, count in figures(text).items() if name.endswith(": cases"))
        right = record.passed and re.search(r"^gpu_check: ok", text, re.MULTILINE) is not None
        return f"{'ok' if right else record.outcome}, {cases:g} cases", right or None

    return judge


def share_of_copy(dtype: str) -> Callable[[Logs], Verdict]:
    def judge(logs: Logs) -> Verdict:
        share = figures(logs.text("bandwidth")).get(f"sum of two of {dtype}, 256 MiB")
        if share is None:
            return "", None
        return f"{share:.3f}", right_if(share >= COPY_SHARE, not failed(logs, "bandwidth"))

    return judge


class Ratio(NamedTuple):
    """ncclAllReduce's time in times of ringlet's; least first where sorted."""

    ratio: float
    algorithm: str
    world: int
    bytes: int

    def __str__(self) -> str:
        units = ((MIB, "MiB"), (1024, "KiB"), (1, "B"))
        size = next(f"{self.bytes / many:g} {unit}" for many, unit in units if self.bytes >= many)
        return f"{self.ratio:.3f} ({self.world} ranks, {size})"


def ratios(text: str, algorithm: str) -> list[Ratio]:
    """Of an algorithm, or of "ALGORITHM registered"."""
    form = re.compile(r"(\w+(?: registered)?), (\d+) virtual ranks, (\d+) B: ncclAllReduce's time")
    found = [(form.fullmatch(name), figure) for name, figure in figures(text).items()]
    return [Ratio(figure, match[1], int(match[2]), int(match[3]))
            for match, figure in found if match and match[1] == algorithm]  # fmt: skip


def one_shot(logs: Logs) -> Verdict:
    """Judged on ordinary memory; of registered memory it is told."""
    text = logs.text("pull-speed")
    ordinary, registered = (
        [one for one in ratios(text, name) if one.bytes <= SMALL_BYTES] for name in ("one_shot", "one_shot registered")
    )
    if not ordinary:
        return "", None
    least = min(ordinary)
    told = f"{least}; registered {min(registered)}" if registered else str(least)
    everything = passed(logs, "pull-speed") and any(one.bytes == SMALL_BYTES for one in ordinary)
    return told, right_if(least.ratio > 1, everything)


def ring(logs: Logs) -> Verdict:
    found = [one for one in ratios(logs.text("nccl-speed"), "ring") if one.bytes >= LARGE_BYTES[0]]
    beside = in_time_slices(logs)
    if not found:
        return beside, None
    least = min(found)
    told = f"{least}; {beside}" if beside else str(least)
    everything = not failed(logs, "nccl-speed") and {one.bytes for one in found}.issuperset(LARGE_BYTES)
    return told, right_if(least.ratio >= NCCL_SHARE, everything)


def in_time_slices(logs: Logs) -> str:
    """The same from bench-large, whose ranks are processes: median over rounds of ratios within a round."""
    times: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    for row in logs.rows("bench-large"):
        if row["library"] == "nccl" or row["algorithm"] == "ring":
            times[(row["bytes"], row["round"])][row["library"]] = row["time_us_p50"]
    rounds: dict[int, list[float]] = defaultdict(list)
    for (size, _), both in times.items():
        if len(both) == 2:
            rounds[size].append(both["nccl"] / both["ringlet"])
    if not rounds:
        return ""
    least = min(Ratio(statistics.median(found), "ring", IN_TIME_SLICES, size) for size, found in rounds.items())
    return f"processes in time slices: {least}"


def outcomes(text: str) -> dict[str, str]:
    """Test -> PASSED, FAILED, ERROR or SKIPPED, from the lines of pytest -v; of several the last, that of its end."""
    line = r"^tests/gpu/test_cuda\.py::test_(\S+) .*?\b(PASSED|FAILED|ERROR|SKIPPED)\b"
    return dict(re.findall(line, text, re.MULTILINE))


def tests_passed(logs: Logs, wanted: Iterable[tuple[str, str]]) -> Verdict:
    """Whether tests passed, each named with the part that runs it."""
    said = [outcomes(logs.text(part)).get(name, "") for part, name in wanted]
    if not any(said):
        return "", None
    right, wrong = said.count("PASSED"), said.count("FAILED") + said.count("ERROR")
    told = f"{right} of {len(said)} tests passed, {wrong} failed"
    return told, False if wrong else True if right == len(said) else None


def contract(way: str) -> Callable[[Logs], Verdict]:
    return lambda logs: tests_passed(logs, [(PART_OF[way], name.format(way)) for name in CONTRACT])


def sanitized(logs: Logs) -> Verdict:
    record = logs.record("sanitizer")
    if record is None:
        return "", None
    if "Device not supported" in logs.text("sanitizer"):  # within some sandboxes
        return "compute-sanitizer does not support this device", None
    return record.outcome, True if record.passed else False if record.failed else None
