"""One case of the contract: a collective call with exact data, and what it must leave in every rank's tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import live_gpu
import ringlet
from exact_data import difference, input_of, result_of, scale_of

MEMORIES = (
    "registered",
    "ordinary",
    "mixed",
)  # mixed: registered on some ranks only; gpu: live_gpu.py's, cuda: a real one's
LARGE = 123567
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
MOVES = ("all_gather", "broadcast", "gather", "scatter", "all_to_all")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
BLOCKED = ("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all")
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


def counts_of(collective: str, world: int) -> list[int]:
    large = LARGE // world if collective in BLOCKED else LARGE
    return sorted({0, 1, world - 1, world + 1, large})


def roots_of(collective: str, world: int) -> range:
    return range(world if collective in ROOTED else 1)


def placed(values: torch.Tensor, memory: str, rank: int) -> torch.Tensor:
    if memory in ("gpu", "cuda"):
        return values.to(live_gpu.DEVICE if memory == "gpu" else "cuda")
    if memory == "ordinary" or (memory == "mixed" and rank % 2 == 1):
        return values.clone()
    tensor = ringlet.empty(values.shape, dtype=values.dtype)
    tensor.copy_(values)
    return tensor


def blank(case: Case, rank: int, count: int) -> torch.Tensor:
    values = torch.empty(count, dtype=case.dtype)
    values.view(torch.uint8).fill_(1)
    return placed(values, case.memory, rank)


def run(case: Case, rank: int, world: int, checks: Checks) -> None:
    """One collective call, and what its output and its input must be afterwards."""
    blocks = world if case.collective in ("reduce_scatter", "scatter", "all_to_all") else 1
    mine = input_of(case.dtype, case.op, world, rank, case.count * blocks)
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
    issue(case, rank, output, source)
    if wanted is not None:
        checks.equal(case, output, wanted)
    if source.data_ptr() != output.data_ptr() and not case.in_place:
        checks.equal((case, "input"), source, mine)


def issue(case: Case, rank: int, output: torch.Tensor, source: torch.Tensor) -> None:
    options = {"algorithm": case.algorithm}
    root, at_root = case.root, rank == case.root
    if case.collective == "all_reduce":
        target = None if source is output else output
        ringlet.all_reduce(source, case.op, scale=scale_of(rank), output=target, **options)
    elif case.collective == "reduce_scatter":
        ringlet.reduce_scatter(output, source, case.op, scale=scale_of(rank), **options)
    elif case.collective == "reduce":
        ringlet.reduce(output, root, case.op, scale=scale_of(rank), **options)
    elif case.collective == "broadcast":
        ringlet.broadcast(output, root, **options)
    elif case.collective == "gather":
        ringlet.gather(output if at_root else None, source, root, **options)
    elif case.collective == "scatter":
        ringlet.scatter(output, source if at_root else None, root, **options)
    else:
        getattr(ringlet, case.collective)(output, source, **options)


def expected(case: Case, rank: int, world: int) -> torch.Tensor | None:
    """What this rank's output must be; None where it has none."""
    count, dtype, op = case.count, case.dtype, case.op
    whose = slice(rank * count, (rank + 1) * count)
    if case.collective == "all_reduce":
        return result_of(dtype, op, world, count)
    if case.collective == "reduce_scatter":
        return result_of(dtype, op, world, count * world)[whose]
    if case.collective == "reduce":
        return result_of(dtype, op, world, count) if rank == case.root else input_of(dtype, op, world, rank, count)
    if case.collective == "broadcast":
        return input_of(dtype, op, world, case.root, count)
    if case.collective == "scatter":
        return input_of(dtype, op, world, case.root, count * world)[whose]
    if case.collective == "gather" and rank != case.root:
        return None
    if case.collective == "all_to_all":
        return torch.cat([input_of(dtype, op, world, q, count * world)[whose] for q in range(world)])
    return torch.cat([input_of(dtype, op, world, q, count) for q in range(world)])
