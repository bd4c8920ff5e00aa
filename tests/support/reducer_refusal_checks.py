"""What a gradient reducer must refuse, and how clearly: more checks for the list of reducer_checks.py."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from reducer_checks import (
    SMALL,
    Branches,
    Checkpointed,
    assert_gradients,
    check,
    data,
    expected_average,
    loss_of,
    mlp,
    sends_late,
)
from ringlet import GradientReducer, InvalidUsage


@check
def unused_parameters_are_refused_by_name_and_ranks_stay_matched(rank, world):
    model = Branches()
    GradientReducer(model, **SMALL)
    replica = copy.deepcopy(model)
    for r in range(world):
        replica(data(r), "b" if r == 0 else "ab").backward()
    loss = model(data(rank), "b" if rank == 0 else "ab")
    if rank == 0:
        with pytest.raises(InvalidUsage, match=r"rank 0: 2 of 4 parameters got no gradient .*: a\.weight, a\.bias\."):
            loss.backward()
        assert model.a.weight.grad is None
    else:
        loss.backward()
        torch.testing.assert_close(model.a.weight.grad, replica.a.weight.grad / world)
    torch.testing.assert_close(model.b.weight.grad, replica.b.weight.grad / world)
    model.zero_grad()
    model(data(rank), "ab").backward()
    assert_gradients(model, expected_average(model, world, loss=lambda m, r, step: m(data(r, step), "ab")))


@check
def a_gradient_after_its_bucket_is_refused(rank, world):
    model = Checkpointed([0, 1, 1], layers=2)
    GradientReducer(model, group=dist.new_group(), bucket_mb=1e-6)  # a parameter a bucket
    with pytest.raises(InvalidUsage, match=r"gradient of layers\.1\.(weight|bias) arrived again after its bucket was"):
        loss_of(model, rank).backward()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("on purpose")


@check
def an_interrupted_backward(rank, world):
    group = dist.new_group()
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    GradientReducer(model, group=group)  # one bucket: nothing was sent, the next step is a fresh start
    with pytest.raises(ArithmeticError):
        model[1](Fails.apply(model[0](data(rank)))).sum().backward()
    model.zero_grad()
    loss_of(model, rank).backward()
    assert_gradients(model, expected_average(model, world))
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 9))
    reducer = GradientReducer(model, group=group, **SMALL)
    with pytest.raises(ArithmeticError):
        model[1](Fails.apply(model[0](data(rank)))).sum().backward()
    if sends_late(reducer):
        model.zero_grad()
        loss_of(model, rank).backward()
        assert_gradients(model, expected_average(model, world))
        return
    with pytest.raises(InvalidUsage, match=r"stopped after \d of \d buckets"):
        model(data(rank))


@check
def an_interrupted_backward_and_one_of_an_earlier_forward(rank, world):
    """No forward lies between them: the second one is reduced, or refused where buckets had gone out."""
    group = dist.new_group()
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    reducer = GradientReducer(model, group=group)
    earlier = loss_of(model, rank)
    with pytest.raises(ArithmeticError):
        model[1](Fails.apply(model[0](data(rank)))).sum().backward()
    model.zero_grad()
    earlier.backward()
    assert reducer.stats()["backwards"] == 1
    assert_gradients(model, expected_average(model, world))
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 9))
    reducer = GradientReducer(model, group=group, **SMALL)
    earlier = loss_of(model, rank)
    with pytest.raises(ArithmeticError):
        model[1](Fails.apply(model[0](data(rank)))).sum().backward()
    if sends_late(reducer):
        model.zero_grad()
        earlier.backward()
        assert_gradients(model, expected_average(model, world))
        return
    with pytest.raises(InvalidUsage, match=r"stopped after \d of \d buckets"):
        earlier.backward()


@check
def different_models_are_refused_by_rank_and_name(rank, world):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5 if rank == 1 else 4))
    with pytest.raises(InvalidUsage, match=r"rank 0 has 'parameter 1\.weight .*\[4, 4\].*, rank 1 has .*\[5, 4\]"):
        GradientReducer(model)
    with pytest.raises(InvalidUsage, match=r"rank 0 has 'nothing', rank 1 has 'buffer extra"):
        model = nn.Linear(2, 2)
        if rank == 1:
            model.register_buffer("extra", torch.ones(1))
        GradientReducer(model)
    with pytest.raises(InvalidUsage, match="rank 0 has 'settings bucket_mb=1 "):
        GradientReducer(nn.Linear(2, 2), bucket_mb=2 if rank == 1 else 1)
    with pytest.raises(InvalidUsage, match=r"rank 0 has 'settings .* optimizer_in_backward=False', rank 1"):
        make = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
        GradientReducer(nn.Linear(2, 2), optimizer_in_backward=make if rank == 1 else None)


@check
def what_cannot_be_reduced_is_refused(rank, world):
    with pytest.raises(InvalidUsage, match="no parameter of Linear requires a gradient"):
        GradientReducer(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(InvalidUsage, match="0 makes sparse gradients"):
        GradientReducer(nn.Sequential(nn.Embedding(4, 4, sparse=True)))
    with pytest.raises(InvalidUsage, match=r"bucket_mb must be a number of MiB above 0 .*, got 0"):
        GradientReducer(nn.Linear(2, 2), bucket_mb=0)


@check
def the_algorithm_is_chosen_where_there_is_one(rank, world):
    if dist.get_backend() != "ringlet":
        with pytest.raises(InvalidUsage, match=r"algorithm='ring' needs a group on the ringlet backend, .* on gloo"):
            GradientReducer(nn.Linear(2, 2), algorithm="ring")
        return
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for algorithm in ("ring", "butterfly", "two_shot"):
        model = mlp()
        GradientReducer(model, algorithm=algorithm, **SMALL)
        before = backend.algorithm
        loss_of(model, rank).backward()
        assert_gradients(model, expected_average(model, world))
        assert backend.algorithm == before
    with pytest.raises(InvalidUsage, match="triangle"):
        GradientReducer(nn.Linear(2, 2), algorithm="triangle")
