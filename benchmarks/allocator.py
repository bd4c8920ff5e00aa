"""What `ringlet.use_registered_allocator()` costs code that allocates much: paired against torch's own allocator.

    python -m benchmarks.allocator [--rounds 9] [--report FILE.md]

Both allocators take turns in one process, in every round; a figure is the median over rounds of the ratio within one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from benchmarks import page
from examples.char_transformer import CharTransformer, Size, Text, loss_of

import ringlet

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    options = page.parse(parser, rows=False)
    head = ("", "torch's, us", "registered, us", "registered / torch's")
    rows = [(name, f"{a:.1f}", f"{b:.1f}", f"{ratio:.2f}") for name, a, b, ratio in measure(options.rounds)]
    lines = page.markdown_table(head, rows, left=1)
    print("\n".join(lines))
    threads = str(torch.get_num_threads())
    page.write(options, "allocator-cost", "The registered allocator's cost", lines, threads=threads)


if __name__ == "__main__":
    main()
