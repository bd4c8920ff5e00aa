"""Sums of gradients that do not depend on how many ranks share the work.

The N micro-batches of a window are numbered over all ranks, and added along one binary tree over these numbers,
((0+1)+(2+3))+..., whatever the number of ranks; N is a power of two. One division by N follows, which is exact. What a
rank adds by itself is a subtree, and so is what ranks add together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ringlet.backend import backend_of
from ringlet.errors import InvalidUsage
from ringlet.schedule import execution, registry
from ringlet.schedule.expression_trees import aligned


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


class TreeSums:
    """The sums of a window's micro-batches so far: at most log2 k lists of tensors, the largest subtree first."""

    def __init__(self) -> None:
        self.count = 0
        self._sums: list[list[torch.Tensor]] = []

    def push(self, gradients: list[torch.Tensor]) -> None:
        """Takes the gradients of the next micro-batch, and their memory."""
        subtrees = self.count
        while subtrees & 1:
            larger = self._sums.pop()
            torch._foreach_add_(larger, gradients)
            gradients, subtrees = larger, subtrees >> 1
        self._sums.append(gradients)
        self.count += 1

    def add_to(self, gradients: Sequence[torch.Tensor], indices: Sequence[int]) -> None:
        """Adds the sums to `gradients` of the last micro-batch; gradient i is number `indices[i]` of those pushed."""
        for sums in reversed(self._sums):
            torch._foreach_add_(list(gradients), [sums[index] for index in indices])

    def take(self) -> list[torch.Tensor]:
        """The sums of a window of a power of two of micro-batches, and forgets them."""
        (sums,) = self._sums
        self.forget()
        return sums

    def tensors(self) -> list[torch.Tensor]:
        """The memory of the sums."""
        return [tensor for sums in self._sums for tensor in sums]

    def forget(self) -> None:
        self.count = 0
        self._sums.clear()


def add_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """The sum of the rows along the tree; the rows are overwritten. Their number is a power of two."""
    while len(blocks) > 1:
        blocks = blocks[0::2].add_(blocks[1::2])
    return blocks[0]


_LIMB = 1 << 28  # of a fixed-point sum of two limbs
_CHUNK = 1 << 20  # elements whose limbs are added at once: up to 2^48, exact in float64


def norms_over_ranks(
    values: Sequence[Sequence[torch.Tensor]], group: dist.ProcessGroup, device: torch.device
) -> torch.Tensor:
    """The 2-norm of each list, whose numbers lie on all ranks, float64 (lists,): whichever rank has which of them.

    Squares are cut to 2^-56 of the largest one of their list, rounded up to a power of 4, and added as integers, which
    has no order. The sum of n <= 2^34 squares is off by at most n 2^-57 of that. Collective.
    """

    def chunks(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        for one in tensors:
            yield from (part.detach() for part in one.flatten().split(_CHUNK) if part.numel())

    magnitudes = torch.zeros(len(values), 2, dtype=torch.float64, device=device)  # the largest; 1: inf, 2: NaN
    for row, tensors in zip(magnitudes, values, strict=True):
        for chunk in chunks(tensors):
            size, is_nan = chunk.abs(), chunk.isnan()
            beyond = torch.stack([size.isinf().any(), is_nan.any()]).double() * torch.tensor([1.0, 2.0]).to(size.device)
            finite = size.nan_to_num_(0.0, 0.0).max().double()
            row.copy_(row.maximum(torch.stack([finite, beyond.max()]).to(device)))
    dist.all_reduce(magnitudes, dist.ReduceOp.MAX, group=group)
    exponents = [max(math.frexp(largest)[1], -1000) for largest, _ in magnitudes.tolist()]  # with finite inverses
    limbs = torch.zeros(len(values), 2, dtype=torch.int64, device=device)
    for row, tensors, exponent in zip(limbs, values, exponents, strict=True):
        for chunk in chunks(tensors):
            square = (chunk.double() * math.ldexp(1, -exponent)).square_().mul_(_LIMB).nan_to_num_(0.0, 0.0)
            high = square.floor()
            low = square.sub_(high).mul_(_LIMB).round_()
            row += torch.stack([high.sum(), low.sum()]).to(device, torch.int64)
    dist.all_reduce(limbs, group=group)
    found = []
    for (high, low), exponent, (_, beyond) in zip(limbs.tolist(), exponents, magnitudes.tolist(), strict=True):
        root = math.ldexp(math.sqrt(high * _LIMB + low) / _LIMB, exponent)
        found.append([root, math.inf, math.nan][int(beyond)])
    return torch.tensor(found, dtype=torch.float64, device=device)


def numbers_of(rank: int, world: int, k: int, by_rank: bool) -> range:
    """The micro-batches of a rank in a window, in order. `by_rank`: each rank's lie side by side, and it adds them
    before ranks add; else those of one backward do, and ranks add in every backward."""
    return range(rank * k, (rank + 1) * k) if by_rank else range(rank, world * k, world)


def refuse_world(world: int, who: str) -> None:
    if not is_power_of_two(world):
        raise InvalidUsage(
            f"{who}: reproducible=True adds along a binary tree over ranks, and {world} ranks are no power of two: "
            "train on 1, 2, 4, 8 ... ranks"
        )


def refuse_k(k: int, average: bool, what: str) -> None:
    if not is_power_of_two(k):
        raise InvalidUsage(
            f"{what}: with reproducible=True a window has a power of two of micro-batches, the same in all for every "
            f"number of ranks, got {k}"
        )
    if not average:
        raise InvalidUsage(
            f"{what}: average=False with reproducible=True: a sum over micro-batches depends on how many a rank has: "
            "leave average=True"
        )


def refuse_fused(groups: Iterable[dict[str, Any]]) -> None:
    """For Zero, which gives an optimizer parts of tensors."""
    if any(group.get("fused") for group in groups):
        raise InvalidUsage(
            "Zero: fused=True with reproducible=True: torch's fused kernels round the last elements of a tensor another"
            " way, and which elements are the last of a part depends on the number of ranks: leave out fused="
        )


class Checks:
    """What reproducible training needs of a module: `before_forward` refuses what depends on the number of ranks."""

    def __init__(self, module: nn.Module, who: str) -> None:
        self._who = who
        self._norms = [
            (name, child)
            for name, child in module.named_modules()
            if isinstance(child, nn.SyncBatchNorm) or (isinstance(child, _NormBase) and child.track_running_stats)
        ]
        on_gpu = any(p.device.type == "cuda" for p in module.parameters())
        if on_gpu and not torch.are_deterministic_algorithms_enabled():
            raise InvalidUsage(
                f"{who}: reproducible=True on a GPU needs deterministic kernels: call "
                "torch.use_deterministic_algorithms(True) before"
            )

    @staticmethod
    def lines() -> list[str]:
        """On what ranks must agree."""
        return [f"torch.get_num_threads() {torch.get_num_threads()}"]  # kernels divide their sums among threads

    def before_forward(self) -> None:
        for name, child in self._norms:
            if child.training:
                raise InvalidUsage(
                    f"{self._who}: {name or 'the module'} is a {type(child).__name__} in training mode, whose "
                    "statistics depend on which rank has which micro-batches, and reproducible=True promises that "
                    "nothing does: call eval() on it, or use a norm without running statistics"
                )


def algorithm_of(given: str | None, group: dist.ProcessGroup, device: torch.device) -> str:
    """The all-reduce of a reproducible reducer, `given` or "butterfly", if the prover finds the tree in it."""
    name = given or "butterfly"
    backend = backend_of(group, device)
    if not hasattr(backend, "algorithm"):
        raise InvalidUsage(
            f"GradientReducer: reproducible=True needs an all-reduce whose order of summation is known, and "
            f"{backend.name()}'s is not: init_process_group('ringlet'), or train with Zero, which adds itself"
        )
    world = dist.get_world_size(group)
    try:
        schedule = registry.schedule(name, "all_reduce", world=world, hosts=backend.hosts)
    except ValueError as error:
        raise InvalidUsage(
            f'GradientReducer: reproducible=True needs the schedule of algorithm="{name}", which has none: {error}'
        ) from error
    found = execution.execute(schedule)
    wanted = aligned(0, world)
    for values in found.values:
        for value in values:
            text = found.trees.text(value[1]) if value is not None else "nothing"
            if text != wanted:
                hint = "" if given is None else ', or leave algorithm=None for "butterfly"'
                raise InvalidUsage(
                    f'GradientReducer: reproducible=True needs the sum {wanted}, and algorithm "{name}" gives {text} '
                    f"on these {world} ranks: number the ranks host after host{hint}"
                )
    return name
