"""All-reduce with `async_op=True`, against the synchronous call: alone, and with computation before the wait.

    python benchmarks/asynchronous.py --worlds 2,4 --report benchmarks/results/
    python benchmarks/asynchronous.py --apart      # each rank counts as a host: through TCP

Through the API and through torch.distributed, size by size. In each round the ranks do, in an order drawn anew: the
call; the call posted and waited for; some computation alone; the computation, then the call; the call posted, the
computation, the wait. The computation is a fixed amount of work that takes about twice the call's time. What the last
two cost above the computation alone is what the call costs behind a computation, and what of it was not hidden. A
sample is as many calls as fill --ms; a time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

import ringlet
from ringlet.bench import results
from ringlet.bench.cases import format_bytes
from ringlet.cli import outputs

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.page import facts
from benchmarks.thresholds import agreed

SIZES = (4, 1 << 10, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
HEAD = ("through", "ranks", "size", "synchronous (us)", "async (us)", "async / sync", "allowed", "behind", "not hidden")
LONG_US = 2.0  # an asynchronous call may take 1.3 of the synchronous one's time, and this
PAGE = """All-reduce of float32 in ordinary memory with `auto`{through}. Times are medians over {rounds} rounds,
ratios are within a round: median (range of the middle half). `allowed`: at most 1.3 of the synchronous call plus
{long:g} us. The last two columns are parts of the synchronous call's time: what a call adds to a computation of twice
its time, made behind it, or posted before it and waited for after it. They include that the ranks do not compute
equally long. With as many ranks as cores, or more, no core is free to go on with a call while the ranks compute.
"""


def work(pieces: int, piece: torch.Tensor) -> None:
    for _ in range(pieces):
        piece.add_(1.0)


def seconds_a_call(act: Callable[[], object], calls: int) -> float:
    ringlet.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        act()
    return (time.perf_counter() - start) / calls


def of_size(through: str, size: int, options: argparse.Namespace, shuffler: random.Random) -> list[list[float]]:
    """Seconds of the slowest rank, by round, by way."""
    all_reduce = ringlet.all_reduce if through == "API" else dist.all_reduce
    tensor = torch.zeros(size // 4)
    piece = torch.zeros(64)

    def posted(pieces: int = 0) -> None:
        waits = all_reduce(tensor, async_op=True)
        work(pieces, piece)
        waits.wait()

    once = agreed([seconds_a_call(lambda: all_reduce(tensor), 20)])[0]
    a_piece = agreed([seconds_a_call(lambda: work(1, piece), 1000)])[0]
    pieces = max(1, round(2 * once / a_piece))

    def behind() -> None:
        work(pieces, piece)
        all_reduce(tensor)

    ways = (lambda: all_reduce(tensor), posted, lambda: work(pieces, piece), behind, lambda: posted(pieces))
    calls = max(1, round(options.ms / 1000 / once))
    found = []
    for _ in range(options.rounds + 1):
        times = [0.0] * len(ways)
        for place in shuffler.sample(range(len(ways)), len(ways)):
            times[place] = seconds_a_call(ways[place], calls)
        found.append(agreed(times))
    return found[1:]  # the first was a warm-up


def measure(rank: int, world: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if options.apart:
        os.environ["RINGLET_HOST_ID"] = str(rank)
    ringlet.init(rank, world, dist.FileStore(f"{folder}/api", world))
    dist.init_process_group("ringlet", rank=rank, world_size=world, store=dist.FileStore(f"{folder}/torch", world))
    shuffler = random.Random(0)  # the same on all ranks
    times = {f"{way}/{size}": of_size(way, size, options, shuffler) for way in ("API", "torch") for size in SIZES}
    if rank == 0:
        Path(folder, "times").write_text(json.dumps(times))
    dist.destroy_process_group()
    ringlet.finalize()


def line(through: str, world: int, size: int, found: list[list[float]]) -> str:
    """Medians, and the medians and middle halves of ratios within a round."""
    sync, posted = (statistics.median(row[place] for row in found) * 1e6 for place in (0, 1))
    slower = [row[1] / row[0] for row in found]
    behind, not_hidden = ([(row[place] - row[2]) / row[0] for row in found] for place in (3, 4))
    allowed = "yes" if statistics.median(slower) <= 1.3 + LONG_US / sync else "no"
    cells = [through, world, format_bytes(size), f"{sync:.1f}", f"{posted:.1f}", middle(slower), allowed]
    return "| " + " | ".join(map(str, [*cells, middle(behind), middle(not_hidden)])) + " |"


def middle(found: list[float]) -> str:
    low, median, high = statistics.quantiles(found, n=4)
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def write(folder: Path, lines: list[str], load: float, options: argparse.Namespace) -> None:
    meta = results.circumstances(load)
    name = meta["machine"]["name"]
    text = [f"# Asynchronous calls against synchronous ones on {name}, {str(meta['date'])[:10]}", ""]
    text += [
        *facts(meta),
        "",
        PAGE.format(rounds=options.rounds, long=LONG_US, through=", through TCP on loopback" if options.apart else ""),
        *lines,
    ]
    path = folder / f"{date.today()}-{name}-asynchronous{'-tcp' if options.apart else ''}.md"
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=lambda text: [int(n) for n in text.split(",")], default=[2])
    parser.add_argument("--apart", action="store_true", help="each rank counts as a host of its own")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--ms", type=float, default=10.0)
    parser.add_argument("--report", type=Path, help="write a page to this folder")
    options = parser.parse_args()
    outputs.check({"--report": options.report and options.report / "page.md"})
    load = os.getloadavg()[0]
    lines = ["| " + " | ".join(HEAD) + " |", "|---|---:|---:|---:|---:|---:|---|---:|---:|"]
    print("\n".join(lines), flush=True)
    for world in options.worlds:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(measure, (world, folder, options), world)
            times = json.loads(Path(folder, "times").read_text())
        for key, found in times.items():
            through, _, size = key.partition("/")
            lines.append(line(through, world, int(size), found))
            print(lines[-1], flush=True)
    if options.report:
        write(options.report, lines, load, options)


if __name__ == "__main__":
    main()
