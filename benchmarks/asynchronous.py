"""All-reduce with `async_op=True`, against the synchronous call: alone, and with computation before the wait.

    python -m benchmarks.asynchronous --worlds 2,4 --report benchmarks/results/
    python -m benchmarks.asynchronous --apart      # each rank counts as a host: through TCP

Through the API and through torch.distributed, size by size. In each round the ranks do, in an order drawn anew: the
call; the call posted and waited for; some computation alone; the computation, then the call; the call posted, the
computation, the wait. The computation is a fixed amount of work that takes about twice the call's time. What the last
two cost above the computation alone is what the call costs behind a computation, and what of it was not hidden. A
sample is as many calls as fill --ms; a time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import random
import statistics

import torch
import torch.distributed as dist
from benchmarks import page
from benchmarks.local_ranks import agreed, in_turns, on_ranks, seconds_a_call

import ringlet
from ringlet.bench.cases import format_bytes

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
    found = [agreed(in_turns(ways, calls, shuffler)) for _ in range(options.rounds + 1)]
    return found[1:]  # the first was a warm-up


def measure(rank: int, world: int, options: argparse.Namespace) -> dict[str, list[list[float]]]:
    shuffler = random.Random(0)  # the same on all ranks
    return {f"{way}/{size}": of_size(way, size, options, shuffler) for way in ("API", "torch") for size in SIZES}


def line(through: str, world: int, size: int, found: list[list[float]]) -> str:
    """Medians, and the medians and middle halves of ratios within a round."""
    sync, posted = (statistics.median(row[place] for row in found) * 1e6 for place in (0, 1))
    slower = [row[1] / row[0] for row in found]
    behind, not_hidden = ([(row[place] - row[2]) / row[0] for row in found] for place in (3, 4))
    allowed = "yes" if statistics.median(slower) <= 1.3 + LONG_US / sync else "no"
    cells = [through, world, format_bytes(size), f"{sync:.1f}", f"{posted:.1f}", middle(slower), allowed]
    return page.markdown_row([*cells, middle(behind), middle(not_hidden)])


def middle(found: list[float]) -> str:
    low, median, high = statistics.quantiles(found, n=4)
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=lambda text: [int(n) for n in text.split(",")], default=[2])
    parser.add_argument("--apart", action="store_true", help="each rank counts as a host of its own")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--ms", type=float, default=10.0)
    options = page.parse(parser, rows=False)
    lines = page.markdown_table(HEAD, [], left=1)
    print("\n".join(lines), flush=True)
    for world in options.worlds:
        for key, found in on_ranks(measure, world, options, hosts=world if options.apart else 1).items():
            through, _, size = key.partition("/")
            lines.append(line(through, world, int(size), found))
            print(lines[-1], flush=True)
    through = ", through TCP on loopback" if options.apart else ""
    told = PAGE.format(rounds=options.rounds, long=LONG_US, through=through)
    kind = "asynchronous-tcp" if options.apart else "asynchronous"
    page.write(options, kind, "Asynchronous calls against synchronous ones", [told, *lines])


if __name__ == "__main__":
    main()
