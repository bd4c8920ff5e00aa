"""One case of the contract: a collective call with exact data, and what it must leave in every rank's tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import emulated_gpu
import ringlet
from exact_data import difference, input_of, result_of, scale_of
from ringlet.schedule.collectives import BLOCKED, COLLECTIVES, REDUCTIONS, ROOTED

# mixed: registered on some ranks only. Cases also have gpu, emulated_gpu.py's, and cuda, a real one's.
MEMORIES = ("registered", "ordinary", "mixed")
LARGE = 123567
MOVES = tuple(name for name in COLLECTIVES if name not in (*REDUCTIONS, "barrier"))
ONLY_IN_PLACE = ("broadcast", "reduce")
ALGORITHMS: dict[str, list[str]] = {}
for _name, _collective, _ in ringlet.schedule.algorithms():
    ALGORITHMS.setdefault(_collective, []).append(_name)


class Checks:
    """Collects what went wrong, so that one wrong case does not part the ranks."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def equal(self, case: object, got: torch.Tensor, wanted: torch.Tensor) -> None:
        if found := difference(got.cpu(), wanted):
            self.failures.append(f"{case}: {found}")

    def conclude(self) -> None:
        if self.failures:
            raise AssertionError(f"{len(self.failures)} wrong; the first: " + "\n".join(self.failures[:8]))


@dataclass(frozen=True)
class Case:
    collective: str
    algorithm: str
    dtype: torch.dtype
    op: str
    count: int  # of a block, where the collective has blocks
    memory: str
    in_place: bool
    root: int = 0
    shift: int = 0  # where in its table the data begin: cases that differ in it alone differ in all their data

    def input_of(self, world: int, rank: int, count: int) -> torch.Tensor:
        return input_of(self.dtype, self.op, world, rank, count + self.shift)[self.shift :]

    def result_of(self, world: int, count: int) -> torch.Tensor:
        return result_of(self.dtype, self.op, world, count + self.shift)[self.shift :]


@dataclass
class Call:
    """A case on one rank: its tensors, and what must be in them afterwards (None: nothing is said)."""

    case: Case
    source: torch.Tensor
    output: torch.Tensor
    mine: torch.Tensor
    wanted: torch.Tensor | None

    def check(self, checks: Checks) -> None:
        if self.wanted is not None:
            checks.equal(self.case, self.output, self.wanted)
        if self.source.data_ptr() != self.output.data_ptr() and not self.case.in_place:
            checks.equal((self.case, "input"), self.source, self.mine)


def counts_of(collective: str, world: int) -> list[int]:
    large = LARGE // world if collective in BLOCKED else LARGE
    return sorted({0, 1, world - 1, world + 1, large})


def roots_of(collective: str, world: int) -> range:
    return range(world if collective in ROOTED else 1)


def placed(values: torch.Tensor, memory: str, rank: int) -> torch.Tensor:
    if memory in ("gpu", "cuda"):
        return values.to(emulated_gpu.DEVICE if memory == "gpu" else "cuda")
    if memory == "ordinary" or (memory == "mixed" and rank % 2 == 1):
        return values.clone()
    if memory == "offset":  # registered, one element after its beginning
        return ringlet.empty(values.numel() + 1, dtype=values.dtype)[1:].copy_(values)
    return ringlet.empty(values.shape, dtype=values.dtype).copy_(values)


def blank(case: Case, rank: int, count: int) -> torch.Tensor:
    values = torch.empty(count, dtype=case.dtype)
    values.view(torch.uint8).fill_(1)
    return placed(values, case.memory, rank)


def run(case: Case, rank: int, world: int, checks: Checks) -> None:
    """One collective call, and what its output and its input must be afterwards."""
    call = prepare(case, rank, world)
    issue(call, rank)
    call.check(checks)


def prepare(case: Case, rank: int, world: int) -> Call:
    blocks = world if case.collective in ("reduce_scatter", "scatter", "all_to_all") else 1
    mine = case.input_of(world, rank, case.count * blocks)
    wanted = expected(case, rank, world)
    if case.collective in ONLY_IN_PLACE or (case.collective == "all_reduce" and case.in_place):
        output = source = placed(mine, case.memory, rank)
    elif case.in_place and case.collective in ("all_gather", "gather"):
        output = blank(case, rank, case.count * world)
        source = output[rank * case.count : (rank + 1) * case.count]
        source.copy_(mine)
    elif case.in_place and case.collective in ("reduce_scatter", "scatter"):
        source = placed(mine, case.memory, rank)
        output = source[rank * case.count : (rank + 1) * case.count]
    else:
        source = placed(mine, case.memory, rank)
        output = blank(case, rank, mine.numel() if wanted is None else wanted.numel())
    return Call(case, source, output, mine, wanted)


def issue(call: Call, rank: int, **options: Any) -> Any:
    """Makes the call; what it returns. options: of the collective."""
    case, output, source = call.case, call.output, call.source
    options["algorithm"] = case.algorithm
    root, at_root = case.root, rank == case.root
    if case.collective == "all_reduce":
        target = None if source is output else output
        return ringlet.all_reduce(source, case.op, scale=scale_of(rank), output=target, **options)
    if case.collective == "reduce_scatter":
        return ringlet.reduce_scatter(output, source, case.op, scale=scale_of(rank), **options)
    if case.collective == "reduce":
        return ringlet.reduce(output, root, case.op, scale=scale_of(rank), **options)
    if case.collective == "broadcast":
        return ringlet.broadcast(output, root, **options)
    if case.collective == "gather":
        return ringlet.gather(output if at_root else None, source, root, **options)
    if case.collective == "scatter":
        return ringlet.scatter(output, source if at_root else None, root, **options)
    return getattr(ringlet, case.collective)(output, source, **options)


def expected(case: Case, rank: int, world: int) -> torch.Tensor | None:
    """What this rank's output must be; None where it has none."""
    count = case.count
    whose = slice(rank * count, (rank + 1) * count)
    if case.collective == "all_reduce":
        return case.result_of(world, count)
    if case.collective == "reduce_scatter":
        return case.result_of(world, count * world)[whose]
    if case.collective == "reduce":
        return case.result_of(world, count) if rank == case.root else case.input_of(world, rank, count)
    if case.collective == "broadcast":
        return case.input_of(world, case.root, count)
    if case.collective == "scatter":
        return case.input_of(world, case.root, count * world)[whose]
    if case.collective == "gather" and rank != case.root:
        return None
    if case.collective == "all_to_all":
        return torch.cat([case.input_of(world, q, count * world)[whose] for q in range(world)])
    return torch.cat([case.input_of(world, q, count) for q in range(world)])


def finish(work: Any, async_op: bool) -> None:
    """Waits for what a call returned, if that is a handle."""
    if async_op:
        work.wait()
