"""The one zero-buffer symbolic execution of a schedule.

A rank posts all steps of its round together. A message passes when both its sides are posted. A round is over when all
its messages have passed; the rank then posts its next round. Nothing is buffered. Without wildcard receives, a program
that completes in this way completes under every timing (Siegel and Avrunin). It also gets the same values, because
messages match by position alone. So one execution is enough.

A barrier's messages carry no chunks. Its one chunk stands for the ranks whose news has reached a rank: a sum of them.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from dataclasses import dataclass, field

from ringlet.schedule.data import Schedule, ScheduleError
from ringlet.schedule.expression_trees import Trees, ranks_in
from ringlet.schedule.messages import Message, messages_of, naming

Value = tuple[int, int]  # (the input chunk it is made of, its expression tree); a chunk without one is None


@dataclass(frozen=True, slots=True)
class Change:
    """A rank's new values of chunks: its inputs at moment 0, then what changes at the end of a round."""

    moment: int
    rank: int
    values: dict[int, Value]


@dataclass
class Execution:
    """The result. A *moment* counts rounds on a common clock: round 0 takes from moment 0 to moment 1."""

    messages: list[Message]
    touching: list[list[list[Message]]]  # [rank][round]: the messages that it sends and receives
    trees: Trees
    values: list[list[Value | None]]  # [rank][chunk], at the end
    written: list[dict[int, int]]  # [rank]: chunk -> the last round that wrote it
    ends: list[list[int]]  # [rank][round]: the moment at which the round is over
    order: list[tuple[int, int]] = field(default_factory=list)  # (rank, round) as they completed
    moments: dict[Message, int] = field(default_factory=dict)  # when a message begins to pass
    changes: list[Change] = field(default_factory=list)  # as they were made

    def starts(self, rank: int, round: int) -> int:
        """The moment at which the rank posts the round."""
        return self.ends[rank][round - 1] if round else 0


def execute(schedule: Schedule) -> Execution:
    """Runs a schedule once: the schedule keeps its execution. ScheduleError, which names the schedule, for what
    `messages_of` refuses, a deadlock, a missing value or a double one."""
    kept: Execution | None = vars(schedule).get("_execution")
    if kept is None:
        messages = messages_of(schedule)
        with naming(schedule):
            kept = vars(schedule)["_execution"] = _Run(schedule, messages).run()
    return kept


class _Run:
    def __init__(self, schedule: Schedule, messages: list[Message]):
        self.schedule = schedule
        self.touching: list[list[list[Message]]] = [[[] for _ in rounds] for rounds in schedule.ranks]
        for message in messages:
            self.touching[message.source][message.source_round].append(message)
            self.touching[message.target][message.target_round].append(message)
        ranks = range(schedule.world)
        self.at = [-1 for _ in ranks]  # the round a rank has posted; its number of rounds when it has finished
        self.open = [0 for _ in ranks]  # messages of that round that have not passed
        self.incoming: list[list[tuple[Message, list[Value]]]] = [[] for _ in ranks]
        self.to_post = list(ranks)
        self.barrier = schedule.collective == "barrier"
        self.out = Execution(messages, self.touching, Trees(), [], [{} for _ in ranks], [[] for _ in ranks])
        for rank, (first, count) in enumerate(schedule.inputs):
            own = self.out.trees.leaf(rank)
            held = range(first, first + (count or self.barrier))
            self.out.values.append([(chunk, own) if chunk in held else None for chunk in range(schedule.parts)])
            self.out.changes.append(Change(0, rank, {chunk: (chunk, own) for chunk in held}))

    def run(self) -> Execution:
        while self.to_post:
            self.post_next(self.to_post.pop())
        stuck = [rank for rank, rounds in enumerate(self.schedule.ranks) if self.at[rank] < len(rounds)]
        if stuck:
            self.refuse_deadlock(stuck[0])
        return self.out

    def post_next(self, rank: int) -> None:
        index = self.at[rank] = self.at[rank] + 1
        if index == len(self.schedule.ranks[rank]):
            return
        messages = self.touching[rank][index]
        self.open[rank] = len(messages)
        if not messages:
            self.complete(rank)
        for message in messages:
            other, other_round = message.other_side(rank)
            if self.at[other] == other_round:
                self.deliver(message)

    def deliver(self, message: Message) -> None:
        source, target = message.source, message.target
        values = self.out.values[source]
        payload = []
        for chunk in [0] if self.barrier else message.sent.chunks:
            value = values[chunk]
            if value is None:
                raise ScheduleError(source, message.source_round, chunk, "sends a chunk that it does not have")
            payload.append(value)
        # The sender's values are still those from before its round: it cannot complete before this message passes.
        self.incoming[target].append((message, payload))
        starts = self.out.starts(source, message.source_round), self.out.starts(target, message.target_round)
        self.out.moments[message] = max(starts)
        for rank in (source, target):
            self.open[rank] -= 1
            if self.open[rank] == 0:
                self.complete(rank)

    def complete(self, rank: int) -> None:
        index = self.at[rank]
        values, written = self.out.values[rank], self.out.written[rank]
        end = 1 + max([self.out.moments[m] for m in self.touching[rank][index]] or [self.out.starts(rank, index)])
        new = self.news(rank) if self.barrier else self.new_values(rank, index)
        for chunk, value in new.items():
            values[chunk] = value
            written[chunk] = index
        self.incoming[rank].clear()
        self.out.ends[rank].append(end)
        self.out.order.append((rank, index))
        self.out.changes.append(Change(end, rank, new))
        self.to_post.append(rank)

    def news(self, rank: int) -> dict[int, Value]:
        """Of a barrier: all ranks that this one has heard of."""
        trees, values = self.out.trees, [self.out.values[rank][0], *(payload[0] for _, payload in self.incoming[rank])]
        heard = ranks_in(functools.reduce(operator.or_, (trees.ranks[value[1]] for value in values if value)))
        return {0: (0, trees.combine([trees.leaf(r) for r in heard]) if heard[1:] else trees.leaf(rank))}

    def new_values(self, rank: int, index: int) -> dict[int, Value]:
        before = self.out.values[rank]
        new: dict[int, Value] = {}
        terms: dict[int, list[tuple[int, Value]]] = defaultdict(list)
        for step in self.schedule.ranks[rank][index].steps:
            if step.verb != "copy":
                continue
            for offset, chunk in enumerate(step.chunks):
                value = before[chunk]
                if value is None:
                    raise ScheduleError(rank, index, chunk, "copies a chunk that it does not have")
                new[step.peer + offset] = value
        for message, payload in self.incoming[rank]:
            for chunk, value in zip(message.received.chunks, payload, strict=True):
                if message.received.verb == "recv":
                    new[chunk] = value
                else:
                    terms[chunk].append((message.source, value))
        for chunk, received in terms.items():
            own = before[chunk]
            if own is None:
                raise ScheduleError(rank, index, chunk, "reduces into a chunk that it does not have")
            # Stable: what comes from one rank stays in the order of its messages.
            new[chunk] = self.reduced(rank, index, chunk, sorted([*received, (rank, own)], key=lambda term: term[0]))
        return new

    def reduced(self, rank: int, index: int, chunk: int, terms: list[tuple[int, Value]]) -> Value:
        trees, origin, seen = self.out.trees, terms[0][1][0], 0
        for peer, (other_origin, tree) in terms:
            if other_origin != origin:
                text = f"combines contributions to chunk {origin} with rank {peer}'s to chunk {other_origin}"
                raise ScheduleError(rank, index, chunk, text)
            twice = ranks_in(seen & trees.ranks[tree])
            if twice:
                text = f"adds the contribution of rank {twice[0]} twice, the second time with what rank {peer} has"
                raise ScheduleError(rank, index, chunk, text)
            seen |= trees.ranks[tree]
        return origin, trees.combine([tree for _, (_, tree) in terms])

    def refuse_deadlock(self, rank: int) -> None:
        """Follows the chain of waiting ranks until a rank appears again."""
        path: list[tuple[int, Message]] = []
        while rank not in [waiting for waiting, _ in path]:
            message = next(m for m in self.touching[rank][self.at[rank]] if m not in self.out.moments)
            path.append((rank, message))
            rank = message.other_side(rank)[0]
        path = path[[waiting for waiting, _ in path].index(rank) :]
        lines = []
        for waiting, message in path:
            other, other_round = message.other_side(waiting)
            what = f"{'send to' if waiting == message.source else 'receive from'} rank {other}"
            lines.append(
                f"rank {waiting} in round {self.at[waiting]} waits to {what}, "
                f"which does so in round {other_round} and is in round {self.at[other]}"
            )
        first = path[0][1]
        step = first.sent if rank == first.source else first.received
        chunk = step.first if step.count else None
        raise ScheduleError(rank, self.at[rank], chunk, "deadlock without buffers: " + "; ".join(lines))
