"""Which algorithm is fastest where, by the cost models and as measured: tables of docs/algorithms.md."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.page import read

from ringlet import _C
from ringlet.bench.cases import format_bytes
from ringlet.schedule import algorithms, schedule
from ringlet.schedule.cost import Predictor, cost
from ringlet.schedule.hosts import parse_hosts
from ringlet.schedule.machine_file import named, read_machine

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"

NEW = ["bine", "bruck", "chain", "double_binary_tree", "knomial", "pat", "recursive_multiplying", "swing", "torus"]
MODELLED = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all")
LIKE_ANOTHER = "hierarchical"  # where hosts are left out of it, it is two_shot
WORLDS, SIZES = (4, 8, 16), (1 << 10, 64 << 10, 4 << 20)

# Of the table of winners: machines by file and hosts; and of both tables: results by name, their words there, which
# world of the file, and the condition of rules for it.
MACHINES = (("slow-uplinks", "4x2"), ("slow-uplinks", "8x1"), ("p5-hosts", "2x8"))
ON_EPYC = "2026-11-25-amd-epyc-2-cores-algorithms"
MEASURED = (
    (f"{ON_EPYC}-memory", "2 ranks", 2, "staged"),
    (f"{ON_EPYC}-memory", "4 ranks on 2 cores", 4, "staged"),
    (f"{ON_EPYC}-hosts", "4x1 at 200 Mbit/s", 4, "apart"),
    ("2026-11-24-intel-xeon-2-cores-algorithms-hosts", "4x1 at 200 Mbit/s, Xeon", 4, "apart"),
    (f"{ON_EPYC}-hosts", "8x1 at 200 Mbit/s", 8, "apart"),
    (f"{ON_EPYC}-gigabit", "4x1 at 1 Gbit/s", 4, "apart"),
)
PREDICTED_SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20)
MARGIN = 1.01  # less than 1 % is no win
MARGIN_OF_RULES = 1.05

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


def winners() -> list[list[str]]:
    """A header, and a line for each new algorithm: its file, and where it is faster than all others, the new ones
    included."""
    lines = [["algorithm", "lines of its file", "fastest by prediction", "fastest as measured"]]
    predicted, measured = list(_predictions()), list(_measurements())
    for name in NEW:
        path = ROOT / "csrc" / "schedule" / f"{name}.cc"
        count = len(path.read_text(encoding="utf-8").splitlines())
        link = f"[{count}](../csrc/schedule/{path.name})"
        lines.append([f"`{name}`", link, _won(name, predicted), _won(name, measured)])
    return lines


def _won(name: str, cases: list[tuple[str, str, int, Times]]) -> str:
    """ "broadcast: 4x2 1 KiB, 64 KiB; ..." """
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for where, collective, size, times in cases:
        others = [time for other, time in times.items() if other != name and _twin(other) != _twin(name)]
        if name in times and others and times[name] * MARGIN <= min(others):
            found[collective][where].append(format_bytes(size))
    return (
        "; ".join(
            f"`{collective}`: " + ", ".join(f"{where} {' '.join(sizes)}" for where, sizes in places.items())
            for collective, places in found.items()
        )
        or "nowhere"
    )


def _twin(name: str) -> str:
    """halving_doubling and halving_doubling_far differ on one host in their bits only."""
    return re.sub("_far$", "", name)


def _predictions() -> Iterator[tuple[str, str, int, Times]]:
    for file, words in MACHINES:
        hosts, machine = parse_hosts(words), read_machine(named(file))
        for collective in MODELLED:
            made = {n: Predictor(schedule(n, c, hosts=hosts)) for n, c, _ in algorithms() if c == collective}
            for size in PREDICTED_SIZES:
                segments = _C.message_segments(size)
                times = {name: one.seconds(size, machine, segments) for name, one in made.items()}
                yield f"{file} {words}", collective, size, times


def measured() -> list[list[str]]:
    """A header, and a line for each collective and place: the fastest algorithm at each size, and how many times as
    fast as auto's choice, if that is another by more than the margin."""
    found: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    media = {words: (world, medium) for _, words, world, medium in MEASURED}
    for words, collective, size, times in _measurements():
        usual = _C.chosen(collective, size, *media[words])
        best = min(times, key=lambda name: times[name])
        gain = times[usual] / times[best]
        found[collective, words][size] = f"`{usual}`" if gain < MARGIN_OF_RULES else f"**`{best}`** {gain:.2f}x"
    sizes = sorted({size for cells in found.values() for size in cells})
    lines = [["collective", "where", *map(format_bytes, sizes)]]
    for collective in MODELLED:
        for words in media:
            if cells := found.get((collective, words)):
                lines.append([f"`{collective}`", words, *(cells.get(size, "") for size in sizes)])
    return lines


def _measurements() -> Iterator[tuple[str, str, int, Times]]:
    """Medians over rounds."""
    for name, words, world, _ in MEASURED:
        found: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for row in read(BENCHMARKS / "baselines" / f"{name}.jsonl")[0]:
            if row["world"] == world:
                found[row["collective"], row["bytes"]][row["algorithm"]].append(row["time_us_p50"])
        for (collective, size), times in sorted(found.items(), key=lambda case: case[0][1]):
            yield words, collective, size, {one: statistics.median(values) for one, values in times.items()}
