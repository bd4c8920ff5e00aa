"""Algorithms in Python against their built-in twins: the same bits, and which time?

    python -m benchmarks.own_algorithm --file tests/support/own_algorithms.py --twins ring=own_ring,swing=own_swing

On each transport the ranks call both in turns, in batches, in a new order each round. A batch's time is that of the
slowest rank. Prints the median over rounds of the ratios of a round, and the range in which the middle half lies.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import statistics
from pathlib import Path
from typing import Any

import torch
from benchmarks import page
from benchmarks.local_ranks import agreed, in_turns, on_ranks

import ringlet

TRANSPORTS = ("threads", "shared_memory", "tcp", "two hosts")
HEAD = ("transport", "ranks", "bytes", "built in", "own", "us", "ratio", "middle half", "same bits")


def twins_of(text: str) -> list[tuple[str, str]]:
    return [(one.partition("=")[0], one.partition("=")[2]) for one in text.split(",")]


def same_bits(count: int, twins: tuple[str, str]) -> bool:
    mine = torch.randn(count, generator=torch.Generator().manual_seed(ringlet.current().rank))
    first, second = mine.clone(), mine.clone()
    ringlet.all_reduce(first, algorithm=twins[0])
    ringlet.all_reduce(second, algorithm=twins[1])
    return agreed([float(not torch.equal(first, second))]) == [0.0]


def compare(transport: str, nbytes: int, twins: tuple[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """A row, on all ranks."""
    equal = same_bits(nbytes // 4, twins)
    ways = [functools.partial(ringlet.all_reduce, torch.zeros(nbytes // 4), algorithm=name) for name in twins]
    shuffler = random.Random(nbytes)  # the same on all ranks
    calls = max(3, int(options.batch_ms / 1000 / agreed(in_turns(ways, 5, shuffler))[0]))
    times = [agreed(in_turns(ways, calls, shuffler)) for _ in range(options.rounds)]
    low, middle, high = statistics.quantiles((own / known for known, own in times), n=4)
    return {
        "transport": transport, "ranks": ringlet.current().world, "bytes": nbytes, "built in": twins[0],
        "own": twins[1], "us": round(1e6 * statistics.median(known for known, _ in times), 1),
        "ratio": f"{middle:.3f}", "middle half": f"{low:.3f} to {high:.3f}", "same bits": "yes" if equal else "NO",
    }  # fmt: skip


def measure(rank: int, world: int, transport: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    return [compare(transport, nbytes, twins, options) for nbytes in options.bytes for twins in options.twins]


def on_threads(options: argparse.Namespace) -> list[dict[str, Any]]:
    found: dict[int, list[dict[str, Any]]] = {}

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        found[rank] = measure(rank, options.world, "threads", options)

    ringlet.spawn(run, options.world, transport="threads")
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, required=True, help="file of algorithms")
    parser.add_argument("--twins", type=twins_of, required=True, help="built_in=own,...")
    parser.add_argument("--transports", type=lambda text: text.split(","), default=TRANSPORTS)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument(
        "--bytes", type=lambda text: [int(n) for n in text.split(",")], default=[1 << 10, 1 << 16, 1 << 20]
    )
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--batch-ms", type=float, default=10.0)
    options = page.parse(parser)
    os.environ["RINGLET_ALGORITHMS"] = str(options.file.absolute())
    rows = []
    for transport in options.transports:
        if transport == "threads":
            rows += on_threads(options)
        else:
            os.environ["RINGLET_TRANSPORT"] = "auto" if transport == "two hosts" else transport
            rows += on_ranks(measure, options.world, transport, options, hosts=1 + (transport == "two hosts"))
    lines = page.markdown_table(HEAD, [[row[name] for name in HEAD] for row in rows], left=1)
    print("\n".join(lines))
    page.write(options, "own-algorithm", "Algorithms in Python against their built-in twins", lines, rows)


if __name__ == "__main__":
    main()
