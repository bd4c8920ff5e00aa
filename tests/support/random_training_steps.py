"""The steps of a random training: what is drawn, and what a module and its twins do."""

from __future__ import annotations

import copy
import random
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from expected_training import Twins, same
from random_blocks import tensor_of
from random_modules import BATCH, WIDTH, Drawn, build
from ringlet import GradientReducer

KINDS = ("plain", "unused", "static", "reentrant", "delay", "measured")
ALGORITHMS = (None, None, None, "ring", "butterfly", "two_shot", "one_shot")


class Pieces:
    """One rank's module, reducer and twins, and what a step of training is made of."""

    def __init__(self, rank: int, world: int, seed: int) -> None:
        self.rank, self.world, self.seed = rank, world, seed
        self.lot = random.Random(seed)  # the same on every rank
        self.own = random.Random(1000 * seed + rank)
        self.group = dist.new_group()
        kind = KINDS[seed % len(KINDS)]
        self.options = self.draw_options(kind)
        self.reentrant = kind == "reentrant"
        self.hooked: list[tuple[str, bool]] = []  # parameters with a hook of the user's
        self.model, models = self.make_modules()
        self.twins = Twins(models)
        self.make_optimizer = self.lot.choice(
            (
                lambda parameters: torch.optim.SGD(parameters, lr=1 / 64, momentum=0.5),
                lambda parameters: torch.optim.SGD(parameters, lr=1 / 32),
            )
        )
        self.inputs = 0
        self.no_sync = self.autocast = False
        self.merge: Any = None
        self.did: list[str] = []
        self.make_reducer()

    # -- what is drawn --

    def draw_options(self, kind: str | None = None) -> dict[str, Any]:
        lot = self.lot
        found: dict[str, Any] = {
            "bucket_mb": lot.choice((1e-6, 0.0003, 0.001, lot.uniform(1e-5, 0.003), 25)),
            "first_bucket_mb": lot.choice((1e-6, 0.0002, 1)),
            "algorithm": lot.choice(ALGORITHMS) if dist.get_backend() == "ringlet" else None,
            "find_unused_parameters": False,
            "static_graph": False,
            "gradient_as_bucket_view": lot.random() < 0.7,
            "broadcast_buffers": lot.random() < 0.8,
            "delay": 0,
        }
        kind = kind or lot.choice(("plain", "plain", "unused", "unused", "static", "delay"))
        if kind == "unused":
            found["find_unused_parameters"] = True
        elif kind in ("static", "reentrant"):
            found["static_graph"] = True
        elif kind == "delay":
            found |= {"delay": 1, "gradient_as_bucket_view": True}
        elif kind == "measured":
            found["bucket_mb"] = "measured"
        return found

    @property
    def strict(self) -> bool:
        return not self.twins.may_be_unused

    def make_modules(self) -> tuple[Drawn, list[Drawn]]:
        models = [build(self.seed, rank, self.reentrant) for rank in range(self.world)]
        names = [name for name, _ in models[0].named_parameters()]
        names += [name for name, _ in models[0].named_buffers()]
        if self.lot.random() < 0.25:
            ignored = [name for name in names if name != "blocks.0.weight" and self.lot.random() < 0.3]
            for model in models:
                model._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment]
        for name in self.lot.sample(names, 2) if self.lot.random() < 0.3 else ():
            late = self.lot.random() < 0.5
            for parameter in (dict(model.named_parameters()).get(name) for model in models):
                if parameter is not None and parameter.requires_grad:
                    self.hooked.append((name, late))
        optional = list(range(1, len(models[0].blocks)))
        self.fixed_skips = [self.draw_skip(optional) for _ in range(self.world)]
        own = copy.deepcopy(models[self.rank])
        for model in (own, *models):
            for name, late in set(self.hooked):
                add_hook(dict(model.named_parameters())[name], late)
        return own, models

    def draw_skip(self, optional: list[int]) -> set[int]:
        return {place for place in optional if self.lot.random() < 0.3}

    def draw_skips(self) -> list[set[int]]:
        if self.options["static_graph"]:
            return self.fixed_skips
        if not self.options["find_unused_parameters"]:
            return [set()] * self.world
        return [self.draw_skip(list(range(1, len(self.model.blocks)))) for _ in range(self.world)]

    # -- the pieces of a step, done with the module and with the twins --

    @property
    def models(self) -> list[tuple[Drawn, int]]:
        return [(self.model, self.rank), *((model, rank) for rank, model in enumerate(self.twins.models))]

    def make_reducer(self) -> None:
        plain = not self.options["delay"]
        self.in_backward = plain and self.lot.random() < 0.15
        make = self.make_optimizer if self.in_backward else None
        self.reducer = GradientReducer(self.model, group=self.group, optimizer_in_backward=make, **self.options)
        plain = self.options["bucket_mb"] != "measured" and self.options["algorithm"] is None
        self.comm_hook = plain and self.lot.random() < 0.2
        if self.comm_hook:
            self.reducer.register_comm_hook(self.group, default_hooks.allreduce_hook)
        self.merge = None
        self.elsewhere = False
        self.transposed: set[str] = set()  # whose `.grad` the user has laid out so
        self.twins.begin(self.options, make)
        self.optimizer = None if self.in_backward else self.make_optimizer(self.model.parameters())
        self.twins.optimizers = [
            None if self.in_backward else self.make_optimizer(model.parameters()) for model in self.twins.models
        ]

    @property
    def closes(self) -> bool:
        """Whether the next backward is to be reduced."""
        return not self.no_sync and (self.merge is None or self.merge.seen + 1 == self.merge.k)

    def forward(self, skips: list[set[int]] | None = None) -> list[torch.Tensor]:
        self.pause()
        skips = self.latest_skips = skips or self.draw_skips()
        self.twins.before_forward(self.closes)
        self.inputs += 1
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            outputs = [model(self.data(rank), skips[rank]) for model, rank in self.models]
        return [tensor_of(output).double().square().mean() for output in outputs]

    def data(self, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10_000 * self.inputs + 10 * rank + self.seed)
        return torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)

    def backward(self, losses: list[torch.Tensor], **options: Any) -> None:
        reducing = self.closes
        scale = 1.0
        if self.merge is not None:
            scale = 1 / self.merge.k if self.merge.average else 1.0
        for place, loss in enumerate(losses):
            loss.backward(**options)
            if place == 0:
                self.pause()
        if reducing:
            self.twins.reduce(scale)
        if self.merge is not None:
            assert self.merge.complete is reducing
        self.compare()

    def pause(self) -> None:
        if self.own.random() < 0.1:
            time.sleep(self.own.random() * 0.01)

    def zero_grad(self, how: str | None = None) -> None:
        how = how or self.lot.choice(("none", "none", "zero", "zero", "keep"))
        if self.merge is not None and self.merge.seen:
            how = "keep"
        if how != "keep":
            for model, _ in self.models:
                model.zero_grad(set_to_none=how == "none")
        if how == "none":
            self.transposed.clear()

    def step(self) -> None:
        if self.optimizer is None or self.lot.random() < 0.2 or (self.merge is not None and self.merge.seen):
            return
        if self.lot.random() < 0.3:
            for model, _ in self.models:
                nn.utils.clip_grad_norm_(
                    [p for p in model.parameters() if p.dtype == torch.float64], 0.5, error_if_nonfinite=True
                )
        for optimizer in (self.optimizer, *self.twins.optimizers):
            optimizer.step()
        self.compare()

    def compare(self) -> None:
        twin = self.twins.models[self.rank]
        named = list(zip(self.model.named_parameters(), twin.parameters(), strict=True))
        for (name, ours), theirs in named:
            same(f"gradient of {name}", ours.grad, theirs.grad, self.twins.coarse)
            same(name, ours.detach(), theirs.detach(), self.twins.coarse)
        for (name, buffer), theirs in zip(self.model.named_buffers(), twin.buffers(), strict=True):
            same(name, buffer, theirs, self.twins.coarse)
        assert self.reducer.stats()["backwards"] == self.twins.reductions

    def compare_views(self) -> None:
        """Right after a reduction."""
        stats = self.reducer.stats()
        parameters = dict(self.model.named_parameters())
        reduced = [name for names in stats["bucket_parameters"] for name in names]
        assert sorted(reduced) == sorted(self.twins.names)
        if self.in_backward or self.elsewhere:  # of a changed layout, in shared memory, in another reducer's buckets
            return
        for name in reduced:
            grad, dense = parameters[name].grad, torch.empty_like(parameters[name])
            kept = name in self.transposed and not self.options["gradient_as_bucket_view"]
            assert kept or grad is None or grad.numel() < 2 or grad.stride() == dense.stride(), name
        if self.reducer._channel.in_place(torch.device("cpu")):
            return  # gradients stay where autograd has put them
        for names, nbytes in zip(stats["bucket_parameters"], stats["bucket_bytes"], strict=True):
            found = {name: parameters[name].grad for name in names if name in self.twins.latest}
            if self.options["gradient_as_bucket_view"]:
                there = [grad for grad in found.values() if grad is not None and grad.numel()]
                ends = [grad.data_ptr() + grad.nbytes for grad in there]
                assert not there or max(ends) - min(grad.data_ptr() for grad in there) <= nbytes, names
            else:
                for name, grad in found.items():
                    assert grad is None or grad.untyped_storage().nbytes() == parameters[name].nbytes, name


def add_hook(parameter: nn.Parameter, late: bool) -> None:
    if late:
        parameter.register_post_accumulate_grad_hook(halve)
    else:
        parameter.register_hook(lambda gradient: gradient * 0.5)


def halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)
