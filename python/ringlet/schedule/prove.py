"""The prover: checks by symbolic execution what a schedule computes, for all ranks and chunks.

Values are expression trees over the ranks' contributions, not sets, because sets lose order and double additions.
`prove` establishes the following, or raises a ScheduleError that names rank, round and chunk:

- every step lies inside the buffer and names an existing peer;
- the k-th send from a to b matches a k-th receive of the same chunks, and no send or receive is left over;
- no write under a read: no recv or copy onto a chunk that the same round reads, no two writes to one chunk other than
  several reduces;
- no deadlock, by one execution without buffers (ringlet.schedule.execution says why one is enough);
- every contribution exactly once in every output chunk, and nothing else in it;
- the same tree, up to commutation, wherever a chunk is an output: the same bits on all ranks;
- rounds, bytes, roundings and number of trees as the closed forms say (ringlet.schedule.closed_forms).

It shares no code with the engines, and states what collectives promise by itself (ringlet.schedule.collectives).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ringlet.schedule.closed_forms import ClosedForm, closed_form
from ringlet.schedule.collectives import (
    REDUCTIONS,
    promised,
)
from ringlet.schedule.cost import sent
from ringlet.schedule.data import Round, Schedule, ScheduleError, Step
from ringlet.schedule.execution import Execution, execute
from ringlet.schedule.expression_trees import ranks_in
from ringlet.schedule.messages import messages_of, naming


@dataclass(frozen=True)
class Proof:
    """The established figures of one schedule. `sent` is in units of S, of the rank that sends most."""

    algorithm: str
    collective: str
    world: int
    root: int
    rounds: int
    sent: Fraction
    depth: int  # roundings from a rank's input to the result, at most
    trees: int  # different summation orders; 1: an element's bits do not depend on its place; 0: nothing is summed
    closed_form: bool  # False: there is none on file; a wrong one raises
    hosts: tuple[int, ...] = ()  # as in the Schedule


def prove(schedule: Schedule) -> Proof:
    """Proves one schedule, registered or made by hand; raises ScheduleError if it is wrong."""
    messages_of(schedule)
    with naming(schedule):
        for rank, rounds in enumerate(schedule.ranks):
            for index, round in enumerate(rounds):
                _check_hazards(rank, index, round)
        execution = execute(schedule)
        results = _check_outputs(schedule, execution)
        _check_barrier(schedule, execution)
        return _measured(schedule, execution, results)


def _check_hazards(rank: int, index: int, round: Round) -> None:
    """No write under a read in one round; sending and reducing a chunk is legal (the butterfly)."""
    sent: dict[int, Step] = {}
    copied: dict[int, Step] = {}
    for step in round.steps:
        if step.verb in ("send", "copy"):
            reads = sent if step.verb == "send" else copied
            reads.update(dict.fromkeys(step.chunks, step))
    written: dict[int, Step] = {}
    for step in round.steps:
        if step.verb == "send":
            continue
        targets = range(step.peer, step.peer + step.count) if step.verb == "copy" else step.chunks
        for chunk in targets:
            under = copied.get(chunk) or (sent.get(chunk) if step.verb != "reduce" else None)
            if under:
                raise ScheduleError(rank, index, chunk, f"write under a read: '{step}' overwrites what '{under}' reads")
            other = written.get(chunk)
            if other and not step.verb == other.verb == "reduce":
                raise ScheduleError(rank, index, chunk, f"two writes to one chunk: '{other}' and '{step}'")
            written[chunk] = step


def _check_outputs(schedule: Schedule, execution: Execution) -> list[int]:
    """Every output holds what was promised; returns the trees, one for each output chunk of each rank."""
    trees = execution.trees
    first_seen: dict[int, tuple[int, int]] = {}  # chunk -> (rank, tree)
    found = []
    for rank, (first, count) in enumerate(schedule.outputs):
        for chunk in range(first, first + count):
            origin, ranks = promised(schedule.collective, rank, chunk, schedule.world, schedule.root)
            value = execution.values[rank][chunk]
            round = execution.written[rank].get(chunk)
            if value is None:
                raise ScheduleError(rank, round, chunk, "no step writes this output chunk")
            if value[0] != origin:
                text = f"ends with what was chunk {value[0]}, not chunk {origin}"
                raise ScheduleError(rank, round, chunk, text)
            _check_contributions(rank, round, chunk, trees.ranks[value[1]], ranks)
            found.append(value[1])
            other, tree = first_seen.setdefault(chunk, (rank, value[1]))
            if tree != value[1] and schedule.collective in REDUCTIONS:
                text = f"different bits: summed as {trees.text(value[1])}, on rank {other} as {trees.text(tree)}"
                raise ScheduleError(rank, round, chunk, text)
    return found


def _check_contributions(rank: int, round: int | None, chunk: int, ranks: int, wanted: int) -> None:
    lacks, extra = ranks_in(wanted & ~ranks), ranks_in(ranks & ~wanted)
    if lacks:
        raise ScheduleError(rank, round, chunk, f"ends without the contribution of rank {_listed(lacks)}")
    if extra:
        raise ScheduleError(
            rank, round, chunk, f"ends with a contribution that does not belong there, of rank {_listed(extra)}"
        )


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _check_barrier(schedule: Schedule, execution: Execution) -> None:
    if schedule.collective != "barrier":
        return
    for rank, (value,) in enumerate(execution.values):
        heard = execution.trees.ranks[value[1]] if value else 0
        missing = ranks_in(((1 << schedule.world) - 1) & ~heard)
        if missing:
            last = len(schedule.ranks[rank]) - 1 if schedule.ranks[rank] else None
            raise ScheduleError(rank, last, None, f"leaves the barrier without having heard of rank {_listed(missing)}")


def _measured(schedule: Schedule, execution: Execution, results: list[int]) -> Proof:
    summed = schedule.collective in REDUCTIONS
    by_rank = sent(schedule)
    form = closed_form(schedule.algorithm, schedule.collective, schedule.hosts, schedule.world)
    proof = Proof(
        algorithm=schedule.algorithm,
        collective=schedule.collective,
        world=schedule.world,
        root=schedule.root,
        rounds=schedule.rounds,
        sent=max(by_rank),
        depth=max((execution.trees.depth[tree] for tree in results), default=0),
        trees=len(set(results)) if summed else 0,
        closed_form=form is not None,
        hosts=schedule.hosts,
    )
    if form:
        _check_closed_form(schedule, proof, form, by_rank.index(proof.sent))
    return proof


def _check_closed_form(schedule: Schedule, proof: Proof, form: ClosedForm, busiest: int) -> None:
    longest = [len(rounds) for rounds in schedule.ranks].index(proof.rounds)
    figures = [(longest, "rounds", proof.rounds), (busiest, "S sent", proof.sent)]
    figures += [(0, "roundings", proof.depth), (0, "trees", proof.trees)]
    hosts = len(set(schedule.hosts)) or 1
    for (rank, what, found), expected in zip(figures, form.at(schedule.world, hosts), strict=True):
        if found != expected:
            last = len(schedule.ranks[rank]) - 1 if schedule.ranks[rank] else None
            raise ScheduleError(rank, last, None, f"{found} {what}, but the closed form says {expected}")
