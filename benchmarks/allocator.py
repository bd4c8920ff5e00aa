"""What `ringlet.use_registered_allocator()` costs code that allocates much: paired against torch's own allocator.

    python benchmarks/allocator.py [--rounds 9] [--report FILE.md]

Both allocators take turns in one process, in every round; a figure is the median over rounds of the ratio within one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import ringlet
from ringlet.bench.results import machine
from ringlet.cli import outputs

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from char_transformer import CharTransformer, Size, Text, loss_of

SIZES = {"32 KiB": 32 << 10, "256 KiB": 256 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20, "64 MiB": 64 << 20}


def seconds(work: Callable[[], None], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - start) / repeats


def one_block(size: int) -> Callable[[], None]:
    """A tensor made, written and freed."""

    def work() -> None:
        torch.empty(size // 4).fill_(1.0)

    return work


def many_alive(size: int) -> Callable[[], None]:
    """Twenty tensors alive at once, freed in another order."""

    def work() -> None:
        tensors = [torch.empty(size // 4 + 1000 * i).fill_(1.0) for i in range(20)]
        while tensors:
            tensors.pop(len(tensors) // 2)

    return work


def training() -> Callable[[], None]:
    """Forward, backward and Adam of the demo's model: hundreds of intermediate tensors a step."""
    torch.manual_seed(0)
    text, size = Text(), Size()
    model = CharTransformer(text.vocabulary, size)
    optimizer = torch.optim.Adam(model.parameters())
    inputs, targets = text.batch(size, 0, 0)

    def work() -> None:
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        optimizer.step()

    return work


def cases() -> dict[str, tuple[Callable[[], None], int]]:
    found = {}
    for name, size in SIZES.items():
        repeats = max(3, min(2000, (256 << 20) // size))
        found[f"one block of {name}, written"] = (one_block(size), repeats)
    for name in ("256 KiB", "1 MiB"):
        found[f"20 blocks from {name} up, written"] = (many_alive(SIZES[name]), 30)
    found["training step of the demo's model"] = (training(), 5)
    return found


def measure(rounds: int) -> list[tuple[str, float, float, float]]:
    """Case, microseconds with torch's allocator and with the registered one, and the second by the first."""
    rows = []
    for name, (work, repeats) in cases().items():
        times: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(rounds + 1):
            for registered in (False, True) if turn % 2 else (True, False):
                ringlet.use_registered_allocator(registered)
                spent = seconds(work, repeats)
                if turn > 0:  # the first round warms up
                    times[registered].append(spent)
        ringlet.use_registered_allocator(False)
        ratio = statistics.median(b / a for a, b in zip(times[False], times[True], strict=True))
        rows.append((name, 1e6 * statistics.median(times[False]), 1e6 * statistics.median(times[True]), ratio))
    return rows


def report(rows: list[tuple[str, float, float, float]], rounds: int) -> str:
    here = machine()
    lines = [
        "# The registered allocator's cost",
        "",
        f"Written by `python benchmarks/allocator.py --rounds {rounds}`.",
        "",
    ]
    lines += [f"- {key}: {value}" for key, value in here.items()]
    lines += [f"- torch {torch.__version__}, {torch.get_num_threads()} threads", ""]
    lines += ["| | torch's, us | registered, us | registered / torch's |", "|---|---:|---:|---:|"]
    lines += [f"| {name} | {a:.1f} | {b:.1f} | {ratio:.2f} |" for name, a, b, ratio in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--report", type=Path, help="write the table there as well")
    arguments = parser.parse_args()
    outputs.check({"--report": arguments.report})
    text = report(measure(arguments.rounds), arguments.rounds)
    print(text)
    if arguments.report:
        arguments.report.write_text(text)


if __name__ == "__main__":
    main()
