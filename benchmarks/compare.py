#!/usr/bin/env python3
"""Compares two files of `ringlet bench --json`: is ringlet in NEW slower than in OLD?

    benchmarks/compare.py OLD.jsonl NEW.jsonl [--tolerance 0.1] [--relative-to openmpi,gloo]

Cases are paired by everything that names them; a ratio is old time / new time (above 1: faster), medians over rounds.
The two runs do not take turns, so a machine that has drifted between them shows as a change. `--relative-to LIBRARY`
divides it out by that library's times of the same file, round and size; of several, the first that both files have.

A configuration has regressed if its geometric mean is slower than the tolerance, and beyond noise: each round of NEW is
slower than each round of OLD, in the geometric mean over the cases. `--per-case` asks the same of each case by itself.

Exit code: 0 no regression, 1 a regression, 2 wrong elements, or nothing in common.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CASE = ("collective", "world", "bytes", "dtype", "op")
CONFIG = ("library", "algorithm", "transport", "memory", "via")

Key = tuple[Any, ...]
Times = dict[Key, dict[Key, dict[int, float]]]  # configuration -> case -> round -> p50, in µs or times of the reference


@dataclass(frozen=True)
class Change:
    """Of one configuration, over some cases: geometric means, one for each round, of the old and the new times."""

    old: list[float]
    new: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.old) / statistics.median(self.new)

    def regressed(self, tolerance: float) -> bool:
        return self.ratio < 1 / (1 + tolerance) and min(self.new) > max(self.old)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def libraries(rows: Iterable[dict[str, Any]]) -> set[str]:
    return {row["library"] for row in rows}


def times(rows: list[dict[str, Any]], reference: str | None) -> Times:
    """ringlet's times (of a run without ringlet, all), in the reference's times of the same round if there is one."""
    base = {
        (*(row[key] for key in CASE), row["round"]): row["time_us_p50"] for row in rows if row["library"] == reference
    }
    wanted = {"ringlet"} & libraries(rows) or libraries(rows) - {reference}
    found: Times = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        case, round_ = tuple(row[key] for key in CASE), row["round"]
        if row["library"] in wanted and (not reference or (*case, round_) in base):
            config = tuple(row[key] for key in CONFIG)
            found[config][case][round_] = row["time_us_p50"] / base.get((*case, round_), 1.0)
    return found


def mean_rounds(cases: Iterable[dict[int, float]]) -> list[float]:
    """Geometric means over the cases, one for each round that all of them have."""
    cases = list(cases)
    shared = set.intersection(*(set(rounds) for rounds in cases))
    return [math.exp(statistics.fmean(math.log(rounds[each]) for rounds in cases)) for each in sorted(shared)]


def compare(old: Times, new: Times) -> dict[Key, dict[Key | None, Change]]:
    """configuration -> case, or None for all of them -> the change."""
    found: dict[Key, dict[Key | None, Change]] = {}
    for config in sorted(old.keys() & new.keys()):
        shared = sorted(old[config].keys() & new[config].keys())
        if shared:
            sets = {**{case: [case] for case in shared}, None: shared}
            found[config] = {
                name: Change(mean_rounds(old[config][c] for c in cases), mean_rounds(new[config][c] for c in cases))
                for name, cases in sets.items()
            }
    return found


def report(found: dict[Key, dict[Key | None, Change]], tolerance: float, per_case: bool) -> bool:
    """Prints every ratio; whether something has regressed."""
    slower = False
    for config, changes in found.items():
        print(" ".join(config))
        for case, change in changes.items():
            worse = (per_case or case is None) and change.regressed(tolerance)
            slower |= worse
            what = "geometric mean" if case is None else "{0} {3} {4} {1} ranks {2:>10} B".format(*case)
            print(f"  {what:<44} {change.ratio:6.3f}x{'  SLOWER' if worse else ''}")
    return slower


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument(
        "--tolerance", type=float, default=0.1, help="slowdown that passes, as a fraction (default 0.1)"
    )
    parser.add_argument("--relative-to", metavar="LIBRARY,...", help="divide by this library's times in the same file")
    parser.add_argument("--per-case", action="store_true", help="a regression of one case counts too")
    args = parser.parse_args()
    old, new = read(args.old), read(args.new)
    asked = args.relative_to.split(",") if args.relative_to else []
    reference = next((name for name in asked if name in libraries(old) & libraries(new)), None)
    found = compare(times(old, reference), times(new, reference)) if reference or not asked else {}
    if not found:
        print("the files have no case in common", file=sys.stderr)
        return 2
    print(f"old time / new time{f', relative to {reference}' if reference else ''}")
    slower = report(found, args.tolerance, args.per_case)
    wrong = sum(row["wrong"] or 0 for row in new)
    if wrong:
        print(f"{wrong} wrong elements in {args.new}", file=sys.stderr)
        return 2
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
