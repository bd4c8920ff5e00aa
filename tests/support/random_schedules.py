"""Random right schedules of every collective but barrier, and what their results are.

A draft is made moment by moment on a common clock. In each moment ranks exchange random chunks, as long as the
collective can still come to its end; then what is missing is brought to its place. So it is right by construction.
`varied` then moves steps to other rounds where the prover agrees, so that ranks get ahead of each other.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ringlet.schedule.collectives import (
    DIVIDED,
    REDUCTIONS,
    ROOTED,
    input_chunks,
    output_chunks,
    promised,
    required_parts,
)
from ringlet.schedule.data import Round, Schedule, ScheduleError, Step
from ringlet.schedule.execution import execute
from ringlet.schedule.expression_trees import ranks_in
from ringlet.schedule.prove import prove

Place = tuple[int, int]  # (rank, chunk)
Tree = Any  # a rank, or a tuple of trees in the order in which they are added

COLLECTIVES = (
    *["all_reduce"] * 3,
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
)


@dataclass(frozen=True)
class Value:
    origin: int
    ranks: frozenset[int]
    tree: Tree


@dataclass(frozen=True)
class Move:
    """A message; on one rank a copy."""

    source: Place
    target: Place
    verb: str


class Draft:
    def __init__(self, lot: random.Random, collective: str, world: int, root: int, parts: int) -> None:
        self.lot, self.collective, self.world, self.parts = lot, collective, world, parts
        self.moments: list[list[Move]] = []
        self.values: dict[Place, Value] = {}
        self.needs: dict[Place, tuple[int, frozenset[int]]] = {}
        self.results: dict[int, Value] = {}  # by chunk, of reductions: which of its sums all get
        for rank in range(world):
            place = (collective, rank, world, root, parts)
            first, count = input_chunks(*place)
            for chunk in range(first, first + count):
                self.values[rank, chunk] = Value(chunk, frozenset({rank}), rank)
            first, count = output_chunks(*place)
            for chunk in range(first, first + count):
                origin, mask = promised(collective, rank, chunk, world, root)
                self.needs[rank, chunk] = origin, frozenset(ranks_in(mask))

    def has(self, place: Place) -> bool:
        value = self.values.get(place)
        if value is None or (value.origin, value.ranks) != self.needs[place]:
            return False
        return self.collective not in REDUCTIONS or self.results.setdefault(value.origin, value) == value

    def cover(self, values: dict[Place, Value], origin: int, ranks: frozenset[int]) -> list[Place]:
        """Places on different ranks whose values add up to what is needed; none if there are no such places."""
        held = [(place, value) for place, value in values.items() if value.origin == origin and value.ranks <= ranks]
        self.lot.shuffle(held)

        def extended(taken: list[Place], left: frozenset[int]) -> list[Place]:
            if not left:
                return taken
            for place, value in held:
                if min(left) in value.ranks and value.ranks <= left and place[0] not in [rank for rank, _ in taken]:
                    found = extended([*taken, place], left - value.ranks)
                    if found:
                        return found
            return []

        return extended([], ranks)

    def after(self, moves: list[Move]) -> dict[Place, Value] | None:
        """The values after such a moment; None if it would be wrong, or a result could not be made any more."""
        read = {move.source for move in moves}
        copied = {move.source for move in moves if move.source[0] == move.target[0]}
        values, terms, written = dict(self.values), {}, {}
        for move in moves:
            both_reduce = move.verb == written.get(move.target, move.verb) == "reduce"
            if (
                move.source not in self.values
                or move.target in copied
                or (move.verb != "reduce" and move.target in read)
                or (move.target in written and not both_reduce)
            ):
                return None
            written[move.target] = move.verb
            values[move.target] = self.values[move.source]
            if move.verb == "reduce":
                terms.setdefault(move.target, []).append((move.source[0], self.values[move.source]))
        for place, received in terms.items():
            if place not in self.values:
                return None
            added = sorted([*received, (place[0], self.values[place])], key=lambda term: term[0])
            ranks = frozenset().union(*(value.ranks for _, value in added))
            if len({value.origin for _, value in added}) > 1 or len(ranks) < sum(len(v.ranks) for _, v in added):
                return None
            values[place] = Value(added[0][1].origin, ranks, tuple(value.tree for _, value in added))
        for origin, ranks in set(self.needs.values()):
            result = self.results.get(origin)
            if not (result in values.values() if result else self.cover(values, origin, ranks)):
                return None
        return values

    def take(self, moves: list[Move]) -> None:
        values = self.after(moves)
        if moves and values is not None:
            self.values = values
            self.moments.append(moves)

    def random_moves(self) -> list[Move]:
        """A message, perhaps both ways, and of neighbours too."""
        (source, chunk), to = self.lot.choice(list(self.values)), self.lot.randrange(self.world)
        target = chunk if self.collective in DIVIDED or self.lot.random() < 0.5 else self.lot.randrange(self.parts)
        if source == to:
            return [Move((source, chunk), (to, target), "copy")] if chunk != target else []
        if self.collective not in REDUCTIONS or self.lot.random() < 0.25:
            moves = [Move((source, chunk), (to, target), "recv")]
        else:
            moves = [Move((source, chunk), (to, target), "reduce")]
            if self.lot.random() < 0.5:
                moves.append(Move((to, target), (source, chunk), "reduce"))
        ahead = range(1, self.lot.randrange(1, 4))
        more = [
            Move((m.source[0], m.source[1] + i), (m.target[0], m.target[1] + i), m.verb) for m in moves for i in ahead
        ]
        return moves + [move for move in more if move.target[1] < self.parts]

    def wander(self) -> None:
        moves: list[Move] = []
        for _ in range(self.lot.randrange(1, 6 * self.world)):
            for move in self.random_moves():
                if self.after([*moves, move]) is not None:
                    moves.append(move)
        self.take(moves)

    def finish(self) -> None:
        while missing := [place for place in self.needs if not self.has(place)]:
            place = self.lot.choice(missing)
            origin, ranks = self.needs[place]
            result = self.results.get(origin)
            whole = [
                p for p, v in self.values.items() if (v.origin, v.ranks) == (origin, ranks) and result in (None, v)
            ]
            if whole:
                source = self.lot.choice(whole)
                if self.collective in REDUCTIONS:
                    self.results[origin] = self.values[source]
                if source != place:
                    self.take([Move(source, place, "copy" if source[0] == place[0] else "recv")])
            else:
                target, *sources = self.cover(self.values, origin, ranks)
                self.take(
                    [Move(source, target, "reduce") for source in sources[: self.lot.randrange(1, len(sources) + 1)]]
                )
            if self.collective not in DIVIDED and self.lot.random() < 0.1:
                self.wander()  # what is in the way may go elsewhere

    def rounds(self) -> tuple[tuple[Round, ...], ...]:
        """By rank; the steps of a round in any order in which messages between two ranks keep theirs."""
        ranks: list[list[Round]] = [[] for _ in range(self.world)]
        for moves in self.moments:
            queues: list[dict[Any, list[Step]]] = [{} for _ in range(self.world)]
            for a, b, verb, x, y, count in joined_neighbours(moves):
                if a == b:
                    queues[a]["copy", x, y] = [Step("copy", y, x, count)]
                else:
                    queues[a].setdefault(("send", b), []).append(Step("send", b, x, count))
                    queues[b].setdefault(("take", a), []).append(Step(verb, a, y, count))
            for rounds, mine in zip(ranks, queues, strict=True):
                if mine:
                    rounds.append(Round(tuple(shuffled(self.lot, mine.values()))))
        return tuple(map(tuple, ranks))


def joined_neighbours(moves: list[Move]) -> list[list[Any]]:
    """[from, to, verb, first chunk, first target, count], in their order."""
    joined: list[list[Any]] = []
    for move in moves:
        (a, x), (b, y) = move.source, move.target
        last = next((one for one in reversed(joined) if one[:2] == [a, b]), None)
        if last and last[2] == move.verb and (x, y) == (last[3] + last[5], last[4] + last[5]):
            last[5] += 1
        else:
            joined.append([a, b, move.verb, x, y, 1])
    return joined


def shuffled(lot: random.Random, queues: Iterable[list[Step]]) -> list[Step]:
    left, steps = [list(queue) for queue in queues], []
    while left:
        queue = lot.choice(left)
        steps.append(queue.pop(0))
        left = [queue for queue in left if queue]
    return steps


def drafted(seed: int, world: int | None = None) -> tuple[Schedule, dict[Place, Value]]:
    """A schedule, and the values of all output chunks."""
    lot = random.Random(seed)
    collective = lot.choice(COLLECTIVES)
    world = world or lot.choice((1, 2, 3, 4, 5))
    parts = required_parts(collective, world) or lot.choice((1, 2, 3, 4, 5, 9))
    root = lot.randrange(world) if collective in ROOTED else 0
    draft = Draft(lot, collective, world, root, parts)
    for _ in range(lot.choice((0, 1, 2, 3, 5, 8))):
        draft.wander()
    draft.finish()
    places = [(collective, rank, world, root, parts) for rank in range(world)]
    inputs, outputs = (tuple(chunks(*place) for place in places) for chunks in (input_chunks, output_chunks))
    schedule = Schedule(f"random_{seed}", collective, world, root, parts, draft.rounds(), inputs, outputs)
    return schedule, {place: draft.values[place] for place in draft.needs}


def proved(schedule: Schedule) -> dict[Place, Value]:
    """The values of all output chunks, as the prover has them."""
    prove(schedule)
    done = execute(schedule)

    def tree_of(number: int) -> Tree:
        terms = done.trees.terms(number)
        return tuple(map(tree_of, terms)) if terms else ranks_in(done.trees.ranks[number])[0]

    def value_of(rank: int, chunk: int) -> Value:
        origin, number = done.values[rank][chunk]
        return Value(origin, frozenset(ranks_in(done.trees.ranks[number])), tree_of(number))

    outputs = enumerate(schedule.outputs)
    return {(rank, first + i): value_of(rank, first + i) for rank, (first, count) in outputs for i in range(count)}


def with_steps_elsewhere(lot: random.Random, schedule: Schedule) -> Schedule:
    """Right or wrong."""
    ranks = [[list(round.steps) for round in rounds] for rounds in schedule.ranks]
    rounds = lot.choice(ranks)
    if not rounds:
        return schedule
    i = lot.randrange(len(rounds))
    pair = rounds[i : i + 2]
    match lot.choice(("merge", "split", "move", "swap")):
        case "merge":
            pair = [[step for steps in pair for step in steps]]
        case "split":
            first = [step for step in pair[0] if lot.random() < 0.5]
            pair = [first, [step for step in pair[0] if step not in first], *pair[1:]]
        case "move":
            pair[-1].append(pair[0].pop(lot.randrange(len(pair[0]))))
        case "swap":
            pair.reverse()
    rounds[i : i + 2] = pair
    return replace(schedule, ranks=tuple(tuple(Round(tuple(steps)) for steps in rounds if steps) for rounds in ranks))


def varied(seed: int, world: int | None = None) -> tuple[Schedule, dict[Place, Value]]:
    """A right schedule in which ranks may get ahead of each other, and its results."""
    schedule, results = drafted(seed, world)
    lot = random.Random(seed)
    for _ in range(24):
        other = with_steps_elsewhere(lot, schedule)
        with contextlib.suppress(ScheduleError):
            results = proved(other)
            schedule = other
    return schedule, results
