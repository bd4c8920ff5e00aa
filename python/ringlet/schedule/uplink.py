"""The load of a schedule on the links between hosts: contention that bytes counted per rank do not show.

Every host has one full-duplex uplink to a switch that is never the bottleneck. Messages that start at the same moment
of the zero-buffer execution share the uplinks. An uplink carries the bytes that leave and enter its host. The load
is the sum over moments of the busiest direction of the busiest uplink, in units of S (ringlet.schedule.collectives):
the time that the links need, times their bandwidth. An all-reduce over n hosts needs 2(n-1)/n at least.
Source of the model: Patarasuk and Yuan, JPDC 69(2), 2009 (contention on trees of switches).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from fractions import Fraction

from ringlet.schedule import Schedule
from ringlet.schedule.collectives import parts_of_s
from ringlet.schedule.execute import execute
from ringlet.schedule.messages import pair_messages

Direction = tuple[str, int]  # ("out of" or "into", host)


def uplink_load(schedule: Schedule, hosts: Sequence[int] | None = None) -> Fraction:
    """The load in units of S; `hosts[r]` is rank r's host (default: as the schedule was made for).

    ScheduleError if the schedule cannot run; ValueError if `hosts` is of another world.
    """
    busiest = sum(max(chunks.values()) for chunks in _by_moment(schedule, hosts).values())
    return Fraction(busiest, parts_of_s(schedule.collective, schedule.world, schedule.parts))


def uplink_totals(schedule: Schedule, hosts: Sequence[int] | None = None) -> dict[Direction, Fraction]:
    """The total of each uplink in each direction, in units of S. Errors as in `uplink_load`.

    The largest total would be the load if rounds overlapped without gaps.
    """
    unit = parts_of_s(schedule.collective, schedule.world, schedule.parts)
    totals: Counter[Direction] = sum(_by_moment(schedule, hosts).values(), Counter())
    return {direction: Fraction(chunks, unit) for direction, chunks in totals.items()}


def _by_moment(schedule: Schedule, hosts: Sequence[int] | None) -> dict[int, Counter[Direction]]:
    """By moment, the chunks on each uplink."""
    where = schedule.hosts if hosts is None else hosts
    if where and len(where) != schedule.world:
        raise ValueError(f"hosts has {len(where)} ranks, {schedule.name} has {schedule.world}")
    chunks: dict[int, Counter[Direction]] = defaultdict(Counter)
    messages = pair_messages(schedule)
    for message, moment in execute(schedule, messages).moments.items():
        source, target = (where[message.source], where[message.target]) if where else (0, 0)
        if source != target:
            chunks[moment]["out of", source] += message.sent.count
            chunks[moment]["into", target] += message.sent.count
    return chunks
