"""Messages between two ranks, of this build and of another, in turns.

    git worktree add --detach /tmp/other HEAD~1 && (cd /tmp/other && python setup.py build_ext --inplace)
    python benchmarks/messages.py /tmp/other/python --report benchmarks/results/

Starts two ranks of each build --turns times. There and back: both ranks send and receive in turns. One way: rank 0
sends all, and the time ends with a barrier. A virtual machine may put its processors elsewhere at any time, and the
time of a line there and back tells how far they are from each other. So rows are by that: near is up to 200 ns. A size
during which they moved is left out.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import median

import torch

import ringlet
from ringlet.bench import results
from ringlet.bench.cases import format_bytes
from ringlet.cli import outputs

sys.path.append(str(Path(__file__).resolve().parents[1]))

SIZES = (8, 1 << 10, 2 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
BYTES = 32 << 20  # of a sample, if that takes no more than MOST calls
LEAST, MOST = 20, 2000
NEAR_NS = 200
HEAD = "| cores | size | turns | there and back (us) | other (us) | ratio | one way (us) | other (us) | ratio |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=Path, help="the folder of another build's package")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--report", type=Path, help="write a page to this folder")
    args = parser.parse_args()
    outputs.check({"--report": args.report and args.report / "page.md"})
    load = os.getloadavg()[0]
    times: dict[tuple[str, int], list[list[tuple[float, float]]]] = collections.defaultdict(lambda: [[], []])
    builds = (Path(ringlet.__file__).parents[1], args.other.resolve())
    for turn in range(args.turns):
        for place in (0, 1) if turn % 2 == 0 else (1, 0):
            for size, where, back, one_way in run(builds[place]):
                times[where, size][place].append((back, one_way))
    lines = [HEAD, "|---|---:|---|---:|---:|---:|---:|---:|---:|"]
    for (where, size), (mine, others) in sorted(times.items(), key=lambda item: (item[0][0] != "near", item[0][1])):
        if where == "moved" or not mine or not others:
            continue
        cells = [where, format_bytes(size), f"{len(mine)}, {len(others)}"]
        for way in (0, 1):
            here, there = median(each[way] for each in mine), median(each[way] for each in others)
            cells += [f"{here:.2f}", f"{there:.2f}", f"{there / here:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    print("\n".join(lines))
    if args.report:
        write(args.report, lines, load)


def run(build: Path) -> list[tuple[int, str, float, float]]:
    """Two ranks of that build."""
    with tempfile.NamedTemporaryFile() as found:
        environment = {**os.environ, "PYTHONPATH": str(build)}
        subprocess.run(
            [sys.executable, "-c", CHILD, found.name], env=environment, cwd=Path(__file__).parent, check=True
        )
        return [tuple(row) for row in json.load(found)]


CHILD = """import sys, messages, ringlet
if __name__ == "__main__":
    ringlet.spawn(messages.measure, 2, (sys.argv[1],), transport="shared_memory")
"""


def measure(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    send, receive = (lambda tensor: ringlet.send(tensor, 1)), (lambda tensor: ringlet.recv(tensor, 0))
    rows = []
    for size in SIZES:
        tensor = torch.ones(size // 4)
        count = min(MOST, max(LEAST, BYTES // size))

        def there_and_back(calls: int, tensor: torch.Tensor = tensor) -> None:
            for _ in range(calls):
                for sends in (rank == 0, rank == 1):
                    (ringlet.send if sends else ringlet.recv)(tensor, 1 - rank)

        def one_way(calls: int, tensor: torch.Tensor = tensor) -> None:
            for _ in range(calls):
                (send if rank == 0 else receive)(tensor)
            ringlet.barrier()

        before = distance(rank)
        seconds = []
        for call in (there_and_back, one_way):
            call(count // 2)
            ringlet.barrier()
            began = time.perf_counter()
            call(count)
            seconds.append((time.perf_counter() - began) / count * 1e6)
        near = {before < NEAR_NS, distance(rank) < NEAR_NS}
        rows.append((size, "moved" if len(near) == 2 else "near" if near == {True} else "far", *seconds))
    if rank == 0:
        Path(path).write_text(json.dumps(rows))


def distance(rank: int) -> float:
    """Nanoseconds of a line between the two processors, there and back; rank 1 waits."""
    from benchmarks import machine_limit

    found = machine_limit.line_ns() if rank == 0 else 0.0
    told = torch.tensor([found], dtype=torch.float64)
    ringlet.broadcast(told, 0)
    return told.item()


def write(folder: Path, lines: list[str], load: float) -> None:
    from benchmarks.page import facts  # which the ranks of another build cannot import

    meta = results.circumstances(load)
    name = meta["machine"]["name"]
    text = [f"# Messages between two ranks of {name}, {str(meta['date'])[:10]}", "", *facts(meta), ""]
    text += [
        "`send` and `recv` of float32 in ordinary memory, 2 ranks, this build and another in turns; medians over",
        "turns. A ratio is the other build's time divided by this one's. Near cores exchange a line in up to 200 ns",
        "there and back.",
        "",
        *lines,
    ]
    path = folder / f"{date.today()}-{name}-messages.md"
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
