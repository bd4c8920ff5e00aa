"""Random modules for random trainings of a reducer: parameters of all kinds, buffers, branches; one place can fail."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from random_blocks import FORMS, Nothing, Scale, Strided
from reducer_checks import Fails

WIDTH, BATCH = 6, 4


class Image(nn.Module):
    """A convolution in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.view(-1, 3, 1, 2)).reshape(-1, WIDTH)


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table((x.detach()[:, 0] * 7).long().abs() % 5)


class Seen(nn.Module):
    """Buffers of several dtypes that change in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("odd", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("mean", torch.zeros(2, WIDTH).t(), persistent=False)
        self.register_buffer("none", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.count += 1
            self.odd.logical_not_()
            self.mean.lerp_(x.detach().mean(0, keepdim=True).t().to(self.mean.dtype), 0.5)
        return x + self.mean[:, 0].clone() * 0.1


class Mixed(nn.Module):
    """Other dtypes: what reaches them is small and whole, so that rounding stays small."""

    def __init__(self, dtypes: list[torch.dtype]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(3, 5).to(dtype)) for dtype in dtypes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum((w * (i + 1)).sum().real.double() for i, w in enumerate(self.weights)) / 64


class Wide(nn.Module):
    """A parameter larger than most buckets, and one that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH, bias=False)
        self.up.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Single(nn.Module):
    """A layer of float32, which autocast runs in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x.float()).double() / 8


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


SIMPLE: list[Callable[[random.Random], nn.Module]] = [
    lambda lot: nn.Linear(WIDTH, WIDTH, bias=lot.random() < 0.7),
    lambda lot: nn.Linear(WIDTH, WIDTH),
    lambda lot: Scale(),
    lambda lot: Nothing(),
    lambda lot: Strided(WIDTH, lot.random() < 0.5),
    lambda lot: Image(),
    lambda lot: Lookup(),
    lambda lot: Seen(),
    lambda lot: nn.BatchNorm1d(WIDTH),
    lambda lot: Wide(),
    lambda lot: Single(),
    lambda lot: Mixed(lot.sample([torch.float32, torch.bfloat16, torch.complex64, torch.float16], lot.randint(1, 4))),
    lambda lot: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Scale(), nn.Tanh())),
]


class Drawn(nn.Module):
    """Blocks one after the other, without those in `skip`; before block `trip` it may be told to fail."""

    def __init__(self, lot: random.Random, reentrant: bool) -> None:
        super().__init__()
        found: list[nn.Module] = [nn.Linear(WIDTH, WIDTH)]
        for _ in range(lot.randint(2, 7)):
            block = lot.choice(SIMPLE)(lot)
            if lot.random() < (0.5 if reentrant else 0.15) and not list(block.buffers()):
                block = Checkpointed(block, reentrant)
            found.append(block)
        if lot.random() < 0.4:
            tied = nn.Linear(WIDTH, WIDTH)
            tied.weight = found[0].weight  # type: ignore[assignment]
            found.append(tied)
        if lot.random() < 0.3:
            found.append(lot.choice(found))  # called twice
        self.blocks = nn.ModuleList(found)
        self.trip, self.fails = lot.randint(1, len(found) - 1), ""
        self.form = lot.choice([form for form in FORMS if form != "hidden" or not reentrant])

    def forward(self, x: torch.Tensor, skip: Iterable[int] = ()) -> object:
        for place, block in enumerate(self.blocks):
            if place == self.trip and self.fails == "forward":
                raise ArithmeticError("on purpose")
            if place == self.trip and self.fails == "backward":
                x = Fails.apply(x)
            if place not in skip:
                x = block(x) + 0.5 * x
        return FORMS[self.form](torch.tanh(x / 4))


def build(seed: int, rank: int, reentrant: bool = False) -> Drawn:
    """The module of a seed; its structure is the same on all ranks, its values are each rank's own."""
    before, dtype = torch.get_rng_state(), torch.get_default_dtype()
    torch.manual_seed(100 * seed + rank)
    torch.set_default_dtype(torch.float64)
    made = Drawn(random.Random(seed), reentrant)
    torch.set_default_dtype(dtype)
    torch.set_rng_state(before)
    for buffer in made.buffers():
        if buffer.is_floating_point():
            buffer += rank
    return made
