"""Measures which sizes of the pull engine suit this processor, and all-reduce with these and the built-in ones.

    python benchmarks/calibrated.py --report benchmarks/results/

Prints the sizes (benchmarks/thresholds.py) as lines of a table, for RINGLET_TABLE. Then starts two ranks with a group
for each of the two tables, and a second group with the built-in sizes, whose ratio to the first is the noise. The
groups take turns in an order drawn anew, size by size, for --rounds rounds; a sample is as many calls as fill --ms. A
time is that of the slower rank. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from datetime import date
from pathlib import Path

import torch

import ringlet
from ringlet.bench import results
from ringlet.bench.cases import format_bytes
from ringlet.cli import outputs

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.page import facts
from benchmarks.thresholds import agreed, calibration, in_turns, seconds_a_call

SIZES = tuple(4096 << shift for shift in range(0, 15))  # 4 KiB to 64 MiB
WAYS = ("built in", "built in, again", "calibrated")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ms", type=float, default=10.0)
    parser.add_argument("--report", type=Path, help="write a page to this folder")
    args = parser.parse_args()
    outputs.check({"--report": args.report and args.report / "page.md"})
    load = os.getloadavg()[0]
    table = calibration()
    print(table, end="")
    with tempfile.TemporaryDirectory() as folder:
        for number, text in enumerate(("", "", table)):
            (Path(folder) / str(number)).write_text(text)
        ringlet.spawn(measure, 2, (folder, args.rounds, args.ms / 1000), transport="shared_memory")
        times = json.loads((Path(folder) / "times").read_text())
    lines = [line(*key.split("/"), found) for key, found in times.items()]
    print("\n".join(lines))
    if args.report:
        write(args.report, table, lines, load, args.rounds)


def measure(rank: int, folder: str, rounds: int, sample_s: float) -> None:
    """Writes the seconds of a call, by memory and size, by round, by way."""
    groups = []
    for number in range(len(WAYS)):
        os.environ["RINGLET_TABLE"] = f"{folder}/{number}"  # rank 0's counts
        groups.append(ringlet.new_group([0, 1]))
    shuffler = random.Random(0)
    times = {}
    for memory in ("registered", "ordinary"):
        whole = (ringlet.empty if memory == "registered" else torch.empty)(SIZES[-1] // 4).fill_(1.0)
        for size in SIZES:
            times[f"{memory}/{size}"] = of_size(whole[: size // 4], groups, rounds, sample_s, shuffler)
    if rank == 0:
        (Path(folder) / "times").write_text(json.dumps(times))


def of_size(
    tensor: torch.Tensor, groups: list[ringlet.Group], rounds: int, sample_s: float, shuffler: random.Random
) -> list[list[float]]:
    calls = max(1, round(sample_s / agreed([seconds_a_call(tensor, groups[0], 3)])[0]))
    found = [agreed(in_turns(tensor, groups, calls, shuffler)) for _ in range(rounds + 1)]
    return found[1:]  # the first was a warm-up


def line(memory: str, size: str, found: list[list[float]]) -> str:
    """Medians in µs, and the medians and ranges of ratios within a round."""
    times = [f"{1e6 * statistics.median(column):.2f}" for column in zip(*found, strict=True)]
    ratios = [ratio([row[0] / row[place] for row in found]) for place in (1, 2)]
    return "| " + " | ".join([memory, format_bytes(int(size)), times[0], times[2], *ratios]) + " |"


def ratio(found: list[float]) -> str:
    return f"{statistics.median(found):.2f}x ({min(found):.2f} to {max(found):.2f})"


def write(folder: Path, table: str, lines: list[str], load: float, rounds: int) -> None:
    meta = results.circumstances(load)
    name = meta["machine"]["name"]
    text = [f"# Calibrated sizes against the built-in ones on {name}, {str(meta['date'])[:10]}", ""]
    text += ["Written by `benchmarks/calibrated.py`.", "", *facts(meta), "", "The table:", "", "```"]
    text += [table.rstrip(), "```", ""]
    text += [
        f"All-reduce of float32, 2 ranks, {rounds} rounds. Times are medians in µs, ratios are of the time with the"
    ]
    text += [
        "built-in sizes, within a round: median (least to most). The noise is a second group with the same sizes.",
        "",
    ]
    text += ["| memory | size | built in | calibrated | noise | calibrated |", "|---|---:|---:|---:|---:|---:|", *lines]
    path = folder / f"{date.today()}-{name}-calibrated.md"
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
