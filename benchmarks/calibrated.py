"""Measures which sizes of the pull engine suit this processor, and all-reduce with these and the built-in ones.

    python -m benchmarks.calibrated --report benchmarks/results/

Prints the sizes (benchmarks/thresholds.py) as lines of a table, for RINGLET_TABLE. Then starts two ranks with a group
for each of the two tables, and a second group with the built-in sizes, whose ratio to the first is the noise. The
groups take turns in an order drawn anew, size by size, for --rounds rounds; a sample is as many calls as fill --ms. A
time is that of the slower rank. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
from collections.abc import Callable, Sequence

import torch
from benchmarks import page
from benchmarks.local_ranks import agreed, group_with, in_turns, on_ranks, seconds_a_call
from benchmarks.thresholds import calibration

import ringlet
from ringlet.bench.cases import format_bytes

SIZES = tuple(4096 << shift for shift in range(0, 15))  # 4 KiB to 64 MiB
HEAD = ("memory", "size", "built in", "calibrated", "noise", "calibrated")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ms", type=float, default=10.0)
    options = page.parse(parser, rows=False)
    table = calibration()
    print(table, end="")
    times = on_ranks(measure, 2, ("", "", table), options.rounds, options.ms / 1000)
    lines = page.markdown_table(HEAD, [cells(*key.split("/"), found) for key, found in times.items()], left=1)
    print("\n".join(lines))
    told = [
        *("The table:", "", "```", table.rstrip(), "```", ""),
        f"All-reduce of float32, 2 ranks, {options.rounds} rounds. Times are medians in µs, ratios are of the time",
        "with the built-in sizes, within a round: median (least to most). Noise: a second group with these sizes.",
    ]
    page.write(options, "calibrated", "Calibrated sizes against the built-in ones", [*told, "", *lines])


def measure(rank: int, world: int, tables: Sequence[str], rounds: int, sample_s: float) -> dict[str, list[list[float]]]:
    """The seconds of a call, by memory and size, by round, by table."""
    groups = [group_with(table) for table in tables]
    shuffler = random.Random(0)
    times = {}
    for memory in ("registered", "ordinary"):
        whole = (ringlet.empty if memory == "registered" else torch.empty)(SIZES[-1] // 4).fill_(1.0)
        for size in SIZES:
            ways = [functools.partial(ringlet.all_reduce, whole[: size // 4], group=group) for group in groups]
            times[f"{memory}/{size}"] = of_size(ways, rounds, sample_s, shuffler)
    return times


def of_size(
    ways: Sequence[Callable[[], object]], rounds: int, sample_s: float, shuffler: random.Random
) -> list[list[float]]:
    calls = max(1, round(sample_s / agreed([seconds_a_call(ways[0], 3)])[0]))
    found = [agreed(in_turns(ways, calls, shuffler)) for _ in range(rounds + 1)]
    return found[1:]  # the first was a warm-up


def cells(memory: str, size: str, found: list[list[float]]) -> list[str]:
    """Medians in µs, and the medians and ranges of ratios within a round."""
    times = [f"{1e6 * statistics.median(column):.2f}" for column in zip(*found, strict=True)]
    ratios = [ratio([row[0] / row[place] for row in found]) for place in (1, 2)]
    return [memory, format_bytes(int(size)), times[0], times[2], *ratios]


def ratio(found: list[float]) -> str:
    return f"{statistics.median(found):.2f}x ({min(found):.2f} to {max(found):.2f})"


if __name__ == "__main__":
    main()
