"""All-reduce, and a message there and back, of which the ranks try the ways (csrc/engine/trial.h): copies through or
past the caches, calls in place or staged, one_shot or two_shot; against copies that stay in the caches, and calls that
go by the rules alone.

    python -m benchmarks.hand_over --report benchmarks/results/

Starts two ranks --starts times, because a virtual machine may put its processors elsewhere each time. Each start has a
group for each way and calls them in turns, in an order drawn anew, size by size, for --rounds rounds; a sample is as
many calls as fill --ms. A time is that of the slower rank. The time of a line there and back tells how far the two
cores were from each other. *From memory*: each call takes the next of so many tensors that no cache holds them.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import statistics
from collections.abc import Callable
from typing import Any

import torch
from benchmarks import machine_limit, page
from benchmarks.local_ranks import agreed, group_with, in_turns, on_ranks, seconds_a_call
from benchmarks.thresholds import table_line

import ringlet
from ringlet import _C
from ringlet.bench.cases import format_bytes

SIZES = (2048, 4096, 8192, 16 << 10, 64 << 10, 256 << 10, *(512 << 10 << shift for shift in range(8)))  # to 64 MiB
BUILT_IN = _C.tuned("", "")
WARM_UP, WARM_UP_OF_LONG = 700, 170  # calls: the first trials end after at most 656, of long ones 159
FROM_MEMORY = 128 << 20  # bytes of all tensors
HEAD = ("start", "a line there and back (ns)", "call", "size", "cached (us)", "by time (us)", "cached / by time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--starts", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ms", type=float, default=3.0)
    options = page.parse(parser, rows=False)
    lines = page.markdown_table(HEAD, [], left=3)
    print("\n".join(lines), flush=True)
    for start in range(1, options.starts + 1):
        found = on_ranks(measure, 2, options.rounds, options.ms)
        far = f"{found['before']:.0f}, {found['after']:.0f} after"
        for key, rows in found["times"].items():
            what, _, size = key.partition("/")
            cached, timed = (statistics.median(row[place] for row in rows) * 1e6 for place in (0, 1))
            ratios = sorted(row[0] / row[1] for row in rows)
            ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            cells = (start, far, what, format_bytes(int(size)), f"{cached:.1f}", f"{timed:.1f}", ratio)
            lines.append(page.markdown_row(cells))
            print(lines[-1], flush=True)
    told = [
        f"All-reduce of float32 with `auto`, and a message there and back, 2 ranks, {options.rounds} rounds a start.",
        "Ratios are within a round: median (least to most). `by time`: the ranks try which way is quicker. `cached`:",
        "copies stay in the caches, and calls go by the rules. `from memory`: each call takes the next of so many",
        "tensors that no cache holds them.",
    ]
    page.write(options, "hand-over", "Slow copies past the caches", [*told, "", *lines])


def measure(rank: int, world: int, rounds: int, ms: float) -> dict[str, Any]:
    """Seconds of a call by rounds, without trials and with them, by call and size; how far the cores are apart."""
    never, usual = 1 << 40, BUILT_IN["timed_copy_bytes"]
    groups = [group_with(table_line("timed_copy_bytes", least, "")) for least in (never, usual)]
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
            ways = [functools.partial(call, tensor, group=group) for group in groups]
            calls = max(1, round(ms / 1000 / agreed([seconds_a_call(ways[0], 5)])[0]))
            warm_up = WARM_UP if size < BUILT_IN["streaming_bytes"] else WARM_UP_OF_LONG
            in_turns(ways, max(calls, warm_up), shuffler)
            found = [in_turns(ways, calls, shuffler) for _ in range(rounds)]
            times[f"{what}/{size}"] = [agreed(row) for row in found]
    return {"before": before, "after": distance(rank), "times": times}


def several(allocate: Callable[[int], torch.Tensor]) -> Callable[[int], list[torch.Tensor]]:
    return lambda count: [allocate(count) for _ in range(max(2, FROM_MEMORY // (4 * count)))]


def distance(rank: int) -> float:
    """Nanoseconds of a line between the two processors, there and back; rank 1 waits asleep."""
    mine = machine_limit.line_ns() if rank == 0 else 0.0
    return agreed([mine])[0]


if __name__ == "__main__":
    main()
