"""What random trainings (test_random_zero_training.py) draw: modules, batches, settings and optimizers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ringlet
from random_blocks import FORMS, Called, Nothing, Scale, Strided

VOCABULARY, ROWS = 11, 3
# Roots that are well away from 0: divisions by them do not magnify roundings.
OPTIMIZERS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.8, "dampening": 0.5}, {"maximize": True}],
    "Adam": [{"eps": 1e-3}, {"eps": 1e-3, "amsgrad": True, "foreach": False}],
    "AdamW": [{"eps": 1e-3}, {"eps": 1e-3, "fused": True}],
    "NAdam": [{"eps": 1e-3}],
    "RAdam": [{"eps": 1e-3}],
    "Adamax": [{"eps": 1e-3}],
    "Adagrad": [{"eps": 1e-3, "initial_accumulator_value": 0.1}, {"eps": 1e-3, "lr_decay": 0.1}],
    "Adadelta": [{"eps": 1e-3}],
    "RMSprop": [{"eps": 1e-2, "momentum": 0.5}],
    "ASGD": [{}],
}
OPTIONS: list[dict[str, Any]] = [{}, {"lr": 4e-3}, {"weight_decay": 0.1}, {"lr": 2e-3, "weight_decay": 0.05}]


def _grads(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def _zero(module: nn.Module) -> None:
    module.head.weight.grad.zero_()


def _add(module: nn.Module) -> None:
    for g in _grads(module):
        g.add_(torch.ones((), dtype=g.dtype), alpha=0.01)


def _drop(module: nn.Module) -> None:
    module.shift.grad = None


def _replace(module: nn.Module) -> None:
    module.shift.grad = torch.linspace(-1, 1, len(module.shift), dtype=module.shift.dtype)


def _halve_data(module: nn.Module) -> None:
    for p in module.parameters():
        if p.grad is not None:
            p.grad.data.mul_(0.5)


def _clip_by_hand(module: nn.Module) -> torch.Tensor:
    whole = torch.stack([g.norm() for g in _grads(module)]).norm()
    for g in _grads(module):
        g.mul_(0.5 / whole)
    return whole


def _clip_largest(module: nn.Module) -> torch.Tensor:
    some = [p for p in module.parameters() if p.numel()]  # torch has no such norm of a tensor without elements
    return nn.utils.clip_grad_norm_(some, 0.1, norm_type=float("inf"))


# What a program does to gradients before an update; norms that it gets are compared.
EDITS: dict[str, Callable[[nn.Module], torch.Tensor | None]] = {
    "norm": lambda module: nn.utils.clip_grad_norm_(module.parameters(), 0.1),
    "norm, foreach": lambda module: nn.utils.clip_grad_norm_(module.parameters(), 0.1, foreach=True),
    "norm of order 1": lambda module: nn.utils.clip_grad_norm_(module.parameters(), 0.1, norm_type=1.0),
    "largest element": _clip_largest,
    "norm of some": lambda module: nn.utils.clip_grad_norm_(module.parts.parameters(), 0.1),
    "norm of each": lambda module: sum(nn.utils.clip_grad_norm_(p, 0.1) for p in module.parameters()),
    "value": lambda module: nn.utils.clip_grad_value_(module.parameters(), 0.01),
    "value, foreach": lambda module: nn.utils.clip_grad_value_(module.parameters(), 0.01, foreach=True),
    "by hand": _clip_by_hand,
    "data": _halve_data,
    "zeroed": _zero,
    "added": _add,
    "dropped": _drop,
    "replaced": _replace,
}


class Deed(RuntimeError):
    """What a program raises on purpose."""


# What comes behind a part's layer.
BEHIND: dict[str, Callable[[int], nn.Module]] = {
    "odd": lambda width: nn.Sequential(Strided(width, True), Scale(), Nothing()),
    "nested": lambda width: nn.Sequential(
        nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.LayerNorm(2 * width)),
        nn.Linear(2 * width, width, bias=False),
    ),
    "attends": lambda width: Called(nn.MultiheadAttention(width, 1), lambda inner, y: inner(y, y, y)[0]),
    "recurs": lambda width: Called(nn.GRU(width, width), lambda inner, y: inner(y)[0]),
    "remembers": lambda width: Called(nn.LSTM(width, width), lambda inner, y: inner(y)[0]),
    "encodes": lambda width: nn.TransformerEncoderLayer(width, 1, 2 * width, dropout=0.0),
    "convolves": lambda width: Called(
        nn.Conv1d(width, width, 3, padding=1), lambda inner, y: torch.tanh(inner(y.t()).t())
    ),
}
KINDS = ("plain", "own", "twice", "table", "normed", "frozen", "half frozen", "product", *BEHIND)


class Part(nn.Module):
    """A layer, and what is behind it or what is odd about it; `x` and what comes back are (rows, width)."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(width, width)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.behind = BEHIND[kind](width) if kind in BEHIND else nn.Identity()
        if kind == "own":
            self.scalar = nn.Parameter(torch.tensor(0.9))
            self.few = nn.Parameter(torch.tensor([0.1, 0.2]))
        elif kind == "product":
            self.a, self.b = (nn.Parameter(0.5 * torch.randn(ROWS, width)) for _ in range(2))
        elif kind == "table":
            self.table = nn.Parameter(torch.arange(5 * width) % 3, requires_grad=False)
        elif kind == "normed":
            nn.utils.parametrizations.weight_norm(self.linear)
        elif kind == "half frozen":
            self.linear.weight.requires_grad_(False)
        elif kind == "frozen":
            self.linear.requires_grad_(False)

    def forward(self, given: dict[str, Any]) -> tuple[torch.Tensor, None]:
        x = given["x"]
        if given["count"]:
            self.passes += 1
        y = self.behind(torch.tanh(self.linear(x)))
        if self.kind == "own":
            y = y * self.scalar + self.few.sum()
        elif self.kind == "product":
            y = torch.addcmul(y, self.a, self.b)
        elif self.kind == "twice":
            y = torch.tanh(self.linear(y))
        elif self.kind == "table":
            y = y * self.table[: x.shape[1]]
        return 0.5 * x + y, None


class Drawn(nn.Module):
    """Parts in a row, an embedding that may be the head too, parameters of the root's own. `plan`: what a forward does
    apart from the usual: parts to leave out, an order of the parts, a part to fail in, whether to count passes."""

    def __init__(self, lot: random.Random) -> None:
        super().__init__()
        width = lot.choice((4, 5, 8))
        self.parts = nn.ModuleList(Part(lot.choice(KINDS), width) for _ in range(lot.randint(1, 5)))
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.head = nn.Linear(width, VOCABULARY, bias=lot.random() < 0.5)
        if lot.random() < 0.5:
            self.head.weight = self.embedding.weight
        self.shift = nn.Parameter(0.1 * torch.randn(width))
        self.scale = nn.Parameter(torch.ones(()))
        self.ways = [lot.choice(("call", "call", "reentrant", "not reentrant")) for _ in self.parts]
        self.form = lot.choice(("tensor", "dict", "tuple", "hidden"))

    @property
    def has_second_derivatives(self) -> bool:
        return "reentrant" not in self.ways and all(part.kind != "encodes" for part in self.parts)

    def forward(self, tokens: torch.Tensor, plan: dict[str, Any]) -> Any:
        x = self.embedding(tokens) + self.shift
        if plan.get("penalty"):
            plan["entered"] = x
        for number in plan.get("order", range(len(self.parts))):
            part, way = self.parts[number], self.ways[number]
            if number in plan["without"]:
                continue
            if number == plan.get("fails"):
                raise Deed("in forward")
            if way == "call" or not x.requires_grad:
                x, _ = part({"x": x, "count": plan["count"]})
            else:

                def body(x: torch.Tensor, part: nn.Module = part) -> torch.Tensor:
                    return part({"x": x, "count": False})[0]

                x = checkpoint(body, x, use_reentrant=way == "reentrant")
        return FORMS[self.form](self.head(x) * self.scale)


def batch(seed: int, number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1_000_003 * seed + 101 * number + rank)
    tokens = torch.randint(VOCABULARY, (ROWS, 2), generator=generator)
    return tokens[:, 0], tokens[:, 1]


def settings_of(lot: random.Random, folder: str) -> dict[str, Any]:
    """What may change when a checkpoint is loaded."""
    stage = lot.choice((1, 2, 3, 3))
    places = [None, None, "cpu", ringlet.Offload("file", folder)]
    return {
        "stage": stage,
        "bucket_elements": lot.choice((20, 70, 300, 1 << 23)),
        "gather_elements": lot.choice((50, 1 << 23)),
        "sub_group_elements": lot.choice((7, 100, 1 << 20)),
        "persistence_elements": lot.choice((0, 6, 30, 1000)),
        "overlap": lot.random() < 0.8,
        "offload_optimizer": lot.choice(places),
        "offload_parameters": lot.choice(places) if stage == 3 else None,
    }


def as_deepspeed(given: dict[str, Any]) -> dict[str, Any]:
    def place(offload: ringlet.Offload | str | None) -> dict[str, Any]:
        path = getattr(offload, "path", None)
        return {"device": "nvme", "nvme_path": path} if path else {"device": offload or "none"}

    return {
        "gradient_accumulation_steps": given["accumulate"],
        "gradient_clipping": given["max_norm"] or 0,
        "bf16": {"enabled": given["dtype"] is torch.bfloat16},
        "zero_optimization": {
            "stage": given["stage"],
            "overlap_comm": given["overlap"],
            "reduce_bucket_size": given["bucket_elements"],
            "allgather_bucket_size": given["gather_elements"],
            "sub_group_size": given["sub_group_elements"],
            "stage3_param_persistence_threshold": given["persistence_elements"],
            "offload_optimizer": place(given["offload_optimizer"]),
            "offload_param": place(given["offload_parameters"]),
        },
    }
