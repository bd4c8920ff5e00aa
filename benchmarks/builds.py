"""Is this build slower than another? Both live at once and take turns of a few milliseconds.

    git worktree add --detach /tmp/other HEAD~1 && (cd /tmp/other && python setup.py build_ext --inplace)
    python -m benchmarks.builds /tmp/other/python --report benchmarks/results/

Starts two ranks of each build, --starts times, because a virtual machine may put its processors elsewhere each time.
All wait for their turn but two. In each of --rounds rounds each case has a turn of each build, in an order drawn anew.
A time is that of the slower rank; a ratio is the other build's time divided by this one's within a round. The other
build is started twice: its ratio to itself shows what the machine's noise is.

--way: `call` (all_reduce), `async` (posted, and waited for at once), `torch` (torch.distributed's all_reduce) or
`message` (send and recv, there and back). Exits with 1 if a geometric mean is under --least and further from 1 than the
other build's to itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ringlet

SERVES = sys.argv[1:2] == ["serve"]  # this is a rank, perhaps of a build that has not what follows
if not SERVES:
    from benchmarks import page

    from ringlet.bench.cases import format_bytes
    from ringlet.cli import options

WAYS = ("call", "async", "torch", "message")
MEMORIES = ("registered", "ordinary")
SIZES = tuple(4 << shift for shift in range(0, 25, 2))  # to 64 MiB
WARM_UP, FIRST = 10, 20  # calls: before each turn, and of the turn that says how many fill --ms
END_S = 30  # for a rank to end by itself

Case = tuple[str, str, int]  # way, memory, bytes


def serve(rank: int, transport: str, folder: str) -> None:
    """A rank of whichever build: makes the calls that standard input asks for, and prints microseconds a call."""
    torch.set_num_threads(1)
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[rank % len(processors)]})
    ringlet.init(rank, 2, dist.FileStore(f"{folder}/ringlet", 2), transport=transport)
    dist.init_process_group("cpu:ringlet", store=dist.FileStore(f"{folder}/torch", 2), rank=rank, world_size=2)
    for line in sys.stdin:
        way, memory, size, calls = json.loads(line)
        tensor = (ringlet.empty if memory == "registered" else torch.empty)(size // 4).fill_(0)
        call = call_of(way, tensor, rank)
        ringlet.barrier()
        for _ in range(WARM_UP):
            call()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        print((time.perf_counter() - began) / calls * 1e6, flush=True)


def call_of(way: str, tensor: torch.Tensor, rank: int) -> Callable[[], Any]:
    if way == "call":
        return lambda: ringlet.all_reduce(tensor)
    if way == "async":
        return lambda: ringlet.all_reduce(tensor, async_op=True).wait()
    if way == "torch":
        return lambda: dist.all_reduce(tensor)
    there, back = (ringlet.send, ringlet.recv) if rank == 0 else (ringlet.recv, ringlet.send)
    return lambda: (there(tensor, 1 - rank), back(tensor, 1 - rank))


class Build:
    """Two ranks of the build whose package is in folder `path`."""

    def __init__(self, path: Path, transport: str) -> None:
        self.path, self._store = path, tempfile.TemporaryDirectory()
        self.ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "serve", str(rank), transport, self._store.name],
                env={**os.environ, "PYTHONPATH": str(path)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip

    def turn(self, case: Case, calls: int) -> float:
        """Microseconds a call."""
        with contextlib.suppress(BrokenPipeError):  # it says nothing, then
            for rank in self.ranks:
                print(json.dumps([*case, calls]), file=rank.stdin, flush=True)
        told = [rank.stdout.readline() for rank in self.ranks]
        if not all(told):
            ended = next(rank for rank, line in enumerate(told) if not line)
            raise SystemExit(f"rank {ended} of {self.path} ended before {' '.join(map(str, case))}: its error is above")
        return max(map(float, told))

    def end(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(BrokenPipeError):
                rank.stdin.close()
        for rank in self.ranks:
            try:
                rank.wait(timeout=END_S)
            except subprocess.TimeoutExpired:
                rank.kill()
        self._store.cleanup()


def measure(paths: list[Path], cases: list[Case], args: argparse.Namespace) -> Iterator[tuple[Case, list[float]]]:
    """Round after round, case after case, the times of all builds."""
    with contextlib.ExitStack() as ends:
        builds = [Build(path, args.transport) for path in paths]
        for build in builds:
            ends.callback(build.end)
        calls = {}
        for case in cases:
            slowest = max(build.turn(case, FIRST) for build in builds * 2)
            calls[case] = max(FIRST, int(args.ms * 1000 / slowest))
        for _ in range(args.rounds):
            for case in cases:
                order = random.sample(range(len(builds)), len(builds))
                times = {place: builds[place].turn(case, calls[case]) for place in order}
                yield case, [times[place] for place in range(len(builds))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=Path, help="the folder of the other build's package")
    parser.add_argument("--way", type=options.names(WAYS), default=WAYS[:1])
    parser.add_argument("--memory", type=options.names(MEMORIES), default=MEMORIES)
    parser.add_argument("--sizes", type=options.sizes, default=SIZES)
    parser.add_argument("--transport", default="shared_memory")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ms", type=float, default=15.0)
    parser.add_argument("--least", type=float, default=0.95)
    args = page.parse(parser, rows=False)
    paths = [args.other.resolve(), args.other.resolve(), Path(ringlet.__file__).resolve().parents[1]]
    cases = [(way, memory, size) for way in args.way for memory in args.memory for size in args.sizes]
    found: dict[Case, list[list[float]]] = defaultdict(list)
    for _ in range(args.starts):
        for case, times in measure(paths, cases, args):
            found[case].append(times)
    lines = table(found)
    print("\n".join(lines))
    itself, ratio = (statistics.geometric_mean(of(rows, place) for rows in found.values()) for place in (1, 2))
    told = f"Geometric mean: {ratio:.3f}; of the other build to itself: {itself:.3f}."
    print(told)
    commit = ["git", "-C", str(args.other), "rev-parse", "--short=12", "HEAD"]
    other = subprocess.run(commit, capture_output=True, text=True).stdout.strip() or "unknown"
    page.write(args, "builds", "Two builds in turns", [*lines, "", told], other=f"commit {other}")
    sys.exit(ratio < args.least and 1 - ratio > abs(1 - itself))


def of(rows: list[list[float]], place: int) -> float:
    """How many times as fast as the other build's first ranks."""
    return statistics.median(row[0] / row[place] for row in rows)


def table(found: dict[Case, list[list[float]]]) -> list[str]:
    cells = []
    for (way, memory, size), rows in found.items():
        other, _, this = (statistics.median(times) for times in zip(*rows, strict=True))
        numbers = (other, this, of(rows, 2), of(rows, 1))
        cells.append((way, memory, format_bytes(size), *(f"{number:.2f}" for number in numbers)))
    head = ("call", "memory", "size", "other (us)", "this (us)", "other / this", "other / other")
    return page.markdown_table(head, cells, left=2)


if __name__ == "__main__":
    if SERVES:
        serve(int(sys.argv[2]), *sys.argv[3:])
    else:
        main()
