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
    COLLECTIVES,
    DIVIDED,
    REDUCTIONS,
    input_chunks,
    output_chunks,
    promised,
    required_parts,
)
from ringlet.schedule.cost import sent
from ringlet.schedule.data import MOST_PARTS, MOST_ROUNDS, VERBS, Round, Schedule, ScheduleError, Step
from ringlet.schedule.execution import Execution, Message, execute, pair_messages
from ringlet.schedule.expression_trees import ranks_in


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
    well_formed(schedule)
    try:
        for rank, rounds in enumerate(schedule.ranks):
            for index, round in enumerate(rounds):
                _check_hazards(rank, index, round)
        execution = execute(schedule)
        results = _check_outputs(schedule, execution)
        _check_barrier(schedule, execution)
        return _measured(schedule, execution, results)
    except ScheduleError as error:
        error.schedule = schedule.name
        raise


def well_formed(schedule: Schedule) -> None:
    """Raises ScheduleError unless steps and messages fit the schedule's buffers and each other."""
    try:
        _check_shape(schedule)
        for rank, rounds in enumerate(schedule.ranks):
            for index, round in enumerate(rounds):
                _check_steps(schedule, rank, index, round)
        for message in pair_messages(schedule):
            _check_message(schedule, message)
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


def _check_message(schedule: Schedule, message: Message) -> None:
    sent, received = message.sent, message.received
    other = f"rank {message.target} in its round {message.target_round}"
    if sent.count != received.count:
        text = f"'{sent}' has {sent.count} chunks; it matches '{received}' of {other}, which takes {received.count}"
        raise ScheduleError(message.source, message.source_round, sent.first, text)
    if schedule.collective in DIVIDED and sent.first != received.first:
        text = f"'{sent}' matches '{received}' of {other}; a chunk of {schedule.collective} keeps its index"
        raise ScheduleError(message.source, message.source_round, sent.first, text)


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
