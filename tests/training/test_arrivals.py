"""Gradients that arrive as torch allows and few models do it: with memory that others use, in nested backwards before
the outer one, changed by hooks of the user's. Each rank compares with all ranks' gradients, which it makes alone."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ringlet
from ranks import on
from reducer_checks import assert_gradients, expected_average
from refusals import refused
from ringlet import InvalidUsage

STEPS = 3


class Summands(nn.Module):
    """Two parameters reach an addition through views: autograd gives both the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Parameter(torch.ones(4, 8)), nn.Parameter(torch.ones(4, 8)), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor, uses: bool = True) -> torch.Tensor:
        return self.c((self.a.view(-1) + self.b.view(-1)) * x if uses else x)


class Positions(nn.Module):
    """The gradient of `positions` is the memory of the gradient that flows on into the layers before."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
        self.positions = nn.Parameter(torch.randn(16, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        return self.head((x + self.layers(x)) + self.positions.unsqueeze(0))


class Nested(nn.Module):
    """`twice` is in a reentrant checkpoint, and before one: its gradient arrives in both. With `late`, that of `first`
    and `between` come only after the second time."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late
        self.first, self.twice, self.between, self.last = [nn.Linear(16, 16, bias=False) for _ in range(4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(*layers: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
            return lambda t: nn.Sequential(*layers)(t).tanh()

        x = self.first(x)
        if self.late:
            x = self.twice(checkpoint(inner(self.between), x, use_reentrant=True))
            return self.last(checkpoint(inner(self.twice), x, use_reentrant=True))
        x = checkpoint(inner(self.between), self.twice(x), use_reentrant=True)
        return self.last(checkpoint(inner(self.twice), x, use_reentrant=True))


def inputs(rank: int, step: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of_summands(model: nn.Module, rank: int, _step: int = 0) -> torch.Tensor:
    return model(torch.full((32,), rank + 1.0), rank == 0).sum()


def loss_of_positions(model: nn.Module, rank: int, _step: int = 0) -> torch.Tensor:
    return model(inputs(rank, 0, 1, 16, 64)).square().mean()


def loss_of_nested(model: nn.Module, rank: int, _step: int = 0) -> torch.Tensor:
    return model(inputs(rank, 0, 8, 16)).square().mean()


each_order = pytest.mark.parametrize("overlaps", [True, False], ids=["overlaps", "at-the-end"])


def reduced(model: nn.Module, overlaps: bool, **options: object) -> None:
    """Has a reducer send buckets during the backward, as where each rank has a processor to spare; or at its end."""
    reducer = ringlet.GradientReducer(model, **options)
    reducer._channel.overlaps = lambda _device: overlaps


def train(model: nn.Module, rank: int, loss: Callable[..., torch.Tensor], expected: list[torch.Tensor]) -> None:
    for _ in range(STEPS):
        model.zero_grad()
        loss(model, rank).backward()
        assert_gradients(model, expected)


@on("two")
@each_order
def test_memory_that_others_use_is_not_reduced_in_place(rank: int, world: int, overlaps: bool) -> None:
    """Shared by parameters."""
    torch.manual_seed(0)
    model = Summands()
    expected = expected_average(model, world, loss=loss_of_summands)
    reduced(model, overlaps, find_unused_parameters=True)
    train(model, rank, loss_of_summands, expected)


@on("two")
@each_order
def test_memory_that_others_use_later_is_not_reduced_in_place(rank: int, world: int, overlaps: bool) -> None:
    """Shared with the backward."""
    torch.manual_seed(0)
    model = Positions()
    expected = expected_average(model, world, loss=loss_of_positions)
    reduced(model, overlaps, bucket_mb=0.004, first_bucket_mb=0.004)
    # the reduction of the positions, which are first, is over before the layers' gradients are made
    model.layers[2].register_full_backward_hook(lambda *_: time.sleep(0.1))
    train(model, rank, loss_of_positions, expected)


@on("two")
@each_order
@pytest.mark.parametrize("late", [True, False], ids=["counts-once", "refused"])
def test_a_gradient_that_arrives_in_a_nested_backward_first(rank: int, world: int, overlaps: bool, late: bool) -> None:
    """It counts once; and it is refused if its bucket has been sent."""
    torch.manual_seed(0)
    model = Nested(late)
    expected = expected_average(model, world, loss=loss_of_nested)
    kib = 16 * 16 * 4 / 2**20
    reduced(model, overlaps, bucket_mb=(3 if late else 2) * kib, first_bucket_mb=kib)
    if late:
        train(model, rank, loss_of_nested, expected)
        return
    # in the first backward all but `last` are in one bucket, before the buckets are in the order of arrival
    with pytest.raises(InvalidUsage, match=r"the gradient of twice\.weight arrived again after its bucket was sent"):
        train(model, rank, loss_of_nested, expected)


@on("two")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_that_arrives_again_after_its_unit_was_sent_is_refused(rank: int, world: int, stage: int) -> None:
    torch.manual_seed(0)
    model = Nested(late=False)
    zero = ringlet.Zero(model, torch.optim.SGD, stage=stage, lr=0.1, bucket_elements=256, persistence_elements=0)
    with pytest.raises(InvalidUsage, match=r"the gradient of twice\.weight arrived again after its unit was sent"):
        for step in range(2):
            model(inputs(rank, step, 8, 16)).square().mean().backward()
            zero.step()


def halve_in_place(p: torch.Tensor) -> None:
    p.grad.mul_(0.5)


def replace_by_half(p: torch.Tensor) -> None:
    p.grad = p.grad * 0.5


@on((2, 3), "dist:ringlet")
@each_order
@pytest.mark.parametrize("hook", [halve_in_place, replace_by_half])
def test_what_hooks_do_to_a_gradient_is_done_before_it_is_reduced(
    rank: int, world: int, hook: Callable[[torch.Tensor], None], overlaps: bool
) -> None:
    torch.manual_seed(0)

    def loss(model: nn.Module, rank: int, _step: int = 0) -> torch.Tensor:
        return model(inputs(rank, 0, 8, 64)).square().mean()

    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    expected = expected_average(model, world, loss=loss)
    reduced(model, overlaps, bucket_mb=0.02, first_bucket_mb=0.02)
    handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]
    train(model, rank, loss, [gradient / 2 for gradient in expected])
    for handle in handles:
        handle.remove()
    train(model, rank, loss, expected)


@on("two")
def test_a_zero_refuses_windows_of_different_lengths(rank: int, world: int) -> None:
    model = nn.Linear(4, 4)
    zero = ringlet.Zero(model, torch.optim.SGD, stage=1, lr=1.0, accumulate=3)
    with pytest.raises(InvalidUsage, match="different numbers of micro-batches: rank 0 3, rank 1 2"):
        for _ in range(3 - rank):
            model(torch.ones(1, 4)).sum().backward()
            zero.step(partial=rank == 1 and zero._window.seen == 2)


@on("two")
def test_options_of_parameters_are_told_apart_and_compared(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    rates = {"0": 1.4e-4, "1": 1.2e-4}
    for number in (torch.tensor, numpy.float32):
        by_name = {name: {"lr": number(rates[name[0]])} for name, _ in model.named_parameters()}
        zero = ringlet.Zero(model, torch.optim.Adam, options_of=lambda name, _p, by_name=by_name: by_name[name])
        assert [round(float(group["lr"]), 6) for group in zero.optimizer.param_groups] == list(rates.values())
        zero.remove()
    said = r"rank 0 has 'options of weight: \[\('lr', 0.1\)\]', rank 1 has 'options of weight: \[\('lr', 0.2\)\]'"
    with pytest.raises(InvalidUsage, match=said):
        ringlet.Zero(nn.Linear(4, 4), torch.optim.Adam, options_of=lambda _name, _p: {"lr": 0.1 * (rank + 1)})


@on("two")
def test_a_closure_that_leaves_a_window_open_updates_nothing(rank: int, world: int) -> None:
    for backwards in (1, 2):
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        ringlet.GradientReducer(model).accumulate(2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def closure(model: nn.Module = model, backwards: int = backwards) -> torch.Tensor:
            for _ in range(backwards):
                loss = model(torch.full((1, 4), rank + 1.0)).sum()
                loss.backward()
            return loss

        told = pytest.raises(InvalidUsage, match=r"the closure of optimizer.step\(\) after 1 of 2 micro-batches")
        with told if backwards == 1 else contextlib.nullcontext():
            optimizer.step(closure)
        assert model.weight.unique().tolist() == [0.0 if backwards == 1 else -1.5]


# --- what becomes of gradients and parameters afterwards -------------------------------------------------------------


class Apart(nn.Module):
    """Autograd gives both gradients one memory on rank 0 only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))

    def forward(self, rank: int) -> torch.Tensor:
        if rank == 0:
            return (self.a.view(-1) + self.b.view(-1)) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        return self.a.view(-1) * 10 + self.b.view(-1) * 100


@on(2, "dist:ringlet", "dist:gloo")
def test_averages_are_not_written_into_shared_memory(rank: int, world: int) -> None:
    model = Apart()
    ringlet.GradientReducer(model, gradient_as_bucket_view=False)
    model(rank).sum().backward()
    for parameter, other in ((model.a, 10.0), (model.b, 100.0)):
        assert parameter.grad.flatten().tolist() == [(own + other) / 2 for own in (1.0, 2.0, 3.0, 4.0)]


@on("two")
def test_parameters_that_lost_their_hooks_are_refused(rank: int, world: int) -> None:
    model = nn.Linear(2, 2, bias=False)
    ringlet.GradientReducer(model)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(copy.deepcopy(model.state_dict()))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    refused(r"parameter weight was exchanged by torch\.utils\.swap_tensors", model, torch.ones(1, 2))


@on("two")
@pytest.mark.parametrize("merges", [True, False])
def test_a_flush_drops_no_gradients(rank: int, world: int, merges: bool) -> None:
    model = nn.Linear(1, 1, bias=False)
    reducer = ringlet.GradientReducer(model, delay=1)
    if merges:
        reducer.accumulate(2)

    def backward(value: float) -> None:
        model(torch.full((1, 1), value)).sum().backward()

    for _ in range(2 if merges else 1):
        backward(1.0)
    model.zero_grad()
    with contextlib.nullcontext() if merges else reducer.no_sync():
        backward(100.0)
    refused(r"flush\(\) after", reducer.flush)
    backward(200.0)
    model.zero_grad()
    reducer.flush()
    assert model.weight.grad.flatten().tolist() == [150.0 if merges else 300.0]


@on(2, "dist:ringlet", "dist:gloo", "dist:")
def test_averages_do_not_overflow_where_gradients_do_not(rank: int, world: int) -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.float16)
    ringlet.GradientReducer(model)
    model(torch.full((1, 1), 40000.0, dtype=torch.float16)).sum().backward()
    assert model.weight.grad.flatten().tolist() == [40000.0]
