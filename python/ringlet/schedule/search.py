"""The search for a schedule: all algorithms, compositions and segmentations, by their predicted time on a machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ringlet.schedule import Schedule, algorithms, schedule
from ringlet.schedule.collectives import DIVIDED
from ringlet.schedule.compose import compositions, segmented
from ringlet.schedule.machine_file import HostsMachine
from ringlet.schedule.predict import Predictor

SEGMENTS = (1, 2, 4, 8, 16)

# (collective's whole buffer in bytes) -> into how many segments the engine cuts it
EngineSegments = Callable[[int], int]


@dataclass(frozen=True)
class Candidate:
    """A schedule that was looked at. seconds: by size in bytes; registered: calls can name it as it is."""

    name: str
    schedule: Schedule
    seconds: dict[int, float]
    registered: bool


def search(
    collective: str,
    hosts: Sequence[int],
    machine: HostsMachine,
    sizes: Sequence[int],
    engine_segments: EngineSegments = lambda nbytes: 1,
) -> list[Candidate]:
    """Every candidate with its predicted seconds, registered algorithms first; of several that are the same, the first.

    Compositions are all-reduces, on several hosts of equal size.
    """
    found: dict[object, Candidate] = {}  # by what ranks do: many compositions are the same on small hosts
    for whole, registered in _schedules(collective, hosts):
        for segments in SEGMENTS if collective in DIVIDED else (1,):
            try:
                cut = whole if segments == 1 else segmented(whole, segments)
            except ValueError:  # its rounds do not fall into step: the engine's segments are all it has
                break
            if cut.ranks not in found:
                predictor = Predictor(cut)
                seconds = {size: predictor.seconds(size, machine, engine_segments(size)) for size in sizes}
                found[cut.ranks] = Candidate(cut.algorithm, cut, seconds, registered and segments == 1)
    return list(found.values())


def best(candidates: Sequence[Candidate], size: int, count: int) -> list[Candidate]:
    """The `count` fastest at a size; of those that take as long, registered ones first, then those of fewer rounds."""
    return sorted(candidates, key=lambda c: (c.seconds[size], not c.registered, c.schedule.rounds, c.name))[:count]


def _schedules(collective: str, hosts: Sequence[int]) -> Iterator[tuple[Schedule, bool]]:
    for name, of, _ in algorithms():
        if of == collective:
            yield schedule(name, of, hosts=hosts), True
    sizes = {list(hosts).count(host) for host in hosts}
    if collective == "all_reduce" and len(set(hosts)) > 1 and len(sizes) == 1 and sizes != {1}:
        for composition in compositions():
            yield composition.schedule(hosts), False
