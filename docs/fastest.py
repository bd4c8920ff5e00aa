"""Which algorithm is fastest where by the cost model: a table of docs/algorithms.md."""

from __future__ import annotations

from collections.abc import Mapping

from ringlet.bench.cases import format_bytes
from ringlet.schedule import algorithms, schedule
from ringlet.schedule.cost import cost

NEW = ["bine", "bruck", "chain", "double_binary_tree", "knomial", "pat", "recursive_multiplying", "swing", "torus"]
MODELLED = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all")
LIKE_ANOTHER = "hierarchical"  # where hosts are left out of it, it is two_shot
WORLDS, SIZES = (4, 8, 16), (1 << 10, 64 << 10, 4 << 20)

Times = Mapping[str, float]  # by algorithm, in microseconds


def modelled() -> list[list[str]]:
    """A header, and a line for each collective and world; a column for each size."""
    lines = [["collective", "p", *map(format_bytes, SIZES)]]
    for collective in MODELLED:
        for world in WORLDS:
            made = {
                name: schedule(name, of, world=world)
                for name, of, _ in algorithms()
                if of == collective and name != LIKE_ANOTHER
            }
            by_size = [{name: cost(s, size).seconds * 1e6 for name, s in made.items()} for size in SIZES]
            lines.append([f"`{collective}`", str(world), *map(_cell, by_size)])
    return lines


def _cell(times: Times) -> str:
    """The fastest, and the fastest of the other kind: new ones are bold."""
    ranking = sorted(times, key=lambda name: (times[name], name))
    if not ranking:
        return ""
    first = ranking[0]
    other = next((name for name in ranking if (name in NEW) != (first in NEW)), None)
    compared = "" if other is None else f"; {_name(other)} {times[other] / times[first]:.2f}x"
    return f"{_name(first)} {_microseconds(times[first])}{compared}"


def _name(algorithm: str) -> str:
    return f"**`{algorithm}`**" if algorithm in NEW else f"`{algorithm}`"


def _microseconds(time: float) -> str:
    return f"{time / 1000:.1f} ms" if time >= 1000 else f"{time:.3g} us"
