"""The messages of a schedule, and whether its steps fit its buffers and each other.

The k-th send from a to b matches the k-th recv or reduce at b from a.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from ringlet.schedule.collectives import COLLECTIVES, DIVIDED, ROOTED, input_chunks, output_chunks, required_parts
from ringlet.schedule.data import MOST_PARTS, MOST_ROUNDS, VERBS, Round, Schedule, ScheduleError, Step


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """One send and the receive it matches, each with its rank and that rank's round."""

    source: int
    source_round: int
    sent: Step
    target: int
    target_round: int
    received: Step

    def other_side(self, rank: int) -> tuple[int, int]:
        """(rank, round) of the other side than `rank`."""
        if rank == self.source:
            return self.target, self.target_round
        return self.source, self.source_round


def messages_of(schedule: Schedule) -> list[Message]:
    """All messages, by source, target and order; the schedule keeps them. Raises ScheduleError, which names the
    schedule, unless every step lies inside the buffer and names an existing peer, and every send and receive has its
    other side."""
    kept: list[Message] | None = vars(schedule).get("_messages")
    if kept is not None:
        return kept
    with naming(schedule):
        _check_shape(schedule)
        for rank, rounds in enumerate(schedule.ranks):
            for index, round in enumerate(rounds):
                _check_steps(schedule, rank, index, round)
        messages = _paired(schedule)
        for message in messages:
            _check_message(schedule, message)
    vars(schedule)["_messages"] = messages
    return messages


@contextlib.contextmanager
def naming(schedule: Schedule) -> Iterator[None]:
    """A ScheduleError raised inside names the schedule."""
    try:
        yield
    except ScheduleError as error:
        error.schedule = schedule.name
        raise


def _check_shape(schedule: Schedule) -> None:
    collective, world, root, parts = schedule.collective, schedule.world, schedule.root, schedule.parts
    if collective not in COLLECTIVES:
        raise ScheduleError(0, None, None, f"there is no collective {collective!r}; known: {', '.join(COLLECTIVES)}")
    if world < 1 or len(schedule.ranks) != world or not 0 <= root < world:
        text = f"world {world}, root {root} and {len(schedule.ranks)} ranks do not go together"
        raise ScheduleError(0, None, None, text)
    if root and collective not in ROOTED:
        raise ScheduleError(0, None, None, f"{collective} has no root, but the schedule has root {root}")
    if len(schedule.hosts) not in (0, world):
        raise ScheduleError(0, None, None, f"hosts names the hosts of {len(schedule.hosts)} ranks, of {world}")
    most_rounds = max(map(len, schedule.ranks))
    if parts > MOST_PARTS or most_rounds > MOST_ROUNDS:
        text = f"{parts} parts and {most_rounds} rounds: no engine takes more than {MOST_PARTS} and {MOST_ROUNDS}"
        raise ScheduleError(0, None, None, text)
    if parts < 1 or required_parts(collective, world) not in (None, parts):
        needed = required_parts(collective, world)
        text = f"{collective}, world {world}, has {'at least 1' if needed is None else needed} parts, not {parts}"
        raise ScheduleError(0, None, None, text)
    for rank in range(world):
        place = (collective, rank, world, root, parts)
        if schedule.inputs[rank] != input_chunks(*place) or schedule.outputs[rank] != output_chunks(*place):
            text = f"input {schedule.inputs[rank]} and output {schedule.outputs[rank]} should be "
            text += f"{input_chunks(*place)} and {output_chunks(*place)} (first chunk, count)"
            raise ScheduleError(rank, None, schedule.inputs[rank][0], text)


def _check_steps(schedule: Schedule, rank: int, index: int, round: Round) -> None:
    world, parts = schedule.world, schedule.parts
    for step in round.steps:
        if step.verb not in VERBS:
            raise ScheduleError(
                rank, index, step.first, f"the verb must be one of {', '.join(VERBS)}, got {step.verb!r}"
            )
        if not _inside(step.first, step.count, parts):
            raise ScheduleError(rank, index, step.first, f"{step} lies outside the {parts} parts")
        if schedule.collective == "barrier" and step.count:
            raise ScheduleError(rank, index, step.first, f"{step}: the messages of a barrier carry no chunks")
        if step.verb == "copy":
            if not _inside(step.peer, step.count, parts):
                raise ScheduleError(rank, index, step.peer, f"{step} lies outside the {parts} parts")
            if schedule.collective in DIVIDED and step.peer != step.first:
                text = f"{step}: a chunk of {schedule.collective} keeps its index, for chunks may differ by an element"
                raise ScheduleError(rank, index, step.peer, text)
        elif not 0 <= step.peer < world:
            text = f"{step}: there is no rank {step.peer} in a world of {world}"
            raise ScheduleError(rank, index, step.first, text)
        elif step.peer == rank:
            raise ScheduleError(rank, index, step.first, f"{step}: a rank has no messages with itself; copy is local")


def _inside(first: int, count: int, parts: int) -> bool:
    return first >= 0 and count >= 0 and first + count <= parts


def _paired(schedule: Schedule) -> list[Message]:
    """By source, target and order."""
    sends: dict[tuple[int, int], list[tuple[int, Step]]] = defaultdict(list)
    receives: dict[tuple[int, int], list[tuple[int, Step]]] = defaultdict(list)
    for rank, rounds in enumerate(schedule.ranks):
        for index, round in enumerate(rounds):
            for step in round.steps:
                if step.verb == "send":
                    sends[rank, step.peer].append((index, step))
                elif step.verb != "copy":
                    receives[step.peer, rank].append((index, step))
    messages = []
    for source, target in sorted(sends.keys() | receives.keys()):
        sent, received = sends[source, target], receives[source, target]
        messages += [Message(source, i, s, target, j, r) for (i, s), (j, r) in zip(sent, received, strict=False)]
        _check_all_met(source, target, sent, received)
    return messages


def _check_all_met(source: int, target: int, sent: list[tuple[int, Step]], received: list[tuple[int, Step]]) -> None:
    met = min(len(sent), len(received))
    if len(sent) > met:
        round, step = sent[met]
        text = f"send {met} to rank {target} is never received: rank {target} receives {met} from rank {source}"
        raise ScheduleError(source, round, step.first, text)
    if len(received) > met:
        round, step = received[met]
        text = f"{step.verb} {met} from rank {source} never gets anything: rank {source} sends {met} to rank {target}"
        raise ScheduleError(target, round, step.first, text)


def _check_message(schedule: Schedule, message: Message) -> None:
    sent, received = message.sent, message.received
    other = f"rank {message.target} in its round {message.target_round}"
    if sent.count != received.count:
        text = f"'{sent}' has {sent.count} chunks; it matches '{received}' of {other}, which takes {received.count}"
        raise ScheduleError(message.source, message.source_round, sent.first, text)
    if schedule.collective in DIVIDED and sent.first != received.first:
        text = f"'{sent}' matches '{received}' of {other}; a chunk of {schedule.collective} keeps its index"
        raise ScheduleError(message.source, message.source_round, sent.first, text)
