"""The search for a schedule: all algorithms, built in or registered, compositions and segmentations, by their predicted
time on a machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ringlet.schedule.collectives import DIVIDED
from ringlet.schedule.compose import Composition, compositions, segmented
from ringlet.schedule.cost import Predictor
from ringlet.schedule.data import Schedule
from ringlet.schedule.machine_file import Machine
from ringlet.schedule.registry import Algorithm, algorithms, registered, schedule

SEGMENTS = (1, 2, 4, 8, 16)

# (bytes of the collective's whole buffer) -> number of segments that the engine makes of it
EngineSegments = Callable[[int], int]


@dataclass(frozen=True)
class Candidate:
    """A schedule with its predicted time. seconds: by size in bytes. registered: a call can name it."""

    name: str
    schedule: Schedule
    seconds: dict[int, float]
    registered: bool


def search(
    schedules: Iterable[tuple[Schedule, bool]],
    machine: Machine,
    sizes: Sequence[int],
    engine_segments: EngineSegments = lambda nbytes: 1,
) -> list[Candidate]:
    """Every candidate, cut into segments too, with its predicted seconds. Of equal schedules, only the first.

    schedules: of `schedules_of`.
    """
    found: dict[object, Candidate] = {}  # by what ranks do: many compositions are the same on small hosts
    for whole, has_name in schedules:
        for segments in SEGMENTS if whole.collective in DIVIDED else (1,):
            try:
                cut = whole if segments == 1 else segmented(whole, segments)
            except ValueError:  # its ranks do not keep step, so only the engine cuts it into segments
                break
            if cut.ranks not in found:
                predictor = Predictor(cut)
                seconds = {size: predictor.seconds(size, machine, engine_segments(size)) for size in sizes}
                found[cut.ranks] = Candidate(cut.algorithm, cut, seconds, has_name and segments == 1)
    return list(found.values())


def best(candidates: Sequence[Candidate], size: int, count: int) -> list[Candidate]:
    """The `count` fastest at a size. Of equally fast ones, registered ones first, then those with fewer rounds."""
    return sorted(candidates, key=lambda c: (c.seconds[size], not c.registered, c.schedule.rounds, c.name))[:count]


def has_use(one: Algorithm, collective: str, hosts: Sequence[int], own: Sequence[Algorithm]) -> bool:
    """Whether `schedules_of` makes a schedule of this one of a user's own algorithms, by itself or in a composition."""
    if alone(one, collective, hosts):
        return True
    made = _composed(collective, hosts, own)
    return any(one.name in (composition.inside, composition.across) for composition, _ in made)


def schedules_of(
    collective: str, hosts: Sequence[int], own: Sequence[Algorithm] = ()
) -> Iterator[tuple[Schedule, bool]]:
    """The schedules of all built-in algorithms and of a user's own, with True, and of all compositions, with False.

    Compositions are all-reduces, on several hosts of equal size. Raises ScheduleError if one of a user's own is wrong.
    """
    for name, of, _ in algorithms():
        if of == collective:
            yield schedule(name, of, hosts=hosts), True
    for one in own:
        if made := alone(one, collective, hosts):
            made.prove()
            yield made, True
    for _, composed_ in _composed(collective, hosts, own):
        yield composed_, False


def alone(one: Algorithm, collective: str, hosts: Sequence[int]) -> Schedule | None:
    """Its schedule by itself; None if it is of another collective, or does not cover this world."""
    with contextlib.suppress(NotImplementedError):
        return one.schedule(len(hosts), hosts=hosts) if one.collective == collective else None
    return None


def _composed(
    collective: str, hosts: Sequence[int], own: Sequence[Algorithm]
) -> Iterator[tuple[Composition, Schedule]]:
    sizes = {list(hosts).count(host) for host in hosts}
    if collective == "all_reduce" and len(set(hosts)) > 1 and len(sizes) == 1 and sizes != {1}:
        for composition in compositions(own):
            with contextlib.suppress(NotImplementedError):  # an algorithm of a user's may not cover this world
                yield composition, composition.schedule(hosts)


def composed(name: str, collective: str, hosts: Sequence[int], root: int = 0) -> Schedule:
    """The composition or segmentation that a `Candidate` names: "two_shot+ring", "leader.tree+ring", "chain.8".

    Raises ValueError if the name is none, or if its algorithms cannot be composed.
    """
    whole, _, segments = name.rpartition(".")
    if whole and segments.isdecimal() and not registered(name, collective):
        return segmented(composed(whole, collective, hosts, root), int(segments))
    known = compositions(registered()) if collective == "all_reduce" else ()
    found = next((one for one in known if one.name == name), None)
    return found.schedule(hosts) if found else schedule(name, collective, hosts=hosts, root=root)
