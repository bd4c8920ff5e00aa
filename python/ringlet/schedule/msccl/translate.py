"""MSCCL programs as schedules.

A program has an input, an output and scratch; a schedule has one place for each chunk. So every value finds its place
by what it is made of, whatever buffer it was in: copies between buffers vanish, and a message that lands in scratch to
be added later is received when it is added. Local additions (re) that follow each other become one reduction, in rank
order, as the executor fuses them in its own. A program that needs two values of one chunk at one time on one GPU has no
schedule, and is refused. Rounds: a message stands in the first round that what its two sides read and write allows.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from ringlet.schedule.collectives import required_parts
from ringlet.schedule.data import Schedule
from ringlet.schedule.msccl.check import input_places, output_places
from ringlet.schedule.msccl.program import Location, MscclError, Program
from ringlet.schedule.msccl.races import Operation, run

ENDS = 1 << 60  # as a use: in the result


@dataclass(eq=False)
class _Value:
    """What a GPU has of a chunk. `home`: its place in the schedule. `uses`: which of the GPU's operations read it."""

    rank: int
    home: int
    origin: int
    uses: list[int] = field(default_factory=list)
    pending: tuple[int, ...] = ()  # the messages whose sum it is, if these are not received yet
    sum: int = -1  # of local additions that follow each other: the first one's message

    def used_after(self, operation: int) -> bool:
        return any(use > operation for use in self.uses)


@dataclass(frozen=True, slots=True)
class _Item:
    """A side of a message, or a copy: what a round is made of. chunk: its home; of a copy the target, from `source`."""

    verb: str
    rank: int
    chunk: int
    node: int
    source: int = -1
    sum: int = -1  # of those with the same one each is a term: they stand in one round


def translated(program: Program, name: str) -> Schedule:
    """The schedule, not yet proved. A schedule has one chunk a block: if the program cuts blocks into several chunks,
    all of them must go the same way. MscclError if they do not, or if there is no schedule."""
    rounds = _rounds(_Translation(program).items())
    slices = [_slice(program, rounds, part, name) for part in range(program.per_block)]
    different = len({schedule.ranks for schedule in slices})
    if different > 1:
        raise MscclError(
            f"cuts each block into {len(slices)} chunks that go {different} different ways; a schedule has one chunk a "
            "block"
        )
    return slices[0]


class _Translation:
    """From operations on buffers to operations on a schedule's chunks; of all slices at once, side by side."""

    def __init__(self, program: Program):
        self.program = program
        self.k = program.per_block
        self.operations = run(program)
        self.blocks = program.chunks // self.k  # of an all-reduce: its chunks
        self.values: dict[tuple[int, Location], _Value] = {}
        self.reads: dict[int, list[_Value]] = {}  # by operation
        self.made: dict[int, _Value] = {}
        self.homes: dict[tuple[int, int], _Value | None] = {}
        self.out: list[_Item] = []
        self.nodes = max((o.message for o in self.operations), default=-1) + 1

    def items(self) -> list[_Item]:
        self.follow_values()
        for index, operation in enumerate(self.operations):
            self.translate(index, operation)
        for value in dict.fromkeys(self.values.values()):
            if ENDS in value.uses:
                self.receive(value, ENDS - 1, "the end")
        return self.out

    # --- which values there are, and who reads them

    def follow_values(self) -> None:
        self.inputs()
        sent: dict[int, int] = {}  # message -> origin
        for index, op in enumerate(self.operations):
            if op.kind == "send":
                value = self.read(index, op, op.source)
                sent[op.message] = value.origin
            elif op.kind == "recv":
                self.write(index, op, sent[op.message], pending=(op.message,))
            elif op.kind == "copy":
                value = self.read_later(op, op.source)
                assert op.target is not None
                if self.home(op.rank, value.origin, op.target) == value.home:
                    self.values[op.rank, op.target] = value
                else:
                    value.uses.append(index)
                    self.reads[index] = [value]
                    self.write(index, op, value.origin)
            else:
                operands = [self.read(index, op, op.source)]
                if op.kind == "fold":
                    operands.insert(0, self.read(index, op, op.target))
                origins = {v.origin for v in operands} | ({sent[op.message]} if op.kind == "reduce" else set())
                if len(origins) > 1:
                    raise MscclError(
                        f"{op.step}: adds what belongs to chunks {' and '.join(map(str, sorted(origins)))}"
                    )
                self.reads[index] = operands
                self.write(index, op, operands[0].origin)
        self.results()

    def inputs(self) -> None:
        for (rank, place), chunk in input_places(self.program):
            # Of an all-to-all every rank's chunk is another.
            origin = rank * self.parts() * self.k + chunk if self.program.collective == "all_to_all" else chunk
            value = _Value(rank, chunk, origin)
            self.values[rank, place] = self.homes[rank, chunk] = value

    def results(self) -> None:
        for place, _ in output_places(self.program):
            if place not in self.values:
                rank, (buffer, offset) = place
                raise MscclError(f"GPU {rank}: no step writes {buffer}[{offset}], which is in the result")
            self.values[place].uses.append(ENDS)

    def parts(self) -> int:
        return required_parts(self.program.collective, self.program.world) or self.blocks

    def home(self, rank: int, origin: int, place: Location) -> int:
        """Where a schedule keeps what is at that place."""
        if self.program.collective != "all_to_all":
            return origin
        buffer, offset = place
        if buffer not in "io":
            raise MscclError(f"GPU {rank}: an all-to-all that passes through scratch or other GPUs has no schedule")
        return offset + (self.program.world * self.k if buffer == "o" else 0)

    def read_later(self, op: Operation, place: Location | None) -> _Value:
        assert place is not None
        value = self.values.get((op.rank, place))
        if value is None:
            raise MscclError(f"{op.step}: reads {place[0]}[{place[1]}], which nobody wrote")
        return value

    def read(self, index: int, op: Operation, place: Location | None) -> _Value:
        value = self.read_later(op, place)
        value.uses.append(index)
        self.reads.setdefault(index, []).append(value)
        return value

    def write(self, index: int, op: Operation, origin: int, pending: tuple[int, ...] = ()) -> None:
        assert op.target is not None
        value = _Value(op.rank, self.home(op.rank, origin, op.target), origin, pending=pending)
        self.values[op.rank, op.target] = self.made[index] = value

    # --- what a schedule does instead

    def translate(self, index: int, op: Operation) -> None:
        if op.kind == "send":
            (value,) = self.reads[index]
            self.receive(value, index, op.step)
            self.out.append(_Item("send", op.rank, value.home, op.message))
        elif op.kind == "recv":
            value = self.made[index]
            before = self.homes.get((op.rank, value.home))
            if before is None or not before.used_after(index):
                self.receive(value, index, op.step)
            elif not value.uses:
                raise MscclError(f"{op.step}: receives what nobody needs over what is still needed")
        elif op.kind == "reduce":
            (own,) = self.reads[index]
            self.receive(own, index, op.step)
            self.replace(index, own, op, (op.message,))
        elif op.kind == "fold":
            self.fold(index, op)
        elif index in self.made:  # a copy to another place
            (value,) = self.reads[index]
            self.receive(value, index, op.step)
            made = self.made[index]
            self.require_free(made, index, op.step)
            self.homes[op.rank, made.home] = made
            self.out.append(_Item("copy", op.rank, made.home, self.nodes, value.home))
            self.nodes += 1

    def fold(self, index: int, op: Operation) -> None:
        own, added = self.reads[index]
        made = self.made[index]
        if not added.pending or (own.pending and len(own.uses) == 1 and len(added.uses) > 1):
            own, added = added, own
        if not added.pending or len(added.uses) > 1:
            raise MscclError(
                f"{op.step}: adds two values of chunk {own.home} that the GPU both has; a schedule has one"
            )
        if own.pending and len(own.uses) == 1:  # neither has been received: nor need their sum be
            made.pending = own.pending + added.pending
            return
        self.receive(own, index, op.step)
        made.sum = own.sum if own.sum >= 0 and len(own.uses) == 1 else added.pending[0]
        self.replace(index, own, op, added.pending)
        added.pending = ()

    def replace(self, index: int, own: _Value, op: Operation, messages: tuple[int, ...]) -> None:
        if own.used_after(index):
            raise MscclError(
                f"{op.step}: needs chunk {own.home} both with and without what it adds; a schedule has one"
            )
        made = self.homes[op.rank, own.home] = self.made[index]
        self.out += [_Item("reduce", op.rank, own.home, message, sum=made.sum) for message in messages]

    def receive(self, value: _Value, index: int, words: str) -> None:
        """Makes sure that the value is in its place."""
        if value.pending:
            self.require_free(value, index, words)
            self.homes[value.rank, value.home] = value
            first, *others = value.pending
            value.sum = others[0] if others else -1
            self.out.append(_Item("recv", value.rank, value.home, first))
            self.out += [_Item("reduce", value.rank, value.home, message, sum=value.sum) for message in others]
            value.pending = ()
        elif self.homes.get((value.rank, value.home)) is not value:
            raise MscclError(f"{words}: needs a value of chunk {value.home} that another one has replaced")

    def require_free(self, value: _Value, index: int, words: str) -> None:
        before = self.homes.get((value.rank, value.home))
        # The operation itself may be the last that reads it.
        if before is not None and before is not value and before.used_after(index):
            raise MscclError(
                f"{words}: needs two values of chunk {value.home} at one time; a schedule has one place for it"
            )


def _rounds(items: list[_Item]) -> list[tuple[int, _Item]]:
    """(round, item) for each: the least rounds that keep what each rank reads and writes in order."""
    after: dict[int, list[tuple[int, int]]] = defaultdict(list)  # node -> (later node, rounds between)
    writer: dict[tuple[int, int], _Item] = {}
    readers: dict[tuple[int, int], list[tuple[int, bool]]] = defaultdict(list)
    for item in items:
        places = (
            [(item.source, True), (item.chunk, False)] if item.verb == "copy" else [(item.chunk, item.verb == "send")]
        )
        for chunk, reads in places:
            key = (item.rank, chunk)
            before = writer.get(key)
            if before and before.sum == item.sum >= 0:
                after[before.node].append((item.node, 0))
                after[item.node].append((before.node, 0))
            elif before:
                after[before.node].append((item.node, 1))
            if reads:
                readers[key].append((item.node, item.verb == "copy"))
                continue
            for node, copies in readers.pop(key, []):
                # What is added may be sent in the same round: a round's reads see what was there before it.
                after[node].append((item.node, 0 if item.verb == "reduce" and not copies else 1))
            writer[key] = item
    levels = dict.fromkeys((item.node for item in items), 0)
    ready = list(levels)
    while ready:
        moved: list[int] = []
        for node in ready:
            for later, between in after[node]:
                if levels[later] < levels[node] + between:
                    levels[later] = levels[node] + between
                    moved.append(later)
        ready = list(dict.fromkeys(moved))
        if ready and max(levels[node] for node in ready) > len(levels):
            raise MscclError("runs only as long as sends are buffered: messages wait for each other in a circle")
    return [(levels[item.node], item) for item in items]


@dataclass
class _Transfer:
    """A message, or a copy (from a rank to itself): in which round, from which chunk to which."""

    round: int
    source: int = -1
    target: int = -1
    verb: str = ""
    first: int = -1
    to: int = -1
    count: int = 1


def _slice(program: Program, rounds: list[tuple[int, _Item]], part: int, name: str) -> Schedule:
    """The schedule of each block's chunk number `part`."""
    k = program.per_block
    transfers: dict[int, _Transfer] = {}
    for level, item in rounds:
        if item.chunk % k != part:
            continue
        one = transfers.setdefault(item.node, _Transfer(level))
        if item.verb == "send":
            one.source, one.first = item.rank, item.chunk // k
        else:
            one.target, one.verb, one.to = item.rank, item.verb, item.chunk // k
        if item.verb == "copy":
            one.source, one.first = item.rank, item.source // k
    by_rank: list[dict[int, list[tuple[str, int, int, int]]]] = [defaultdict(list) for _ in range(program.world)]
    for one in _merged(list(transfers.values())):
        if one.verb == "copy":
            by_rank[one.source][one.round].append(("copy", one.to, one.first, one.count))
            continue
        by_rank[one.source][one.round].append(("send", one.target, one.first, one.count))
        by_rank[one.target][one.round].append((one.verb, one.source, one.to, one.count))
    ranks = [
        [sorted(levels[level], key=lambda step: step[0] != "send") for level in sorted(levels)] for levels in by_rank
    ]
    parts = required_parts(program.collective, program.world) or program.chunks
    return Schedule.from_steps(program.collective, parts, ranks, algorithm=name)


def _merged(transfers: list[_Transfer]) -> list[_Transfer]:
    """In an order that both sides of all messages take; neighbouring chunks together."""
    transfers.sort(key=lambda one: (one.round, one.source, one.target, one.first, one.to))
    merged: list[_Transfer] = []
    for one in transfers:
        last = merged[-1] if merged else one
        same = (last.round, last.source, last.target, last.verb) == (one.round, one.source, one.target, one.verb)
        if merged and same and (last.first + last.count, last.to + last.count) == (one.first, one.to):
            last.count += 1
        else:
            merged.append(one)
    return merged
