"""All-reduce, and a message there and back, of which the ranks try the ways (csrc/engine/trial.h): copies through or
past the caches, calls in place or staged, one_shot or two_shot; against copies that stay in the caches, and calls that
go by the rules alone.

    python benchmarks/hand_over.py --report benchmarks/results/

Starts two ranks --starts times, because a virtual machine may put its processors elsewhere each time. Each start has a
group for each way and calls them in turns, in an order drawn anew, size by size, for --rounds rounds; a sample is as
many calls as fill --ms. A time is that of the slower rank. The time of a line there and back tells how far the two
cores were from each other. *From memory*: each call takes the next of so many tensors that no cache holds them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

import ringlet
from ringlet import _C
from ringlet.bench import results
from ringlet.bench.cases import format_bytes
from ringlet.cli import outputs

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks import machine_limit
from benchmarks.page import facts
from benchmarks.thresholds import agreed, in_turns, seconds_a_call, table_line

SIZES = (2048, 4096, 8192, 16 << 10, 64 << 10, 256 << 10, *(512 << 10 << shift for shift in range(8)))  # to 64 MiB
BUILT_IN = _C.tuned("", "")
WARM_UP, WARM_UP_OF_LONG = 700, 170  # calls: the first trials end after at most 656, of long ones 159
FROM_MEMORY = 128 << 20  # bytes of all tensors
HEAD = "| start | a line there and back (ns) | call | size | cached (us) | by time (us) | cached / by time |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--starts", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ms", type=float, default=3.0)
    parser.add_argument("--report", type=Path, help="write a page to this folder")
    args = parser.parse_args()
    outputs.check({"--report": args.report and args.report / "page.md"})
    load = os.getloadavg()[0]
    lines = [HEAD, "|---:|---:|---|---:|---:|---:|---:|"]
    print("\n".join(lines), flush=True)
    for start in range(1, args.starts + 1):
        with tempfile.TemporaryDirectory() as folder:
            ringlet.spawn(measure, 2, (folder, args.rounds, args.ms), transport="shared_memory")
            found = json.loads(Path(folder, "times").read_text())
        far = f"{found['before']:.0f}, {found['after']:.0f} after"
        for key, rows in found["times"].items():
            what, _, size = key.partition("/")
            cached, timed = (statistics.median(row[place] for row in rows) * 1e6 for place in (0, 1))
            ratios = sorted(row[0] / row[1] for row in rows)
            ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            cells = (start, far, what, format_bytes(int(size)), f"{cached:.1f}", f"{timed:.1f}", ratio)
            lines.append("| " + " | ".join(map(str, cells)) + " |")
            print(lines[-1], flush=True)
    if args.report:
        write(args.report, lines, load, args.rounds)


def measure(rank: int, folder: str, rounds: int, ms: float) -> None:
    torch.set_num_threads(1)
    groups = [group(folder, rank, value) for value in (1 << 40, BUILT_IN["timed_copy_bytes"])]
    shuffler = random.Random(0)  # the same on both ranks
    before, times = distance(rank), {}

    def exchange(tensor: torch.Tensor, group: ringlet.Group) -> None:
        for sends in (rank == 0, rank == 1):
            (ringlet.send if sends else ringlet.recv)(tensor, 1 - rank, group=group)

    turn = itertools.count()
    large = [size for size in SIZES if size > BUILT_IN["small_bytes_of_two"]]  # smaller ones are never read in place

    def reduce_next(tensors: list[torch.Tensor], group: ringlet.Group) -> None:
        ringlet.all_reduce(tensors[next(turn) % len(tensors)], group=group)

    def registered(count: int) -> torch.Tensor:
        return ringlet.empty(count).fill_(1.0)

    for what, call, allocate, sizes in (
        ("all-reduce, ordinary", ringlet.all_reduce, torch.ones, SIZES),
        ("all-reduce, registered", ringlet.all_reduce, registered, SIZES),
        ("all-reduce, registered, from memory", reduce_next, several(registered), large),
        ("message, ordinary", exchange, torch.ones, SIZES),
    ):
        for size in sizes:
            tensor = allocate(size // 4)
            calls = max(1, round(ms / 1000 / agreed([seconds_a_call(tensor, groups[0], 5, call)])[0]))
            warm_up = WARM_UP if size < BUILT_IN["streaming_bytes"] else WARM_UP_OF_LONG
            in_turns(tensor, groups, max(calls, warm_up), shuffler, call)
            found = [in_turns(tensor, groups, calls, shuffler, call) for _ in range(rounds)]
            times[f"{what}/{size}"] = [agreed(row) for row in found]
    after = distance(rank)
    if rank == 0:
        Path(folder, "times").write_text(json.dumps({"before": before, "after": after, "times": times}))


def several(allocate: Callable[[int], torch.Tensor]) -> Callable[[int], list[torch.Tensor]]:
    return lambda count: [allocate(count) for _ in range(max(2, FROM_MEMORY // (4 * count)))]


def group(folder: str, rank: int, timed_copy_bytes: int) -> ringlet.Group:
    """A group of both ranks. It tries nothing shorter than `timed_copy_bytes`."""
    table = Path(folder, f"{timed_copy_bytes}-{rank}")
    table.write_text(table_line("timed_copy_bytes", timed_copy_bytes, ""))
    os.environ["RINGLET_TABLE"] = str(table)
    made = ringlet.new_group([0, 1])
    assert made is not None
    return made


def distance(rank: int) -> float:
    """Nanoseconds of a line between the two processors, there and back; rank 1 waits asleep."""
    mine = machine_limit.line_ns() if rank == 0 else 0.0
    return agreed([mine])[0]


def write(folder: Path, lines: list[str], load: float, rounds: int) -> None:
    meta = results.circumstances(load)
    name = meta["machine"]["name"]
    text = [f"# Slow copies past the caches on {name}, {str(meta['date'])[:10]}", "", *facts(meta), ""]
    text += [
        f"All-reduce of float32 with `auto`, and a message there and back, 2 ranks, {rounds} rounds a start. Ratios",
        "are within a round: median (least to most). `by time`: the ranks try which way is quicker. `cached`:",
        "copies stay in the caches, and calls go by the rules. `from memory`: each call takes the next of so many",
        "tensors that no cache holds them.",
        "",
        *lines,
    ]
    path = folder / f"{date.today()}-{name}-hand-over.md"
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
