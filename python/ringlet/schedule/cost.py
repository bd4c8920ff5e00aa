"""The cost of a schedule: its rounds and bytes, its load on the links between hosts, and its seconds on a machine.

The time of a round is the latency of its slowest kind of link, a rank's time for each of its messages, the bytes and
the combining. It starts when all ranks with which it has messages have reached their rounds. Bytes inside a host take
the time of the busier direction of the busier rank; links are full duplex. For a ring on one host this gives
2(p-1) alpha + 2S(p-1)/p beta + S(p-1)/p gamma (Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005, section 3).

Every host has one full-duplex uplink to a switch that is never the bottleneck. Messages between hosts that start at the
same moment of the zero-buffer execution share the uplinks, and a round lasts until the busiest uplink that it uses has
carried all messages of that moment (Patarasuk and Yuan, JPDC 69(2), 2009: contention on trees of switches). The first
segment takes that long. Each further segment takes as long as the busiest resource, an uplink or a rank, needs for it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from ringlet.errors import InvalidUsage
from ringlet.schedule.collectives import parts_of_s
from ringlet.schedule.data import Schedule
from ringlet.schedule.execution import Message, execute
from ringlet.schedule.machine_file import Machine

ETHERNET = Machine("25 Gb/s Ethernet", 20e-6, 8 / 25e9, 0.0, 0.0, 0.0, 1 / 20e9)


@dataclass(frozen=True)
class Cost:
    """`seconds` until the last rank has finished, and the time of each rank."""

    seconds: float
    ranks: tuple[float, ...]


def sent(schedule: Schedule) -> tuple[Fraction, ...]:
    """What each rank sends, exactly, in units of S (ringlet.schedule.collectives)."""
    unit = parts_of_s(schedule.collective, schedule.world, schedule.parts)
    chunks = [
        [step.count for round in rounds for step in round.steps if step.verb == "send"] for rounds in schedule.ranks
    ]
    return tuple(Fraction(sum(of_rank), unit) for of_rank in chunks)


def cost(schedule: Schedule, nbytes: float, machine: Machine = ETHERNET) -> Cost:
    """Seconds for S = nbytes if all ranks share a host, by the machine's numbers of one. ScheduleError if the schedule
    cannot run, InvalidUsage for a wrong nbytes."""
    if not 0 <= nbytes < math.inf:
        raise InvalidUsage(f"cost: nbytes must be a number of bytes from 0 on, got {nbytes}")
    chunk = nbytes / parts_of_s(schedule.collective, schedule.world, schedule.parts)
    done = tuple(ends[-1] for ends in Predictor(schedule, hosts=()).ends(chunk, machine))
    return Cost(max(done), done)


Direction = tuple[str, int]  # ("out of" or "into", host)


def uplink_load(schedule: Schedule, hosts: Sequence[int] | None = None) -> Fraction:
    """The load on the links between hosts: the sum over moments of the busiest direction of the busiest uplink, in
    units of S (ringlet.schedule.collectives). It is the time that the links need, times their bandwidth. An all-reduce
    over n hosts needs 2(n-1)/n at least. `hosts[r]` is rank r's host (default: as the schedule was made for).

    ScheduleError if the schedule cannot run; ValueError if `hosts` is of another world.
    """
    busiest: Counter[int] = Counter()
    for (moment, _), chunks in _uplinks(schedule, _hosts_of(schedule, hosts)).items():
        busiest[moment] = max(busiest[moment], chunks)
    return Fraction(busiest.total(), parts_of_s(schedule.collective, schedule.world, schedule.parts))


def uplink_totals(schedule: Schedule, hosts: Sequence[int] | None = None) -> dict[Direction, Fraction]:
    """The total of each uplink in each direction, in units of S. Errors as in `uplink_load`.

    The largest total would be the load if rounds overlapped without gaps.
    """
    unit = parts_of_s(schedule.collective, schedule.world, schedule.parts)
    totals: Counter[Direction] = Counter()
    for (_, direction), chunks in _uplinks(schedule, _hosts_of(schedule, hosts)).items():
        totals[direction] += chunks
    return {direction: Fraction(chunks, unit) for direction, chunks in totals.items() if chunks}


class Times(NamedTuple):
    """Seconds, by what they are spent on. inside, uplinks: the bytes of messages inside hosts and between hosts."""

    latency: float = 0.0
    messages: float = 0.0
    inside: float = 0.0
    uplinks: float = 0.0
    combining: float = 0.0


@dataclass(frozen=True)
class _RoundLoad:
    """The load of one rank's round, in chunks, except for `messages`. `met`: each (rank, round) that it waits for."""

    met: tuple[tuple[int, int], ...]
    crosses: bool
    messages: int
    inside: int
    uplink: int
    reduced: int


class Predictor:
    """Predicts the time of one schedule. Its constructor executes the schedule; a prediction passes over the rounds."""

    def __init__(self, schedule: Schedule, hosts: Sequence[int] | None = None):
        """hosts[r]: rank r's host (default: as the schedule was made for)."""
        self._schedule = schedule
        self._unit = parts_of_s(schedule.collective, schedule.world, schedule.parts)
        self._execution = execution = execute(schedule)
        host = _hosts_of(schedule, hosts)
        self._crossing = {m for m in execution.messages if host[m.source] != host[m.target]}
        uplinks = _uplinks(schedule, host)
        shared = {
            m: max(uplinks[execution.moments[m], direction] for direction in _way(m, host)) for m in self._crossing
        }
        self._loads = {
            place: self._load(place, execution.touching[place[0]][place[1]], shared) for place in execution.order
        }
        self._uplink_total = float(max(uplink_totals(schedule, hosts).values(), default=0) * self._unit)

    def seconds(self, nbytes: float, machine: Machine, segments: int = 1) -> float:
        """Seconds for S = nbytes in segments that follow each other as closely as links and ranks let them."""
        chunk = nbytes / self._unit / segments
        busiest = sum(self._busiest(chunk, machine))
        chain = max(rounds[-1] for rounds in self.ends(chunk, machine))
        return max(chain, busiest) + (segments - 1) * busiest

    def times(self, nbytes: float, machine: Machine, segments: int = 1) -> Times:
        """What the seconds are spent on: those of the chain of rounds that ends last, each of which waits for the one
        before it, or those of the busiest resource if it is busy for longer; and those of this resource for further
        segments."""
        chunk = nbytes / self._unit / segments
        ends = self.ends(chunk, machine)
        rank = max(range(self._schedule.world), key=lambda r: ends[r][-1])
        index = len(ends[rank]) - 1
        busiest = self._busiest(chunk, machine)
        spent = [Times(*((segments - 1) * seconds for seconds in busiest))]
        if sum(busiest) > ends[rank][index]:
            spent.append(busiest)
            index = 0
        while index:
            load = self._loads[rank, index - 1]
            spent.append(self._round(load, chunk, machine))
            rank, index = max(load.met, key=lambda place: ends[place[0]][place[1]])
        return Times(*map(sum, zip(*spent, strict=True)))

    def ends(self, chunk: float, machine: Machine) -> list[list[float]]:
        """[rank][i]: when the rank posts its round i, which is when round i - 1 ends. `chunk`: bytes."""
        ends = [[0.0] for _ in range(self._schedule.world)]
        for rank, index in self._execution.order:
            load = self._loads[rank, index]
            start = max(ends[other][round_] for other, round_ in load.met)
            ends[rank].append(start + sum(self._round(load, chunk, machine)))
        return ends

    def _round(self, load: _RoundLoad, chunk: float, machine: Machine) -> Times:
        inside = chunk * machine.inside_beta * max(self._loads[place].inside for place in load.met)
        uplinks = chunk * machine.uplink_beta * load.uplink
        return Times(
            machine.across_alpha if load.crosses else machine.inside_alpha,
            machine.message * load.messages,
            inside if inside >= uplinks else 0.0,
            uplinks if uplinks > inside else 0.0,
            machine.gamma * chunk * load.reduced,
        )

    def _busiest(self, chunk: float, machine: Machine) -> Times:
        """The time for which one segment occupies its busiest resource."""
        loads: dict[int, list[_RoundLoad]] = defaultdict(list)
        for (rank, _), load in self._loads.items():
            loads[rank].append(load)
        of_ranks = [
            Times(
                messages=machine.message * sum(load.messages for load in of_rank),
                inside=chunk * machine.inside_beta * sum(load.inside for load in of_rank),
                combining=chunk * machine.gamma * sum(load.reduced for load in of_rank),
            )
            for of_rank in loads.values()
        ]
        return max([*of_ranks, Times(uplinks=chunk * machine.uplink_beta * self._uplink_total)], key=sum)

    def _load(self, place: tuple[int, int], messages: list[Message], shared: dict[Message, int]) -> _RoundLoad:
        rank, index = place
        steps = self._schedule.ranks[rank][index].steps
        inside = [m for m in messages if m not in self._crossing]
        out = sum(m.sent.count for m in inside if m.source == rank)
        into = sum(m.sent.count for m in inside if m.target == rank)
        return _RoundLoad(
            met=(place, *(m.other_side(rank) for m in messages)),
            crosses=len(inside) < len(messages),
            messages=len(messages),
            inside=max(out, into),
            uplink=max((shared[m] for m in messages if m in shared), default=0),
            reduced=sum(step.count for step in steps if step.verb == "reduce"),
        )


def _hosts_of(schedule: Schedule, hosts: Sequence[int] | None) -> Sequence[int]:
    if hosts and len(hosts) != schedule.world:
        raise ValueError(f"hosts has {len(hosts)} ranks, {schedule.name} has {schedule.world}")
    return (schedule.hosts if hosts is None else hosts) or (0,) * schedule.world


def _uplinks(schedule: Schedule, host: Sequence[int]) -> Counter[tuple[int, Direction]]:
    """By moment and direction, the chunks on each uplink."""
    chunks: Counter[tuple[int, Direction]] = Counter()
    for message, moment in execute(schedule).moments.items():
        if host[message.source] != host[message.target]:
            for direction in _way(message, host):
                chunks[moment, direction] += message.sent.count
    return chunks


def _way(message: Message, host: Sequence[int]) -> tuple[Direction, Direction]:
    return ("out of", host[message.source]), ("into", host[message.target])
