"""Measures the sizes at which the pull engine changes its way (csrc/engine/tuning.h), on two ranks of this machine.

A variant is a group whose table has one value; the ranks make one group for each, and call them in turns, in an order
drawn anew each round. So what is compared lies within a millisecond. A value replaces the built-in one only if it is
clearly faster at one size at least and clearly slower at none, and if it is so a second time, on groups made anew.
docs/decisions/0052-sizes-are-measured-by-processor.md has the reasons.
"""

from __future__ import annotations

import functools
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from benchmarks.local_ranks import agreed, group_with, in_turns, on_ranks, seconds_a_call

import ringlet
from ringlet import _C
from ringlet.bench.jobs import BenchError
from ringlet.bench.rules import size_text

MARGIN = 0.05  # the least gain
LOSS = 0.01  # the most that may be lost anywhere
LEAST_SHARE = 0.9  # of a processor, that each rank must have had: on a busy machine other sizes are best
_K, _M = 1 << 10, 1 << 20
_EVER = 1 << 40  # larger than any message
_SAMPLE_S = 100e-6  # of calls, between two readings of the clock
_BUDGET_S, _CONFIRM_S = 1.3, 0.5  # of the two passes
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 25

Values = Mapping[str, int]
Memory = str  # "registered" or "ordinary"


@dataclass(frozen=True)
class Size:
    """A size of the engine. memory, sizes: of the messages to try it on.

    ways: of a size up to which one way is taken, and another above: values that take either way always, so that two
    calls tell what each candidate does. None: of another size, whose candidates are all tried. first: the value is the
    first size above, not the last size below.
    """

    name: str
    memory: tuple[Memory, ...]
    sizes: tuple[int, ...]
    candidates: tuple[int, ...]
    ways: tuple[int, int] | None = None
    first: bool = False

    def way(self, value: int, size: int, values: Sequence[int]) -> int:
        """The place among `values`, those of a point of this size, of what `value` does with a message of `size`."""
        if self.ways is None:
            return values.index(value)
        return int(size >= value if self.first else size > value)


def _threshold(name: str, memory: tuple[Memory, ...], sizes: tuple[int, ...], first: bool = False) -> Size:
    """A threshold, of which the sizes that it is tried on are candidates, and one beyond them."""
    candidates = (*sizes, 2 * sizes[-1]) if first else (sizes[0] // 2, *sizes)
    return Size(name, memory, sizes, candidates, (_EVER, int(first)), first)


_BOTH = ("registered", "ordinary")
SIZES = (
    _threshold("small_bytes_of_two", _BOTH, tuple(128 * _K << i for i in range(6))),
    _threshold("streaming_bytes", _BOTH, (2 * _M, 4 * _M, 8 * _M, 16 * _M), first=True),
    _threshold("hand_over_bytes", ("registered",), (_K, 8 * _K, 64 * _K, 512 * _K, 4 * _M, 16 * _M)),
    Size("staged_segment_bytes", ("ordinary",), (2 * _M, 4 * _M, 16 * _M), tuple(64 * _K << i for i in range(5))),
    Size("in_place_segment_bytes", ("registered",), (8 * _M, 16 * _M), tuple(_M << i for i in range(5))),
)


@dataclass(frozen=True)
class Point:
    """A call: on a tensor in this memory, of so many bytes, in groups with these values of one size."""

    name: str
    memory: Memory
    bytes: int
    values: tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """value: of the size `name`, better than the built-in one. gains: built-in time / its own, by message size."""

    name: str
    value: int
    gains: dict[str, float]


Times = dict[Point, list[list[float]]]  # by round, by value; the slower rank's


def calibrate(built_in: Values) -> tuple[list[Found], float]:
    """The sizes that differ from the built-in ones, and the seconds that measuring took, without the start of the
    ranks. BenchError if there is no processor for each of two ranks: this process may use one only, or others keep them
    busy."""
    if len(os.sched_getaffinity(0)) < 2:
        raise BenchError("calibrating needs two processors, and this process may use one only")
    told = on_ranks(_rank, 2, writable(built_in))
    if told["share"] < LEAST_SHARE:
        raise BenchError(
            f"a rank had its processor for {told['share']:.0%} of the time only: calibrate while nothing else runs"
        )
    return [Found(**found) for found in told["found"]], told["seconds"]


def writable(values: Values) -> dict[str, int]:
    """Alike for all messages, but small enough for a table."""
    return {name: min(value, _EVER) for name, value in values.items()}


def _rank(rank: int, world: int, built_in: Values) -> dict[str, Any]:
    began, busy = time.monotonic(), time.process_time()
    bench = Bench()
    first = bench.measure(points(built_in), _BUDGET_S)
    chosen = {name: value for name, value in choose(first, built_in).items() if value != built_in[name]}
    again = bench.measure(differing(chosen, built_in), _CONFIRM_S)
    found = confirmed(again, chosen, built_in)
    seconds = time.monotonic() - began
    share = -agreed([-(time.process_time() - busy) / seconds])[0]  # ranks that wait for a moment spin
    return {"found": [asdict(one) for one in found], "seconds": seconds, "share": share}


class Bench:
    """Groups by value, and tensors. Both ranks make the same calls in the same order."""

    def __init__(self) -> None:
        self._shuffler = random.Random(0)
        most = max(size for one in SIZES for size in one.sizes)
        self._tensors = {"registered": ringlet.empty(most // 4), "ordinary": torch.empty(most // 4)}
        for tensor in self._tensors.values():
            tensor.fill_(1.0)

    def measure(self, wanted: Sequence[Point], budget_s: float) -> Times:
        """All points in turns, as often as the budget allows."""
        keys = dict.fromkeys((point.name, value) for point in wanted for value in point.values)
        groups = {key: group_with(table_line(*key, "")) for key in keys}
        try:
            return self._measure(wanted, groups, budget_s)
        finally:
            for group in groups.values():
                group.close()

    def _measure(
        self, wanted: Sequence[Point], groups: Mapping[tuple[str, int], ringlet.Group], budget_s: float
    ) -> Times:
        batches = {}
        for point in wanted:
            called = [seconds_a_call(way, 2) for way in self._ways(point, groups)]
            batches[point] = max(1, round(_SAMPLE_S / agreed([min(called)])[0]))
        times: Times = {point: [] for point in wanted}
        rounds, spent = _MOST_ROUNDS, time.monotonic()
        for turn in range(_MOST_ROUNDS):
            for point in wanted:
                times[point].append(in_turns(self._ways(point, groups), batches[point], self._shuffler))
            if turn == 1:  # the first has been a warm-up too
                each = agreed([(time.monotonic() - spent) / 2])[0]
                rounds = max(_LEAST_ROUNDS, min(_MOST_ROUNDS, int(budget_s / each)))
            if turn + 1 >= rounds:
                break
        return {point: [agreed(found) for found in times[point]] for point in wanted}

    def _ways(self, point: Point, groups: Mapping[tuple[str, int], ringlet.Group]) -> list[Callable[[], object]]:
        tensor = self._tensors[point.memory][: point.bytes // 4]
        return [
            functools.partial(ringlet.all_reduce, tensor, group=groups[point.name, value]) for value in point.values
        ]


def points(built_in: Values) -> list[Point]:
    """What the first pass measures; the built-in value, or the way that it takes, is among the values."""
    return [
        Point(one.name, memory, size, one.ways or tuple(sorted({*one.candidates, built_in[one.name]})))
        for one in SIZES for memory in one.memory for size in one.sizes
    ]  # fmt: skip


def gains(times: Sequence[Sequence[float]], usual: int, other: int) -> list[float]:
    """By round: the time of the value at place `usual` over that at `other`."""
    return [found[usual] / found[other] for found in times]


def faster(ratios: Sequence[float]) -> bool:
    """Clearly, so that noise cannot have made it: by the margin in the median, and in three rounds of four at all."""
    return statistics.median(ratios) >= 1 + MARGIN and sorted(ratios)[len(ratios) // 4] > 1


def slower(ratios: Sequence[float]) -> bool:
    """Even by a little, if it is so in three rounds of four."""
    return statistics.median(ratios) < 1 - LOSS and sorted(ratios)[-1 - len(ratios) // 4] < 1


def better(all_ratios: Iterable[Sequence[float]]) -> bool:
    """Faster somewhere, and slower nowhere."""
    found = list(all_ratios)
    return any(map(faster, found)) and not any(map(slower, found))


def choose(times: Times, built_in: Values) -> dict[str, int]:
    """The best value of each size; the built-in one where no other is clearly better."""
    found = {}
    for one in SIZES:
        usual = built_in[one.name]
        ratios: dict[int, list[list[float]]] = {value: [] for value in one.candidates}
        for point in (point for point in times if point.name == one.name):
            now = one.way(usual, point.bytes, point.values)
            for value in one.candidates:
                ratios[value].append(gains(times[point], now, one.way(value, point.bytes, point.values)))
        good = [value for value in one.candidates if value != usual and better(ratios[value])]
        found[one.name] = max(good, key=lambda value: _mean(ratios[value]), default=usual)
    return found


def _mean(all_ratios: Iterable[Sequence[float]]) -> float:
    return statistics.geometric_mean(statistics.median(ratios) for ratios in all_ratios)


def differing(chosen: Values, built_in: Values) -> list[Point]:
    """What the second pass measures: each chosen value against the built-in one, wherever they differ."""
    found = []
    for one in SIZES:
        if one.name in chosen:
            pair = (built_in[one.name], chosen[one.name])
            sizes = [size for size in one.sizes if len({one.way(value, size, pair) for value in pair}) > 1]
            found += [Point(one.name, memory, size, pair) for memory in one.memory for size in sizes]
    return found


def confirmed(again: Times, chosen: Values, built_in: Values) -> list[Found]:
    """The chosen values that are better a second time."""
    found = []
    for name, value in chosen.items():
        ratios = {point: gains(times, 0, 1) for point, times in again.items() if point.name == name}
        if better(ratios.values()):
            told = {f"{point.memory}/{point.bytes}": statistics.median(ratios[point]) for point in ratios}
            found.append(Found(name, value, told))
    return found


def table_line(name: str, value: int, processor: str, comment: str = "") -> str:
    """A line of a table: csrc/engine/tuning.h."""
    whose = f"  processor {processor}" if processor else ""
    return f"tuned  {name}  {value}B{whose}" + (f"  # {comment}" if comment else "") + "\n"


def calibration() -> str:
    """The sizes of this processor, as lines of a table. BenchError as `calibrate`."""
    built_in, processor = _C.tuned("", ""), _C.processor_model()
    os.environ["RINGLET_TABLE"] = ""
    found, _ = calibrate(built_in)
    lines = [table_line(one.name, one.value, processor, _told(one, built_in[one.name])) for one in found]
    return "".join(lines) or f"# the built-in sizes are right for {processor}\n"


def _told(one: Found, built_in: int) -> str:
    least, most = min(one.gains.values()), max(one.gains.values())
    usual = size_text(built_in) if built_in < _EVER else "no limit"
    return f"built in {usual}; {least:.2f}x to {most:.2f}x the speed where they differ"
