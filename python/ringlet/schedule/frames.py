"""A schedule as frames, for drawings: every rank's chunks at every moment, and the transfers between them.

A moment counts rounds on a common clock (ringlet.schedule.execution). Frame 0 is the input, frame t the state after t
rounds.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass

from ringlet.schedule.collectives import REDUCTIONS
from ringlet.schedule.data import Schedule
from ringlet.schedule.execution import execute

Content = tuple[int, int]  # (the input chunk it is made of, the contributing ranks as a bit mask)
Frame = tuple[tuple[Content | None, ...], ...]  # [rank][box]

_MOMENT = operator.attrgetter("moment")


@dataclass(frozen=True, slots=True)
class Transfer:
    """One chunk's way from a box of the frame `begins` to a box of the frame `ends`."""

    verb: str
    source: int
    source_box: int
    target: int
    target_box: int
    begins: int
    ends: int


@dataclass(frozen=True)
class Frames:
    """`whole` contributions make a box full. `by_rank`: one box whose contributions are worth telling apart.

    `spent` are the boxes (frame, rank, box) that no rank will read again and that are no result.
    """

    schedule: Schedule
    frames: tuple[Frame, ...]
    spent: frozenset[tuple[int, int, int]]
    transfers: tuple[Transfer, ...]
    whole: int
    by_rank: bool


def frames_of(schedule: Schedule) -> Frames:
    """Runs a schedule symbolically and keeps every frame; ScheduleError if it cannot run."""
    execution = execute(schedule)
    barrier = schedule.collective == "barrier"
    now: list[list[Content | None]] = [[None] * schedule.parts for _ in schedule.ranks]
    frames: list[Frame] = []
    for _, changes in itertools.groupby(sorted(execution.changes, key=_MOMENT), key=_MOMENT):
        for change in changes:
            for chunk, (origin, tree) in change.values.items():
                now[change.rank][chunk] = (origin, execution.trees.ranks[tree])
        frames.append(tuple(map(tuple, now)))
    transfers = []
    for message in execution.messages:
        begins, ends = execution.moments[message], execution.ends[message.target][message.target_round]
        # A barrier's messages carry no chunk; their arrow joins the two ranks' only box.
        pairs = [(0, 0)] if barrier else zip(message.sent.chunks, message.received.chunks, strict=True)
        for source_box, target_box in pairs:
            sides = (message.source, source_box, message.target, target_box)
            transfers.append(Transfer(message.received.verb, *sides, begins, ends))
    for rank, rounds in enumerate(schedule.ranks):
        for index, round in enumerate(rounds):
            for step in (step for step in round.steps if step.verb == "copy"):
                moments = execution.starts(rank, index), execution.ends[rank][index]
                transfers += [
                    Transfer("copy", rank, c, rank, step.peer + c - step.first, *moments) for c in step.chunks
                ]
    transfers.sort(key=lambda t: (t.begins, t.source, t.source_box, t.target, t.target_box))
    whole = schedule.world if barrier or schedule.collective in REDUCTIONS else 1
    spent = frozenset() if barrier else _spent(schedule, transfers, len(frames))
    return Frames(schedule, tuple(frames), spent, tuple(transfers), whole, whole > 1 and schedule.parts == 1)


def _spent(schedule: Schedule, transfers: list[Transfer], frames: int) -> frozenset[tuple[int, int, int]]:
    reads = {(t.begins, t.source, t.source_box) for t in transfers}
    reads |= {(t.ends - 1, t.target, t.target_box) for t in transfers if t.verb == "reduce"}
    writes = {(t.ends, t.target, t.target_box) for t in transfers}
    spent = set()
    for rank, (first, count) in enumerate(schedule.outputs):
        for box in range(schedule.parts):
            needed = first <= box < first + count
            for moment in reversed(range(frames)):
                # From the last frame backwards: if a later write replaces a value, only a read before it needs it.
                needed = (moment, rank, box) in reads or (needed and (moment + 1, rank, box) not in writes)
                if not needed:
                    spent.add((moment, rank, box))
    return frozenset(spent)
