"""The cost of a schedule: its rounds and bytes, and its seconds under the alpha-beta-gamma model.

A round takes alpha for its start, beta for each byte of the busier direction of the busier side, and gamma for each
byte that the rank combines. It starts when all ranks with which it has messages have reached their rounds. For a ring
this gives 2(p-1) alpha + 2S(p-1)/p beta + S(p-1)/p gamma. Links are full duplex, and there is no contention
(ringlet.schedule.predict has the links between hosts). Source: Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005,
section 3.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction

from ringlet.errors import InvalidUsage
from ringlet.schedule import Schedule
from ringlet.schedule.collectives import parts_of_s
from ringlet.schedule.execute import execute
from ringlet.schedule.messages import Message, pair_messages


@dataclass(frozen=True)
class Counts:
    """Exact counts; `sent`, `received` and `reduced` are each rank's, in units of S (ringlet.schedule.collectives)."""

    rounds: int
    sent: tuple[Fraction, ...]
    received: tuple[Fraction, ...]
    reduced: tuple[Fraction, ...]


@dataclass(frozen=True)
class Machine:
    """alpha: seconds a round; beta: seconds a byte sent; gamma: seconds a byte combined. Default: 25 Gb/s Ethernet."""

    alpha: float = 20e-6
    beta: float = 8 / 25e9
    gamma: float = 1 / 20e9


@dataclass(frozen=True)
class Cost:
    """`seconds` until the last rank has finished, the time of each rank, and the `counts` behind them."""

    seconds: float
    ranks: tuple[float, ...]
    counts: Counts


def counts(schedule: Schedule) -> Counts:
    """Counts a schedule's rounds and bytes."""
    unit = parts_of_s(schedule.collective, schedule.world, schedule.parts)
    chunks: dict[str, list[Fraction]] = {"send": [], "recv": [], "reduce": []}
    for rounds in schedule.ranks:
        for verb, per_rank in chunks.items():
            count = sum(step.count for round in rounds for step in round.steps if step.verb == verb)
            per_rank.append(Fraction(count, unit))
    received = tuple(a + b for a, b in zip(chunks["recv"], chunks["reduce"], strict=True))
    return Counts(schedule.rounds, tuple(chunks["send"]), received, tuple(chunks["reduce"]))


def cost(schedule: Schedule, nbytes: float, machine: Machine | None = None) -> Cost:
    """Seconds for S = nbytes on a machine (default: Machine()). ScheduleError if the schedule cannot run, InvalidUsage
    for a wrong nbytes."""
    if not 0 <= nbytes < math.inf:
        raise InvalidUsage(f"cost: nbytes must be a number of bytes from 0 on, got {nbytes}")
    machine = machine or Machine()
    chunk_bytes = nbytes / parts_of_s(schedule.collective, schedule.world, schedule.parts)
    messages = pair_messages(schedule)
    sides: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for message in messages:
        sides[message.source, message.source_round].append(message)
        sides[message.target, message.target_round].append(message)
    ends = [[0.0] for _ in range(schedule.world)]  # ends[rank][i]: when it posts round i
    for rank, index in execute(schedule, messages).order:
        met = [(rank, index)] + [message.other_side(rank) for message in sides[rank, index]]
        start = max(ends[r][i] for r, i in met)
        port_bytes = chunk_bytes * max(_port_chunks(schedule, r, i) for r, i in met)
        reduced = sum(step.count for step in schedule.ranks[rank][index].steps if step.verb == "reduce")
        took = machine.alpha + machine.beta * port_bytes + machine.gamma * chunk_bytes * reduced
        ends[rank].append(start + took)
    done = tuple(rounds[-1] for rounds in ends)
    return Cost(max(done), done, counts(schedule))


def _port_chunks(schedule: Schedule, rank: int, index: int) -> int:
    """Chunks in the busier direction of one rank's round."""
    out = into = 0
    for step in schedule.ranks[rank][index].steps:
        out += step.count if step.verb == "send" else 0
        into += step.count if step.verb in ("recv", "reduce") else 0
    return max(out, into)
