"""Derives rules of `auto`'s table (csrc/engine/rule.h) from measurements.

A rule is written if another algorithm gains a margin over the built-in choice, in the median of ratios within a round.
Neighbouring sizes with the same best algorithm share a rule. No rule reaches beyond the measured sizes and worlds: the
first begins at the smallest of them, even if that is 4 bytes, because calls on smaller elements are smaller.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .cases import format_bytes

MARGIN = 0.05

# (collective, bytes, world, medium) -> the choice of `auto` without further rules
BuiltIn = Callable[[str, int, int, str], str]


@dataclass(frozen=True)
class Timing:
    """The times of one algorithm at one size, in any unit, by round. medium: registered, staged, hosts or apart."""

    collective: str
    medium: str
    world: int
    bytes: int
    algorithm: str
    times: dict[int, float]


@dataclass(frozen=True)
class Rule:
    """above, up_to: bytes; above None: from no bytes on, because 1 byte was measured. gains: the built-in choice's time
    over the algorithm's, at each size measured."""

    collective: str
    medium: str
    world: int
    above: int | None
    up_to: int
    algorithm: str
    gains: tuple[float, ...]

    def columns(self) -> tuple[str, ...]:
        """The columns of the rule's line, with the comment last."""
        least, most = min(self.gains), max(self.gains)
        gained = f"{most:.2f}x" if len(self.gains) == 1 else f"{least:.2f}x to {most:.2f}x"
        return (
            self.collective,
            "" if self.above is None else f"above {size_text(self.above)}",
            f"up to {size_text(self.up_to)}" if self.up_to else "",  # a barrier has no size
            f"world {self.world}",
            self.medium,
            self.algorithm,
            f"# {gained} the built-in choice's speed",
        )


def size_text(size: int) -> str:
    """4096 -> "4KiB", as the table spells it."""
    return format_bytes(size).replace(" ", "")


def table_text(rules: Sequence[Rule]) -> str:
    """One rule a line, in columns."""
    rows = [rule.columns() for rule in rules]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{word:<{width}}" for word, width in zip(row, widths, strict=True) if width) for row in rows)
    return "".join(line.rstrip() + "\n" for line in lines)


def derive(timings: Iterable[Timing], built_in: BuiltIn, margin: float = MARGIN) -> list[Rule]:
    """The rules that gain the margin, in the order of the timings."""
    situations: dict[tuple[str, str, int], dict[int, list[Timing]]] = defaultdict(lambda: defaultdict(list))
    for timing in timings:
        situations[(timing.collective, timing.medium, timing.world)][timing.bytes].append(timing)
    rules = []
    for (collective, medium, world), sizes in situations.items():
        winners: list[tuple[int, str | None, float]] = []
        for size in sorted(sizes):
            usual = built_in(collective, size, world, medium)
            before = winners[-1][1] if winners else None
            winners.append((size, *_winner(_gains(sizes[size], usual), before, margin)))
        above: int | None = max(0, min(sizes) - 1) or None  # a rule fits sizes larger than `above`
        for algorithm, run in itertools.groupby(winners, key=lambda winner: winner[1]):
            same = list(run)
            up_to = same[-1][0]
            if algorithm is not None:
                gains = tuple(gain for _, _, gain in same)
                rules.append(Rule(collective, medium, world, above, up_to, algorithm, gains))
            above = up_to
    return rules


def _gains(timings: Sequence[Timing], usual: str) -> dict[str, float]:
    """By algorithm: the median over rounds of the usual one's time over its own."""
    base = next((timing.times for timing in timings if timing.algorithm == usual), {})
    gains = {}
    for timing in timings:
        ratios = [base[round_] / time for round_, time in timing.times.items() if round_ in base]
        if ratios and timing.algorithm != usual:
            gains[timing.algorithm] = statistics.median(ratios)
    return gains


def _winner(gains: dict[str, float], before: str | None, margin: float) -> tuple[str | None, float]:
    """The algorithm with the largest gain, or None. Keeps the previous size's unless one gains the margin over it."""
    best = max(gains, key=lambda name: gains[name], default=None)
    if best is None or gains[best] < 1 + margin:
        return None, 1.0
    if before in gains and gains[before] >= 1 + margin and gains[best] < gains[before] * (1 + margin):
        best = before
    return best, gains[best]
