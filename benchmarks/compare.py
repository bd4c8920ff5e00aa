#!/usr/bin/env python3
"""Compares two files of `ringlet bench --json`: is NEW slower than OLD?

    benchmarks/compare.py OLD.jsonl NEW.jsonl [--tolerance 0.1] [--relative-to openmpi]

Cases are paired by everything that names them and by round; a ratio is old time / new time (above 1: faster), its
median taken over rounds. Two files are not interleaved, so a machine that has drifted between them shows as a
change: `--relative-to LIBRARY` divides it out by that library's times in the same file, round and size.

Exit code: 0 as fast or faster, 1 slower than the tolerance in the geometric mean of a configuration, 2 wrong elements
or nothing in common.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

CASE = ("collective", "world", "bytes", "dtype", "op")
CONFIG = ("library", "algorithm", "transport", "memory", "via")

Key = tuple[Any, ...]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def times(rows: list[dict[str, Any]], reference: str | None) -> dict[Key, float]:
    """(configuration, case, round) -> p50, in µs or in multiples of the reference's."""
    base = {
        (*(row[key] for key in CASE), row["round"]): row["time_us_p50"] for row in rows if row["library"] == reference
    }
    found = {}
    for row in rows:
        case = (*(row[key] for key in CASE), row["round"])
        if row["library"] == reference or (reference and case not in base):
            continue
        found[(tuple(row[key] for key in CONFIG), case)] = row["time_us_p50"] / base.get(case, 1.0)
    return found


def ratios(old: dict[Key, float], new: dict[Key, float]) -> dict[Key, dict[Key, float]]:
    """configuration -> case -> median over rounds of old / new."""
    rounds: dict[Key, list[float]] = defaultdict(list)
    for key in old.keys() & new.keys():
        config, case = key
        rounds[(config, case[:-1])].append(old[key] / new[key])
    found: dict[Key, dict[Key, float]] = defaultdict(dict)
    for config, case in sorted(rounds):
        found[config][case] = statistics.median(rounds[(config, case)])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument(
        "--tolerance", type=float, default=0.1, help="slowdown that passes, as a fraction (default 0.1)"
    )
    parser.add_argument("--relative-to", metavar="LIBRARY", help="divide by this library's times in the same file")
    args = parser.parse_args()
    old, new = read(args.old), read(args.new)
    found = ratios(times(old, args.relative_to), times(new, args.relative_to))
    if not found:
        print("the files have no case in common", file=sys.stderr)
        return 2
    slower = False
    for config, cases in found.items():
        print(" ".join(config) + (f", relative to {args.relative_to}" if args.relative_to else ""))
        for (collective, world, size, dtype, op), ratio in cases.items():
            print(f"  {collective} {dtype} {op} {world} ranks {size:>10} B  {ratio:6.2f}x")
        mean = math.exp(statistics.fmean(map(math.log, cases.values())))
        worse = mean < 1 / (1 + args.tolerance)
        slower |= worse
        print(f"  geometric mean {mean:.3f}x{'  SLOWER' if worse else ''}")
    wrong = sum(row["wrong"] or 0 for row in new)
    if wrong:
        print(f"{wrong} wrong elements in {args.new}", file=sys.stderr)
        return 2
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
