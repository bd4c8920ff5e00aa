"""What an MSCCL program computes, in its own order: the prover's question, asked of the file itself.

The schedule that a program becomes may sum in another order (ringlet.schedule.msccl.translate), so this looks at the
program: every result holds what its collective promises, every contribution once, the same sum on all GPUs.
"""

from __future__ import annotations

from ringlet.schedule.collectives import REDUCTIONS, input_chunks, output_chunks, promised, required_parts
from ringlet.schedule.expression_trees import Trees, ranks_in
from ringlet.schedule.msccl.program import Location, MscclError, Program
from ringlet.schedule.msccl.races import Operation, run

Value = tuple[int, int]  # the input chunk it is made of, its expression tree


def check(program: Program) -> tuple[int, int]:
    """(roundings at most, summation orders) of a program that is right; MscclError with what is wrong of another."""
    return _Check(program).check()


class _Check:
    def __init__(self, program: Program):
        self.program = program
        self.k = program.per_block
        self.parts = required_parts(program.collective, program.world) or program.chunks
        self.trees = Trees()
        self.values: dict[tuple[int, Location], Value] = {}
        self.sent: dict[int, Value] = {}

    def check(self) -> tuple[int, int]:
        for place, chunk in input_places(self.program):
            self.values[place] = (chunk, self.trees.leaf(place[0]))
        for operation in run(self.program):
            self.apply(operation)
        found = [self.result(place, chunk) for place, chunk in output_places(self.program)]
        depth = max((self.trees.depth[tree] for _, tree in found), default=0)
        orders = {tree for _, tree in found} if self.program.collective in REDUCTIONS else set()
        self.require_same_bits()
        return depth, len(orders)

    def apply(self, op: Operation) -> None:
        terms = [self.read(op, place) for place in self.operands(op)]
        if op.kind == "send":
            self.sent[op.message] = terms[0]
            return
        if op.message >= 0:
            terms.append(self.sent[op.message])
        assert op.target is not None
        self.values[op.rank, op.target] = terms[0] if len(terms) == 1 else self.added(op, terms)

    def operands(self, op: Operation) -> list[Location]:
        places = {"recv": [], "fold": [op.target, op.source]}.get(op.kind, [op.source])
        return [place for place in places if place is not None]

    def read(self, op: Operation, place: Location) -> Value:
        value = self.values.get((op.rank, place))
        if value is None:
            raise MscclError(f"{op.step}: reads {place[0]}[{place[1]}], which nobody wrote")
        return value

    def added(self, op: Operation, terms: list[Value]) -> Value:
        (chunk, first), (other, second) = terms
        if chunk != other:
            raise MscclError(f"{op.step}: adds what belongs to chunks {chunk} and {other}")
        twice = ranks_in(self.trees.ranks[first] & self.trees.ranks[second])
        if twice:
            raise MscclError(f"{op.step}, chunk {chunk}: adds the contribution of GPU {twice[0]} twice")
        return chunk, self.trees.combine([first, second])

    def result(self, place: tuple[int, Location], chunk: int) -> Value:
        rank, (buffer, offset) = place
        value = self.values.get(place)
        if value is None:
            raise MscclError(f"GPU {rank}: no step writes {buffer}[{offset}], which is in the result")
        block, part = divmod(chunk, self.k)
        origin, ranks = promised(self.program.collective, rank, block, self.program.world, 0)
        found = self.trees.ranks[value[1]]
        if value[0] != origin * self.k + part:
            raise MscclError(
                f"GPU {rank}: {buffer}[{offset}] ends with what was chunk {value[0]}, not {origin * self.k + part}"
            )
        if found != ranks:
            lacks, extra = ranks_in(ranks & ~found), ranks_in(found & ~ranks)
            what = f"without the contribution of GPU {lacks[0]}" if lacks else f"with one of GPU {extra[0]}"
            raise MscclError(f"GPU {rank}: {buffer}[{offset}] ends {what}")
        return value

    def require_same_bits(self) -> None:
        if self.program.collective not in REDUCTIONS:
            return
        seen: dict[int, tuple[int, int]] = {}
        for place, chunk in output_places(self.program):
            tree = self.values[place][1]
            rank, first = seen.setdefault(chunk, (place[0], tree))
            if tree != first:
                text = f"chunk {chunk}: different bits: GPU {place[0]} sums {self.trees.text(tree)}, GPU {rank} "
                raise MscclError(f"{text}{self.trees.text(first)}")


def input_places(program: Program) -> list[tuple[tuple[int, Location], int]]:
    """((GPU, place), chunk) of what the GPUs bring."""
    places = []
    k, parts = program.per_block, required_parts(program.collective, program.world) or program.chunks
    for rank in range(program.world):
        first, count = input_chunks(program.collective, rank, program.world, 0, parts)
        start = first * k if program.collective == "all_gather" else 0
        for chunk in range(first * k, (first + count) * k):
            places.append(((rank, program.memory(rank, ("i", chunk - start))), chunk))
    return places


def output_places(program: Program) -> list[tuple[tuple[int, Location], int]]:
    """((GPU, place), chunk) of the results."""
    places = []
    k, parts = program.per_block, required_parts(program.collective, program.world) or program.chunks
    for rank in range(program.world):
        first, count = output_chunks(program.collective, rank, program.world, 0, parts)
        start = first * k if program.collective in ("all_to_all", "reduce_scatter") else 0
        for chunk in range(first * k, (first + count) * k):
            places.append(((rank, program.memory(rank, ("o", chunk - start))), chunk))
    return places
