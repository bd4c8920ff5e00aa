"""A model with what makes ZeRO hard, and its training by one process and by a Zero, for the tests."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import ringlet

VOCABULARY, WIDTH, CONTEXT, BATCH = 24, 16, 6, 3
STAGES = (1, 2, 3)
ROUNDING = {"rtol": 1e-9, "atol": 1e-10}
LIMITS = {"bucket_elements": 2500, "persistence_elements": 40}  # a block is a unit; norms and biases are small


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(3 * width, width)
        self.gate = nn.Parameter(torch.ones(width, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(torch.tanh(self.mix(self.norm(x)))) * self.gate.mean(1)


class Model(nn.Module):
    """Embedding tied to the head, parameters of the root's own, blocks, a buffer."""

    def __init__(self, width: int = WIDTH, layers: int = 3, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(0.1 * torch.randn(CONTEXT, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x) / self.temperature


def make(dtype=torch.float64, seed=5, **sizes) -> Model:
    torch.manual_seed(seed)
    return Model(**sizes).to(dtype)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def train_alone(model, world, steps, optimizer_class=torch.optim.AdamW, first=0, clip=None, micro=1, **defaults):
    """Losses of training on the batches of all ranks (and all micro-batches) as one."""
    optimizer = defaults.pop("optimizer", None) or optimizer_class(model.parameters(), **defaults)
    losses = []
    for step in range(first, first + steps):
        parts = [batch(micro * step + m, rank) for rank in range(world) for m in range(micro)]
        optimizer.zero_grad()
        loss = loss_of(model, *(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_zero(zero, rank, steps, first=0, micro=1):
    """Losses, averaged over ranks and micro-batches."""
    losses = []
    for step in range(first, first + steps):
        total = torch.zeros((), dtype=torch.float64)
        for m in range(micro):
            loss = loss_of(zero.module, *batch(micro * step + m, rank))
            loss.backward()
            assert zero.step() == (m == micro - 1)
            total += loss.detach().double() / micro
        dist.all_reduce(total, dist.ReduceOp.AVG)
        losses.append(total.item())
    return losses


def parameters_of(zero) -> dict[str, torch.Tensor]:
    with zero.gathered():
        return {name: p.detach().clone() for name, p in zero.module.named_parameters()}


def assert_same(model: nn.Module, zero, **tolerance) -> None:
    there = parameters_of(zero)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            there[name], parameter.detach(), msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


def zero_of(model, optimizer_class=torch.optim.AdamW, stage=1, **settings):
    return ringlet.Zero(copy.deepcopy(model), optimizer_class, stage, **{**LIMITS, **settings})


def assert_trains_alike(model, zero, inputs, **tolerance) -> None:
    """SGD on the squares of the outputs, by the Zero and, from equal parameters, by `model` alone."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for x in inputs:
        zero.module(x).square().sum().backward()
        zero.step()
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    assert_same(model, zero, **tolerance)


def at_each_stage(model, optimizer_class=torch.optim.AdamW, **settings):
    """For each stage a Zero of a copy of the model, and another copy to train alone."""
    for stage in STAGES:
        yield zero_of(model, optimizer_class, stage, **settings), copy.deepcopy(model)
