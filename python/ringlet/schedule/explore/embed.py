"""The data of the page: every schedule of the algorithms on a list of worlds, hosts and roots, as frames.

The one execution of a schedule, which the prover and the cost model use too, makes its *scene*: what every box of a
rank's buffer holds from which moment on, the messages, the prover's numbers, and the chains of rounds of which one
takes the schedule's time on each machine. Scenes that are equal stand there once. Tables stand column by column, each
number as its difference to the one above, because deflate packs that best.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ringlet.schedule.collectives import COLLECTIVES, DIVIDED, REDUCTIONS, ROOTED, parts_of_s
from ringlet.schedule.cost import Machine, Predictor
from ringlet.schedule.data import Schedule, ScheduleError
from ringlet.schedule.draw import colours
from ringlet.schedule.execution import execute
from ringlet.schedule.expression_trees import ranks_in
from ringlet.schedule.frames import Frames, frames_of
from ringlet.schedule.hosts import parse_hosts
from ringlet.schedule.prove import prove
from ringlet.schedule.registry import Algorithm, algorithms, schedule

MOST_WORLD = 30  # the page keeps the ranks of a sum in one 32-bit number

# (world, root, hosts); ValueError or NotImplementedError: there is none
Maker = Callable[[int, int, Sequence[int] | None], Schedule]


@dataclass(frozen=True)
class Source:
    """An algorithm for one collective, and the function that makes its schedules."""

    name: str
    collective: str
    summary: str
    make: Maker


def known_sources(own: Iterable[Algorithm] = ()) -> list[Source]:
    """The built-in algorithms, and a user's own, whose schedules are proved as they are embedded."""
    built_in = [Source(a, c, summary, _maker(a, c)) for a, c, summary in algorithms()]
    return built_in + [Source(one.name, one.collective, one.summary, _prover(one)) for one in own]


def _maker(algorithm: str, collective: str) -> Maker:
    return lambda world, root, hosts: schedule(algorithm, collective, world=world, root=root, hosts=hosts)


def _prover(own: Algorithm) -> Maker:
    def make(world: int, root: int, hosts: Sequence[int] | None) -> Schedule:
        made = own.schedule(world, root, hosts)
        prove(made)
        return made

    return make


def hosts_of(world: int) -> list[str]:
    """The hosts of a world in the page: one host (""), equal hosts in both orders, and two nearly equal hosts."""
    found = [""]
    for count in range(2, world):
        if world % count == 0:
            found += [f"{count}x{world // count}", f"{count}x{world // count}:cyclic"]
    if world > 2:
        found.append(f"{world}x1")
        found += [f"{world - world // 2},{world // 2}"] if world % 2 else []
    return found


def catalogue(
    sources: Sequence[Source],
    worlds: Sequence[int],
    start: dict[str, Any],
    progress: Callable[[int, int, str], None] = lambda done, total, told: None,
) -> dict[str, Any]:
    """All data of the page. `start` is its first view, as in its address (page.js). progress(done, total, what) is
    called before each source. ScheduleError for a source whose schedule is wrong."""
    shades: set[int] = set(worlds)
    hosts = {world: [(words, parse_hosts(words or f"1x{world}")) for words in hosts_of(world)] for world in worlds}
    listed = []
    for done, one in enumerate(sources):
        progress(done, len(sources), f"{one.name} {one.collective}")
        found = {"name": one.name, "collective": one.collective, "summary": one.summary}
        listed.append(found | {"data": _packed(one, hosts, shades)})
    return {
        "worlds": list(worlds),
        "hosts": hosts,
        "collectives": [c for c in COLLECTIVES if any(c == row["collective"] for row in listed)],
        "divided": DIVIDED,
        "rooted": ROOTED,
        "palettes": {count: colours(count) for count in sorted(shades)},
        "machine": asdict(Machine()),
        "start": start,
        "algorithms": listed,
    }


def _packed(source: Source, hosts: dict[int, Any], shades: set[int]) -> str:
    """In base 64, deflated: for each world, each of its hosts, each root the number of its scene, or -1; the scenes."""
    numbers: dict[Any, int] = {}
    index: list[int] = []
    scenes: list[dict[str, Any]] = []
    for world, layouts in hosts.items():
        for words, host in layouts:
            for root in range(world if source.collective in ROOTED else 1):
                try:
                    made = source.make(world, root, host if words else None)
                except ScheduleError:
                    raise
                except (ValueError, NotImplementedError):
                    index.append(-1)
                    continue
                place = (world, root, made.parts, made.ranks)
                if place not in numbers:
                    shades.add(made.parts)
                    numbers[place] = len(scenes)
                    scenes.append(scene(made))
                index.append(numbers[place])
    text = json.dumps({"index": index, "scenes": scenes}, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def scene(made: Schedule) -> dict[str, Any]:
    """One schedule for the page, which decode.js reads. ScheduleError if it is wrong.

    nodes: of expression trees: a leaf is its rank, a sum the list of its terms. A barrier's are sets of ranks.
    contents: columns moment, rank, box, origin, node, until: from `moment` on the box holds `node` of input chunk
    `origin`, and nobody needs it from `until` on. messages: columns verb (0 keeps, 1 adds, 2 is a copy), source,
    target, first, into, count, begins, ends. chains: as `Predictor.chains`. sent: chunks of the rank that sends most.
    link: chunks of the busiest pair of ranks in one direction. done: at each moment, the ranks that hold their result.
    first: rank and box of a result that is worth a look.
    """
    execution, frames = execute(made), frames_of(made)
    nodes: list[Any] = [list(execution.trees.terms(tree)) or ranks_in(mask)[0]
                        for tree, mask in enumerate(execution.trees.ranks)]  # fmt: skip
    values = [(c.moment, c.rank, box, *v) for c in execution.changes for box, v in c.values.items()]
    inputs = (
        (rank, box, held) for rank, boxes in enumerate(frames.frames[0]) for box, held in enumerate(boxes) if held
    )
    values += [(0, rank, box, origin, execution.trees.leaf(rank)) for rank, box, (origin, _) in inputs]
    links: Counter[tuple[int, int]] = Counter()
    sent: Counter[int] = Counter()
    for m in execution.messages:
        links[m.source, m.target] += m.sent.count
        sent[m.source] += m.sent.count
    sums = made.collective in REDUCTIONS
    outputs = made.outputs if sums else ()
    results = {value[1] for held, (first, count) in zip(execution.values, outputs, strict=False)
               for value in held[first : first + count] if value}  # fmt: skip
    unit = parts_of_s(made.collective, made.world, made.parts)
    messages = [
        (m.received.verb == "reduce", m.source, m.target, m.sent.first, m.received.first, m.sent.count,
         execution.moments[m], execution.ends[m.target][m.target_round])
        for m in execution.messages
    ] + [(2, t.source, t.target, t.source_box, t.target_box, 1, t.begins, t.ends)
         for t in frames.transfers if t.verb == "copy"]  # fmt: skip
    return {
        "parts": made.parts, "sums": sums, "whole": frames.whole, "byRank": frames.by_rank,
        "nodes": nodes, "contents": _columns(_with_ends(sorted(values), frames)), "messages": _columns(messages),
        "chains": Predictor(made, hosts=()).chains(), "unit": unit, "rounds": made.rounds,
        "sent": max(sent.values(), default=0), "evenly": len({sent[rank] for rank in range(made.world)}) == 1,
        "link": max(links.values(), default=0),
        "depth": max((execution.trees.depth[tree] for tree in results), default=0), "trees": len(results),
        **_results(made, frames),
    }  # fmt: skip


def _columns(rows: Iterable[Sequence[int]]) -> list[list[int]]:
    return [[int(b) - int(a) for a, b in zip((0, *column), column, strict=False)] for column in zip(*rows, strict=True)]


def _with_ends(values: list[tuple[int, ...]], frames: Frames) -> list[tuple[int, ...]]:
    """Each value and the moment from which on nobody needs it."""
    replaced: dict[tuple[int, int], int] = {}
    found = []
    for moment, rank, box, *value in reversed(values):
        until = replaced.get((rank, box), len(frames.frames))
        needless = (m for m in range(moment, until) if (m, rank, box) in frames.spent)
        found.append((moment, rank, box, *value, next(needless, until)))
        replaced[rank, box] = moment
    return found[::-1]


def _results(made: Schedule, frames: Frames) -> dict[str, Any]:
    """Who has the result when, and the first result that is not the rank's own from the start."""
    outputs = [(0, 1)] * made.world if made.collective == "barrier" else made.outputs
    begin, end = frames.frames[0], frames.frames[-1]
    done = [
        sum(frame[rank][first : first + count] == end[rank][first : first + count]
            for rank, (first, count) in enumerate(outputs))
        for frame in frames.frames
    ]  # fmt: skip
    made_here = (
        (rank, box) for rank, (first, count) in enumerate(outputs) for box in range(first, first + count)
        if begin[rank][box] != end[rank][box] and (end[rank][box] or (0, 0))[1] != 1 << rank
    )  # fmt: skip
    return {"done": done, "first": next(made_here, (0, 0))}
