"""The data of the page: every schedule of the algorithms on a list of worlds, hosts and roots, as frames.

The one execution of a schedule, which the prover and the cost model use too, makes its *scene*: what every box of a
rank's buffer holds from which moment on, the messages, and the prover's numbers. Scenes that are equal stand there
once. Tables stand column by column, each number as its difference to the one above, because deflate packs that best.
"""

from __future__ import annotations

import base64
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ringlet.schedule.collectives import COLLECTIVES, REDUCTIONS, ROOTED, parts_of_s
from ringlet.schedule.cost import sent
from ringlet.schedule.data import Schedule, ScheduleError
from ringlet.schedule.draw import colours
from ringlet.schedule.execution import execute
from ringlet.schedule.expression_trees import ranks_in
from ringlet.schedule.frames import Frames, frames_of
from ringlet.schedule.hosts import parse_hosts
from ringlet.schedule.prove import prove
from ringlet.schedule.registry import Algorithm, algorithms, name_of, schedule

MOST_WORLD = 30  # the page keeps the ranks of a sum in one 32-bit number

Source = tuple[str | Algorithm, str, str]  # an algorithm, its collective and summary


def known_sources(own: Iterable[Algorithm] = ()) -> list[Source]:
    """A user's own algorithms, and the built-in ones. An error in an own one is told before those are executed."""
    return [*((one, one.collective, one.summary) for one in own), *algorithms()]


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
    called before each source. ScheduleError for a user's own source whose schedule is wrong."""
    shades: set[int] = set(worlds)
    hosts = {world: [(words, parse_hosts(words or f"1x{world}")) for words in hosts_of(world)] for world in worlds}
    listed = []
    for done, source in enumerate(sources):
        found = {"name": name_of(source[0]), "collective": source[1], "summary": source[2]}
        progress(done, len(sources), f"{found['name']} {found['collective']}")
        listed.append(found | {"data": _packed(source, hosts, shades)})
    return {
        "worlds": list(worlds),
        "hosts": hosts,
        "collectives": [c for c in COLLECTIVES if any(c == row["collective"] for row in listed)],
        "rooted": ROOTED,
        "palettes": {count: colours(count) for count in sorted(shades)},
        "start": start,
        "algorithms": listed,
    }


def _packed(source: Source, hosts: dict[int, Any], shades: set[int]) -> str:
    """In base 64, deflated: for each world, each of its hosts, each root the number of its scene, or -1; the scenes."""
    algorithm, collective, _ = source
    numbers: dict[Any, int] = {}
    index: list[int] = []
    scenes: list[dict[str, Any]] = []
    for world, (words, host) in ((world, layout) for world, layouts in hosts.items() for layout in layouts):
        for root in range(world if collective in ROOTED else 1):
            try:
                made = schedule(algorithm, collective, world=world, root=root, hosts=host if words else None)
            except ScheduleError:
                raise
            except (ValueError, NotImplementedError):
                index.append(-1)
                continue
            place = (world, root, made.parts, made.ranks)
            if place not in numbers:
                if isinstance(algorithm, Algorithm):
                    prove(made)
                shades.add(made.parts)
                numbers[place] = len(scenes)
                scenes.append(scene(made))
            index.append(numbers[place])
    text = json.dumps({"index": index, "scenes": scenes}, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def scene(made: Schedule) -> dict[str, Any]:
    """One schedule for the page, which data.js reads. ScheduleError if it is wrong.

    nodes: of expression trees: a leaf is its rank, a sum the list of its terms. contents: columns moment, rank, box,
    origin, node, until: from `moment` on the box holds `node` of input chunk `origin`, and nobody needs it from `until`
    on. messages: columns verb (0 keeps, 1 adds, 2 is a copy), source, target, first, into, count, begins, ends. sent:
    chunks of the rank that sends most. orders: of summation. done: at each moment, the ranks that hold their result.
    first: rank and box of a result that is worth a look.
    """
    execution, frames = execute(made), frames_of(made)
    trees = execution.trees
    values = [(c.moment, c.rank, box, *value) for c in execution.changes for box, value in c.values.items()]
    messages = [
        (m.received.verb == "reduce", m.source, m.target, m.sent.first, m.received.first, m.sent.count,
         execution.moments[m], execution.ends[m.target][m.target_round])
        for m in execution.messages
    ] + [(2, t.source, t.target, t.source_box, t.target_box, 1, t.begins, t.ends)
         for t in frames.transfers if t.verb == "copy"]  # fmt: skip
    barrier = made.collective == "barrier"
    outputs = [(rank, box) for rank, (first, count) in enumerate(made.outputs)
               for box in range(first, first + (count or barrier))]  # fmt: skip
    begin, end = frames.frames[0], frames.frames[-1]
    late = [{rank for rank, box in outputs if frame[rank][box] != end[rank][box]} for frame in frames.frames]
    made_here = (place for place in outputs if (held := end[place[0]][place[1]])
                 and held != begin[place[0]][place[1]] and held[1] != 1 << place[0])  # fmt: skip
    sums, by_rank = made.collective in REDUCTIONS, sent(made)
    unit = parts_of_s(made.collective, made.world, made.parts)
    return {
        "parts": made.parts, "sums": sums, "whole": frames.whole, "byRank": frames.by_rank, "rounds": made.rounds,
        "nodes": [list(trees.terms(tree)) or ranks_in(mask)[0] for tree, mask in enumerate(trees.ranks)],
        "contents": _columns(_with_ends(sorted(values), frames)), "messages": _columns(messages),
        "unit": unit, "sent": int(max(by_rank) * unit), "evenly": len(set(by_rank)) == 1,
        "orders": len({value[1] for rank, box in outputs if (value := execution.values[rank][box])}) if sums else 0,
        "done": [made.world - len(ranks) for ranks in late], "first": next(made_here, (0, 0)),
    }  # fmt: skip


def _columns(rows: Iterable[Sequence[int]]) -> list[list[int]]:
    return [[int(b) - int(a) for a, b in itertools.pairwise((0, *column))] for column in zip(*rows, strict=True)]


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
