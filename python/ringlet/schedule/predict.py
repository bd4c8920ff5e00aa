"""Predicts the time of a schedule on hosts with uplinks: the model of `cost`, with two kinds of links and segments.

The time of a round is the latency of its slowest kind of link, a rank's time for each of its messages, the bytes and
the combining. Bytes inside a host take the time of the busier direction of the busier rank, as in
ringlet.schedule.cost. Messages between hosts at the same moment share the uplinks (ringlet.schedule.uplink). A round
lasts until the busiest uplink that it uses has carried all messages of that moment. The first segment takes that long.
Each further segment takes as long as the busiest resource, an uplink or a rank, needs for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from ringlet.schedule import Schedule
from ringlet.schedule.collectives import parts_of_s
from ringlet.schedule.execute import execute
from ringlet.schedule.machine_file import HostsMachine
from ringlet.schedule.messages import Message, pair_messages


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
        uplinks: Counter[tuple[int, str, int]] = Counter()
        for message in messages:
            sides[message.source, message.source_round].append(message)
            sides[message.target, message.target_round].append(message)
            if message in self._crossing:
                moment, chunks = execution.moments[message], message.sent.count
                uplinks[moment, "out", host[message.source]] += chunks
                uplinks[moment, "in", host[message.target]] += chunks
        shared = {
            m: max(
                uplinks[execution.moments[m], "out", host[m.source]],
                uplinks[execution.moments[m], "in", host[m.target]],
            )
            for m in self._crossing
        }
        self._loads = {place: self._load(place, sides[place], shared) for place in self._order}
        totals: Counter[tuple[str, int]] = Counter()
        for (_, way, where), chunks in uplinks.items():
            totals[way, where] += chunks
        self._uplink_total = max(totals.values(), default=0)

    def seconds(self, nbytes: float, machine: HostsMachine, segments: int = 1) -> float:
        """Seconds for S = nbytes in segments that follow each other as closely as links and ranks let them."""
        chunk = nbytes / self._unit / segments
        ends = [[0.0] for _ in range(self._schedule.world)]
        for rank, index in self._order:
            load = self._loads[rank, index]
            start = max(ends[other][round_] for other, round_ in load.met)
            inside = max(self._loads[place].inside for place in load.met)
            took = machine.across_alpha if load.crosses else machine.inside_alpha
            took += machine.message * load.messages + machine.gamma * chunk * load.reduced
            took += chunk * max(machine.inside_beta * inside, machine.uplink_beta * load.uplink)
            ends[rank].append(start + took)
        return max(rounds[-1] for rounds in ends) + (segments - 1) * self._busiest(chunk, machine)

    def _busiest(self, chunk: float, machine: HostsMachine) -> float:
        """The time for which one segment occupies its busiest resource."""
        ranks: Counter[int] = Counter()
        busy: dict[int, float] = defaultdict(float)
        for (rank, _), load in self._loads.items():
            ranks[rank] += load.messages
            busy[rank] += chunk * (machine.inside_beta * load.inside + machine.gamma * load.reduced)
        of_ranks = max((busy[rank] + machine.message * count for rank, count in ranks.items()), default=0.0)
        return max(of_ranks, chunk * machine.uplink_beta * self._uplink_total)

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
