"""What is drawn for a call of torch.distributed (random_backend_calls.py): data whose results every rank knows."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from cases import placed

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.complex64)
REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
BITWISE = ("BAND", "BOR", "BXOR")
MEMORIES = ("registered", "ordinary", "mixed", "offset")


@dataclass
class Drawn:
    """What all ranks of a call agree about."""

    world: int
    seed: int
    op: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    counts: list[list[int]]
    root: int
    in_background: bool
    memory: str

    def __repr__(self) -> str:
        return f"{self.op} {self.dtype} {self.shape} root {self.root} of {self.world}, {self.memory}"

    @property
    def reduce_op(self) -> Any:
        return getattr(dist.ReduceOp, self.op)

    def value(self, of: Any, shape: tuple[int, ...] | torch.Size | None = None) -> torch.Tensor:
        """Small integers, another table for everything that can be asked for."""
        shape = self.shape if shape is None else tuple(shape)
        generator = torch.Generator().manual_seed(hash((self.seed, of)) % (1 << 62))
        low, high = (0, 3) if self.dtype == torch.uint8 or self.op in BITWISE else (-2, 3)
        values = torch.randint(low, high, shape, generator=generator)
        if self.op == "AVG":
            values = values * self.world
        return values.to(self.dtype)

    def place(self, values: torch.Tensor, rank: int) -> torch.Tensor:
        return placed(values.flatten(), self.memory, rank).view(values.shape)

    def input(self, rank: int, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        return self.place(self.value(rank, shape), rank)

    def blank(self, shape: Any, rank: int) -> torch.Tensor:
        return self.place(torch.full(tuple(shape), 99).to(self.dtype), rank)

    def reduced(self, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        return self.combined([self.value(q, shape) for q in range(self.world)])

    def combined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        total = functools.reduce(REDUCTIONS[self.op], parts)
        if self.op != "AVG":
            return total
        return (total / self.world).to(self.dtype)


def _defined(op: str, dtype: torch.dtype) -> bool:
    if op in BITWISE:
        return not dtype.is_floating_point and not dtype.is_complex
    return not dtype.is_complex or op in ("SUM", "AVG")


def draw(lot: random.Random, world: int) -> Drawn:
    """All of a call that its ranks agree about: also ranks that take no part draw it."""
    op = lot.choice(list(REDUCTIONS))
    dtypes = [dtype for dtype in DTYPES if _defined(op, dtype)]
    shape = lot.choice(((), (lot.randrange(3),), (lot.randrange(4), lot.randrange(1, 9)), (lot.randrange(20_000),)))
    counts = [[lot.choice((0, 1, 5, 900)) for _ in range(world)] for _ in range(world)]
    seed, in_background = lot.randrange(1 << 20), lot.random() < 0.5
    return Drawn(world, seed, op, lot.choice(dtypes), shape, counts, lot.randrange(world), in_background,
                 lot.choice(MEMORIES))  # fmt: skip
