"""Gradients that two ranks reduce where autograd puts them are registered memory; other tensors are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ringlet
from ranks import on
from ringlet import _C


def is_on() -> bool:
    return ringlet.is_registered(torch.empty(1 << 16))


def step(model: nn.Module, rank: int) -> None:
    model.zero_grad()
    model(torch.full((4, 128), rank + 1.0)).sum().backward()


@on("two")
def test_gradients_are_registered_and_other_tensors_are_not(rank: int, world: int) -> None:
    model = nn.Linear(128, 256)
    ringlet.GradientReducer(model)
    seen = []
    for _ in range(2):
        step(model, rank)
        seen += [ringlet.is_registered(model.weight.grad), model.weight.grad.unique().tolist() == [6.0], not is_on()]
    ringlet.use_registered_allocator()
    step(model, rank)
    seen.append(is_on())
    ringlet.use_registered_allocator(False)
    assert [*seen, not is_on()] == [True] * 8


@on(3, "dist:ringlet")
def test_buckets_of_more_ranks_are_registered(rank: int, world: int) -> None:
    model = nn.Linear(128, 256)
    ringlet.GradientReducer(model)
    step(model, rank)
    assert all(ringlet.is_registered(p.grad) for p in model.parameters())


@on("two")
def test_a_backward_that_raises_ends_it(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 8))
    ringlet.GradientReducer(model)

    def fail(_gradient: torch.Tensor) -> None:
        raise ValueError(f"{is_on()}")

    hook = model[0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="True"):
        step(model, rank)
    off = not is_on()
    hook.remove()
    step(model, rank)
    assert (off, ringlet.is_registered(model[0].weight.grad), not is_on()) == (True, True, True)


@on("two")
def test_a_full_heap_leaves_gradients_to_torch(rank: int, world: int) -> None:
    model = nn.Linear(128, 3000)
    ringlet.GradientReducer(model)
    taken, size = [], _C.heap()["bytes"]
    while size >= 1 << 16:
        try:
            taken.append(ringlet.empty(size // 4))
        except ringlet.ResourceError:
            size //= 2
    step(model, rank)
    gradient = model.weight.grad
    assert (ringlet.is_registered(gradient), gradient.unique().tolist()) == (False, [6.0])
