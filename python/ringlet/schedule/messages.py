"""Matches sends with receives: the k-th send from a to b matches the k-th recv or reduce at b from a."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from ringlet.schedule import Schedule, ScheduleError, Step


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


def pair_messages(schedule: Schedule) -> list[Message]:
    """All messages, by source, target and order; ScheduleError if a send or receive has no other side."""
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
