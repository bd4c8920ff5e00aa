"""The data of the page: every schedule of the algorithms on a list of worlds, hosts and roots, in few bytes.

The bytes of one algorithm and collective are numbers of 7 bits a byte, least first, the high bit saying that more come:

    index      for each world, each of its hosts, each root: 0 for none, or 1 + the schedule's number
    schedules  bytes, parts, then for each rank: rounds, for each round: steps, for each step: verb, peer, first, count

`bytes` is the length of what follows, so that a reader can skip. Peers and chunks count from the rank, modulo the
world and the parts: ranks that do the same then read the same, and deflate finds it. Schedules that differ in nothing
stand there once. decode.js reads all this.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ringlet.schedule.closed_forms import CLOSED_FORMS
from ringlet.schedule.collectives import COLLECTIVES, DIVIDED, REDUCTIONS, ROOTED
from ringlet.schedule.cost import Machine
from ringlet.schedule.data import Schedule, ScheduleError
from ringlet.schedule.draw import colours
from ringlet.schedule.hosts import parse_hosts
from ringlet.schedule.registry import Algorithm, algorithms, schedule

VERBS = ("send", "recv", "reduce", "copy")
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


def _prover(own: Algorithm) -> Maker:
    def make(world: int, root: int, hosts: Sequence[int] | None) -> Schedule:
        made = own.schedule(world, root, hosts)
        made.prove()
        return made

    return make


def _maker(algorithm: str, collective: str) -> Maker:
    return lambda world, root, hosts: schedule(algorithm, collective, world=world, root=root, hosts=hosts)


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


def catalogue(sources: Iterable[Source], worlds: Sequence[int], start: dict[str, Any]) -> dict[str, Any]:
    """All data of the page. `start` is its first view, as in its address (page.js)."""
    shades: set[int] = set(worlds)
    listed = []
    for source in sources:
        form = CLOSED_FORMS.get((source.name, source.collective))
        found = {"name": source.name, "collective": source.collective, "summary": source.summary}
        forms = {"rounds": form.rounds_text, "sent": form.sent_text} if form else None
        listed.append({**found, "closed": forms, "data": _packed(source, worlds, shades)})
    return {
        "worlds": list(worlds),
        "hosts": {world: [[words, _host_list(words, world)] for words in hosts_of(world)] for world in worlds},
        "collectives": [c for c in COLLECTIVES if any(c == row["collective"] for row in listed)],
        "divided": DIVIDED,
        "rooted": ROOTED,
        "reductions": REDUCTIONS,
        "palettes": {count: colours(count) for count in sorted(shades)},
        "machine": asdict(Machine()),
        "start": start,
        "algorithms": listed,
    }


def _host_list(words: str, world: int) -> list[int]:
    return list(parse_hosts(words)) if words else [0] * world


def _packed(source: Source, worlds: Sequence[int], shades: set[int]) -> str:
    index = bytearray()
    numbers: dict[tuple[int, bytes], int] = {}
    for world in worlds:
        for words in hosts_of(world):
            for root in range(world if source.collective in ROOTED else 1):
                try:
                    made = source.make(world, root, parse_hosts(words) if words else None)
                except ScheduleError:
                    raise
                except (ValueError, NotImplementedError):
                    index += _number(0)
                    continue
                shades.add(made.parts)
                index += _number(1 + numbers.setdefault((world, _bytes_of(made)), len(numbers)))
    schedules = [_number(len(data)) + data for _, data in numbers]
    return base64.b64encode(zlib.compress(bytes(index) + b"".join(schedules), 9)).decode()


def _bytes_of(made: Schedule) -> bytes:
    out = bytearray(_number(made.parts))
    for rank, rounds in enumerate(made.ranks):
        out += _number(len(rounds))
        for round in rounds:
            out += _number(len(round.steps))
            for step in round.steps:
                peers = made.parts if step.verb == "copy" else made.world  # a copy's peer is a chunk
                out += _number(VERBS.index(step.verb)) + _number((step.peer - rank) % peers)
                out += _number((step.first - rank) % made.parts) + _number(step.count)
    return bytes(out)


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
