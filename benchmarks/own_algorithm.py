"""Algorithms in Python against their built-in twins: the same bits, and which time?

    python benchmarks/own_algorithm.py --file tests/support/own_algorithms.py --twins ring=own_ring,swing=own_swing

On each transport the ranks call both in turns, in batches, in a new order each round. A batch's time is that of the
slowest rank. Prints the median over rounds of the ratios of a round, and the range in which the middle half lies.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ringlet

TRANSPORTS = ("threads", "shared_memory", "tcp", "two hosts")
HEAD = ("transport", "ranks", "bytes", "built in", "own", "us", "ratio", "middle half", "same bits")


def twins_of(text: str) -> list[tuple[str, str]]:
    return [(one.partition("=")[0], one.partition("=")[2]) for one in text.split(",")]


def same_bits(count: int, built_in: str, own: str) -> bool:
    torch.manual_seed(ringlet.current().rank)
    first = torch.randn(count)
    second = first.clone()
    ringlet.all_reduce(first, algorithm=built_in)
    ringlet.all_reduce(second, algorithm=own)
    different = torch.tensor([float(not torch.equal(first, second))])
    ringlet.all_reduce(different)
    return not different.item()


def batch_us(tensor: torch.Tensor, algorithm: str, calls: int) -> float:
    """Microseconds a call, of the slowest rank."""
    ringlet.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        ringlet.all_reduce(tensor, algorithm=algorithm)
    spent = torch.tensor([(time.perf_counter() - begin) / calls * 1e6])
    ringlet.all_reduce(spent, "max")
    return spent.item()


def compare(transport: str, nbytes: int, twins: tuple[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """One line of the table, on all ranks."""
    count = nbytes // 4
    equal = same_bits(count, *twins)
    tensor = torch.zeros(count)
    for name in twins:
        batch_us(tensor, name, 3)
    calls = max(3, int(options.batch_ms * 1000 / batch_us(tensor, twins[0], 5)))
    order = random.Random(nbytes)  # the same on all ranks
    times: dict[str, list[float]] = {name: [] for name in twins}
    for _ in range(options.rounds):
        for name in order.sample(twins, 2):
            times[name].append(batch_us(tensor, name, calls))
    ratios = [own / known for known, own in zip(*(times[name] for name in twins), strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "transport": transport, "ranks": ringlet.current().world, "bytes": nbytes, "built in": twins[0],
        "own": twins[1], "us": round(statistics.median(times[twins[0]]), 1), "ratio": f"{middle:.3f}",
        "middle half": f"{low:.3f} to {high:.3f}", "same bits": "yes" if equal else "NO",
    }  # fmt: skip


def rank_main(rank: int, transport: str, options: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    if transport == "two hosts":
        os.environ["RINGLET_HOST_ID"] = f"host {rank % 2}"
    way = "auto" if transport == "two hosts" else transport
    if transport != "threads":
        timeout = timedelta(seconds=120)
        ringlet.init(rank, options.world, dist.FileStore(store, options.world), transport=way, timeout=timeout)
    for nbytes in options.bytes:
        for twins in options.twins:
            row = compare(transport, nbytes, twins, options)
            if rank == 0:
                show(row, options)
    if transport != "threads":
        ringlet.finalize()


def show(row: dict[str, Any], options: argparse.Namespace) -> None:
    print("| " + " | ".join(str(row[name]) for name in HEAD) + " |", flush=True)
    if options.json:
        with options.json.open("a") as file:
            file.write(json.dumps(row) + "\n")


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
    parser.add_argument("--json", type=Path, help="append one row a line to this file")
    options = parser.parse_args()
    os.environ["RINGLET_ALGORITHMS"] = str(options.file.absolute())
    print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|", flush=True)
    for transport in options.transports:
        if transport == "threads":
            ringlet.spawn(rank_main, options.world, (transport, options, ""), transport="threads")
        else:
            with tempfile.TemporaryDirectory() as folder:
                arguments = (transport, options, f"{folder}/store")
                torch.multiprocessing.spawn(rank_main, arguments, options.world)


if __name__ == "__main__":
    main()
