"""The gradient reducer against single-process training and hand-made averages, on gloo and on ringlet: what it reduces
when, and what it refuses."""

import copy
import io
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from own_algorithms import own_ring
from ranks import on
from reducer_checks import (
    SMALL,
    Branches,
    Checkpointed,
    Fails,
    assert_gradients,
    assert_step,
    data,
    expected_average,
    loss_of,
    mlp,
    sends_late,
)
from refusals import refused
from ringlet import GradientReducer, InvalidUsage
from ringlet.training import agree


@on("ranks")
def test_values_that_a_graph_needs_are_not_overwritten(rank, world):
    model = mlp()
    GradientReducer(model, **SMALL)
    loss_of(model, rank).backward(create_graph=True)
    assert_gradients(model, expected_average(model, world))
    assert all(p.grad.grad_fn is None for p in model.parameters())  # not the graph's own tensors


@on("ranks")
def test_unused_parameters_count_zero_when_allowed(rank, world):
    model = Branches()
    GradientReducer(model, find_unused_parameters=True, **SMALL)
    used = ["b", "ab", "b"]
    expected = expected_average(model, world, loss=lambda m, r, step: m(data(r, step), used[r % 3]))
    for _ in range(2):
        model.zero_grad()
        model(data(rank), used[rank % 3]).backward()
        assert_gradients(model, expected)


@on("ranks")
def test_used_only_inside_no_sync_is_reduced(rank, world):
    model = Branches()
    reducer = GradientReducer(model, **SMALL)
    with reducer.no_sync():
        model(data(rank), "a").backward()
    model(data(rank), "b").backward()
    names = ["a", "b"]
    assert_gradients(model, expected_average(model, world, (0, 1), lambda m, r, step: m(data(r), names[step])))


@on("ranks")
def test_hooks_in_different_orders_and_one_rebuild(rank, world):
    model = Branches()
    reducer = GradientReducer(model, **SMALL)
    names = "ba" if rank == 0 else "ab"  # rank 0's is not the order of registration
    expected = expected_average(model, world, loss=lambda m, r, step: m(data(r, step), "ab"))
    for _ in range(3):
        model.zero_grad()
        model(data(rank), names).backward()
        assert_gradients(model, expected)
        stats = reducer.stats()
        everyone = [None] * world
        dist.all_gather_object(everyone, (stats["ready_order"], stats["bucket_parameters"]))
        assert everyone[0][0] != everyone[1][0]
        assert all(buckets == everyone[0][1] for _, buckets in everyone)
        assert stats["rebuilt"]
        assert [name for bucket in everyone[0][1] for name in bucket] == everyone[0][0]


@on("ranks")
def test_reentrant_checkpoints(rank, world):
    model = Checkpointed([0, 1, 1, 2], layers=3)  # layer 1 is reached twice, and before the last of its bucket
    GradientReducer(model)
    for _ in range(2):
        assert_step(model, rank, world)


@on("ranks")
def test_a_group_of_some_ranks(rank, world):
    group = dist.new_group([0, 1])
    if rank < 2:
        model = mlp()
        GradientReducer(model, group=group, **SMALL)
        assert_step(model, rank, 2)


@on("ranks")
def test_copies_and_removal_leave_the_module_alone(rank, world):
    model = mlp()
    reducer = model.reducer = GradientReducer(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert copied.reducer is None
        loss_of(copied, rank).backward()
    assert reducer.stats()["launches"] == 0
    reducer.remove()
    loss_of(model, rank).backward()
    assert reducer.stats()["launches"] == 0
    assert_gradients(model, expected_average(model, 1, loss=lambda m, _, step: loss_of(m, rank, step)))


@on("ranks")
def test_an_interrupted_backward(rank, world):
    group = dist.new_group()
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    GradientReducer(model, group=group)  # one bucket: nothing was sent, the next step is a fresh start
    with pytest.raises(ArithmeticError):
        model[1](Fails.apply(model[0](data(rank)))).sum().backward()
    assert_step(model, rank, world)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 9))
    reducer = GradientReducer(model, group=group, **SMALL)
    with pytest.raises(ArithmeticError):
        model[1](Fails.apply(model[0](data(rank)))).sum().backward()
    if sends_late(reducer):
        assert_step(model, rank, world)
        return
    refused(r"stopped after \d of \d buckets", model, data(rank))


@on("ranks")
def test_what_an_interrupted_backward_leaves_is_averaged(rank, world):
    """Also if the next backward of no rank reaches these parameters."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    reducer = GradientReducer(model, group=dist.new_group(), find_unused_parameters=True)
    with pytest.raises(ArithmeticError):
        model[1](Fails.apply(model[0](data(rank)))).sum().backward()
    assert not reducer.flush(), "it hands nothing over without delay=1"
    expected = model[1].weight.grad.clone()
    dist.all_reduce(expected)
    model[0](data(rank)).sum().backward()
    torch.testing.assert_close(model[1].weight.grad, expected / world)


@on("ranks")
def test_different_models_are_refused_by_rank_and_name(rank, world):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5 if rank == 1 else 4))
    refused(r"rank 0 has 'parameter 1\.weight .*\[4, 4\].*, rank 1 has .*\[5, 4\]", GradientReducer, model)
    with pytest.raises(InvalidUsage, match=r"rank 0 has 'nothing', rank 1 has 'buffer extra"):
        model = nn.Linear(2, 2)
        if rank == 1:
            model.register_buffer("extra", torch.ones(1))
        GradientReducer(model)
    refused("rank 0 has 'settings bucket_mb=1 ", GradientReducer, nn.Linear(2, 2), bucket_mb=2 if rank == 1 else 1)
    with pytest.raises(InvalidUsage, match=r"rank 0 has 'settings .* optimizer_in_backward=False', rank 1"):
        make = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
        GradientReducer(nn.Linear(2, 2), optimizer_in_backward=make if rank == 1 else None)


@on("ranks")
def test_what_cannot_be_reduced_is_refused(rank, world):
    for wrong in (own_ring, object()):  # in whose repr each rank has an address of its own
        refused("algorithm must be the name of an algorithm", GradientReducer, nn.Linear(2, 2), algorithm=wrong)
    refused("no parameter of Linear requires a gradient", GradientReducer, nn.Linear(2, 2).requires_grad_(False))
    refused("0 makes sparse gradients", GradientReducer, nn.Sequential(nn.Embedding(4, 4, sparse=True)))


@on("two")
@mock.patch.object(agree, "ALIKE_SECONDS", 0.5)
def test_what_cannot_be_reduced_on_one_rank_is_refused_on_all(rank, world):
    group, model = dist.new_group(), nn.Linear(2, 2)
    if rank == 1:
        GradientReducer(model, group=dist.new_group([1], use_local_synchronization=True))
    reason = "another GradientReducer or Zero reduces the gradient of weight already"
    with pytest.raises(InvalidUsage, match=reason if rank == 1 else f"rank 1 refused .*{reason}"):
        GradientReducer(model, group=group)
        dist.barrier(group)  # rank 0's values went out without waiting


@on("ranks")
def test_sparse_gradients_of_what_is_not_reduced(rank, world):
    class Looked(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.frozen = (nn.Embedding(4, 4, sparse=True) for _ in range(2))
            self.frozen.requires_grad_(False)
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(self.own(x) + self.frozen(x)).sum()

    model = Looked()
    model._ddp_params_and_buffers_to_ignore = ["own.weight"]
    GradientReducer(model)
    model(torch.tensor([rank])).backward()
    assert model.own.weight.grad.is_sparse and model.frozen.weight.grad is None
    assert torch.allclose(model.linear.bias.grad, torch.ones(4))


@on("ranks")
def test_the_algorithm_is_chosen_where_there_is_one(rank, world):
    if dist.get_backend() != "ringlet":
        with pytest.raises(InvalidUsage, match=r"algorithm='ring' needs a group on the ringlet backend, .* on gloo"):
            GradientReducer(nn.Linear(2, 2), algorithm="ring")
        return
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for algorithm in ("ring", "butterfly", "two_shot"):
        model = mlp()
        GradientReducer(model, algorithm=algorithm, **SMALL)
        before = backend.algorithm
        assert_step(model, rank, world)
        assert backend.algorithm == before
    refused("triangle", GradientReducer, nn.Linear(2, 2), algorithm="triangle")
