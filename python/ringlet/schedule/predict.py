"""Predicts the time of a schedule on hosts with uplinks: the model of `cost`, with two kinds of links and segments.

The time of a round is the latency of its slowest kind of link, a rank's time for each of its messages, the bytes and
the combining. Bytes inside a host take the time of the busier direction of the busier rank, as in
ringlet.schedule.cost. Messages between hosts at the same moment share the uplinks (ringlet.schedule.uplink). A round
lasts until the busiest uplink that it uses has carried all messages of that moment. The first segment takes that long.
Each further segment takes as long as the busiest resource, an uplink or a rank, needs for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from ringlet.schedule import Schedule
from ringlet.schedule.collectives import parts_of_s
from ringlet.schedule.execute import execute
from ringlet.schedule.machine_file import HostsMachine
from ringlet.schedule.messages import Message, pair_messages


class Times(NamedTuple):
    """Seconds, by what they are spent on. inside, uplinks: the bytes of messages inside hosts and between hosts."""

    latency: float = 0.0
    messages: float = 0.0
    inside: float = 0.0
    uplinks: float = 0.0
    combining: float = 0.0


class Link(NamedTuple):
    """One direction of a link: "host" 2's uplink, or "rank" 3's link to the others of its host."""

    of: str
    number: int
    way: str  # "out of" or "into"


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

    def __init__(self, schedule: Schedule):
        self._schedule = schedule
        self._unit = parts_of_s(schedule.collective, schedule.world, schedule.parts)
        messages = pair_messages(schedule)
        execution = execute(schedule, messages)
        self._order = execution.order
        host = schedule.hosts or (0,) * schedule.world
        self._crossing = {m for m in messages if host[m.source] != host[m.target]}
        sides: dict[tuple[int, int], list[Message]] = defaultdict(list)
        uplinks: Counter[tuple[int, Link]] = Counter()
        self._links: Counter[Link] = Counter()
        for message in messages:
            sides[message.source, message.source_round].append(message)
            sides[message.target, message.target_round].append(message)
            crosses = message in self._crossing
            for link in _links(message, host if crosses else ()):
                self._links[link] += message.sent.count
                if crosses:
                    uplinks[execution.moments[message], link] += message.sent.count
        shared = {m: max(uplinks[execution.moments[m], link] for link in _links(m, host)) for m in self._crossing}
        self._loads = {place: self._load(place, sides[place], shared) for place in self._order}
        self._uplink_total = max((chunks for link, chunks in self._links.items() if link.of == "host"), default=0)

    def seconds(self, nbytes: float, machine: HostsMachine, segments: int = 1) -> float:
        """Seconds for S = nbytes in segments that follow each other as closely as links and ranks let them."""
        chunk = nbytes / self._unit / segments
        busiest = sum(self._busiest(chunk, machine))
        chain = max(rounds[-1] for rounds in self._ends(chunk, machine))
        return max(chain, busiest) + (segments - 1) * busiest

    def times(self, nbytes: float, machine: HostsMachine, segments: int = 1) -> Times:
        """What the seconds are spent on: those of the chain of rounds that ends last, each of which waits for the one
        before it, or those of the busiest resource if it is busy for longer; and those of this resource for further
        segments."""
        chunk = nbytes / self._unit / segments
        ends = self._ends(chunk, machine)
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

    def busiest_links(self, machine: HostsMachine) -> tuple[list[Link], Fraction]:
        """The links that need the longest for what they carry in all, and how much each of them carries, in units of S.
        No link if nothing is carried."""
        beta = {"host": machine.uplink_beta, "rank": machine.inside_beta}
        needs = {link: beta[link.of] * chunks for link, chunks in self._links.items() if chunks}
        found = sorted(link for link, seconds in needs.items() if seconds == max(needs.values()))
        return found, Fraction(max((self._links[link] for link in found), default=0), self._unit)

    def _ends(self, chunk: float, machine: HostsMachine) -> list[list[float]]:
        """[rank][i]: when the rank posts its round i, which is when round i - 1 ends. `chunk`: bytes."""
        ends = [[0.0] for _ in range(self._schedule.world)]
        for rank, index in self._order:
            load = self._loads[rank, index]
            start = max(ends[other][round_] for other, round_ in load.met)
            ends[rank].append(start + sum(self._round(load, chunk, machine)))
        return ends

    def _round(self, load: _RoundLoad, chunk: float, machine: HostsMachine) -> Times:
        inside = chunk * machine.inside_beta * max(self._loads[place].inside for place in load.met)
        uplinks = chunk * machine.uplink_beta * load.uplink
        return Times(
            machine.across_alpha if load.crosses else machine.inside_alpha,
            machine.message * load.messages,
            inside if inside >= uplinks else 0.0,
            uplinks if uplinks > inside else 0.0,
            machine.gamma * chunk * load.reduced,
        )

    def _busiest(self, chunk: float, machine: HostsMachine) -> Times:
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


def _links(message: Message, host: Sequence[int]) -> tuple[Link, Link]:
    """The links that carry a message: those of the hosts if given, otherwise those of the ranks."""
    source, target = message.source, message.target
    if host:
        return Link("host", host[source], "out of"), Link("host", host[target], "into")
    return Link("rank", source, "out of"), Link("rank", target, "into")
