"""Gradient merge: one reduction for k micro-batches, counted by the reducer; a wrong micro-step is told."""

import contextlib
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ranks import on
from reducer_checks import SMALL, Fails, assert_gradients, assert_step, data, expected_average, loss_of, mlp, sends_late
from refusals import refused, stopped_at
from ringlet import GradientReducer, InvalidUsage


def equal_on_all_ranks(model) -> None:
    for parameter in model.parameters():
        everyone = [torch.empty_like(parameter.data) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, parameter.data)
        assert all(torch.equal(other, everyone[0]) for other in everyone)


@on("ranks")
@pytest.mark.parametrize("k", [1, 3])
def test_k_micro_batches_equal_one_large_batch(rank, world, k):
    torch.manual_seed(3)
    merged, large = mlp(torch.float64), mlp(torch.float64)
    large.load_state_dict(merged.state_dict())
    reducer = GradientReducer(merged, **SMALL)
    merge = reducer.accumulate(k)
    optimizer, alone = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (merged, large))
    windows = [range(k), range(k, 2 * k), range(2 * k, 2 * k + max(1, k - 1))]  # the last one is short where k > 1
    for window in windows:
        launches = reducer.stats()["launches"]
        for step in window:
            assert not merge.complete or step == window[0]
            loss_of(merged, rank, step).backward()
        if merge.complete:
            assert len(window) == k
        else:
            assert merge.seen == len(window) < k
            assert reducer.stats()["launches"] == launches
            assert merge.finish()
        assert merge.seen == 0 and merge.complete
        assert reducer.stats()["launches"] - launches == len(reducer.stats()["bucket_bytes"])
        optimizer.step()
        optimizer.zero_grad()
        alone.zero_grad()
        batch = torch.cat([data(r, step, torch.float64) for r in range(world) for step in window])
        large(batch).square().mean().backward()
        alone.step()
    assert not merge.finish()  # nothing is left
    for a, b in zip(merged.parameters(), large.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    equal_on_all_ranks(merged)


@on("ranks")
def test_a_wrong_micro_step_is_told(rank, world):
    model = mlp()
    reducer = GradientReducer(model, **SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(mlp().parameters(), lr=0.1)
    merge = reducer.accumulate(3)
    loss_of(model, rank, 0).backward()
    other.step()
    refused(r"optimizer\.step\(\) after 1 of 3 micro-batches: .* not reduced yet", optimizer.step)
    refused(r"accumulate\(\) after 1 of 3", reducer.accumulate, 2)
    refused(r"remove\(\) after 1 of 3", reducer.remove)
    with pytest.raises(InvalidUsage, match=r"no_sync\(\) after accumulate\(\)"), reducer.no_sync():
        pass
    gradients = [parameter.grad for parameter in model.parameters()]
    optimizer.zero_grad()
    refused(r"zero_grad\(\) after 1 of 3 micro-batches dropped", loss_of, model, rank, 1)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    assert merge.finish()
    assert_gradients(model, expected_average(model, world))
    optimizer.step()
    reducer.accumulate(1)
    loss_of(model, rank, 1).backward()
    optimizer.step()
    reducer.remove()
    loss_of(model, rank, 1).backward()
    optimizer.step()  # no reducer, no window


@on("ranks")
def test_a_backward_that_stopped_is_not_in_the_window_that_finish_closes(rank, world):
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
    reducer = GradientReducer(model)
    merge = reducer.accumulate(3)
    for call in (merge.finish, lambda: reducer.accumulate(2)):
        loss_of(model, rank, 0).backward()
        with pytest.raises(ArithmeticError):
            model[1](Fails.apply(model[0](data(rank)))).sum().backward()
        refused("stopped in micro-batch 2 of a window of 3", call)
        model.zero_grad()
        loss_of(model, rank, 1).backward()
        assert merge.finish()
        assert_gradients(model, expected_average(model, world, (1,)))
        model.zero_grad()


@on("two")
@pytest.mark.parametrize("seen", [0, 1])
@pytest.mark.parametrize("reproducible", [False, True])
def test_a_stopped_backward_can_be_dropped_where_it_raised(rank, world, seen, reproducible):
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 9))
    merge = GradientReducer(model, reproducible=reproducible, **SMALL).accumulate(4)
    for _ in range(seen):
        loss_of(model, rank).backward()
    if rank == 0:
        with pytest.raises(ArithmeticError):
            model[1](Fails.apply(model[0](data(rank)))).sum().backward()
    merge.drop()
    for step in range(4):
        loss_of(model, rank, step).backward()
    assert merge.complete
    expected = expected_average(model, world, (0, 1, 2, 3))
    assert_gradients(model, [gradient / 4 for gradient in expected])


@on("ranks")
def test_a_window_that_cannot_be_closed_is_no_hindrance(rank, world):
    """If buckets have gone out when a backward stops, the window goes with the reducer; else the caller drops it."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 9))
    reducer = GradientReducer(model, group=dist.new_group(), **SMALL)
    reducer.accumulate(2)
    loss_of(model, rank, 0).backward()
    with pytest.raises(ArithmeticError):
        model[1](Fails.apply(model[0](data(rank)))).sum().backward()
    what = "call zero_grad" if sends_late(reducer) else "make a new process group and train on it"
    refused(what, model, data(rank))
    reducer.remove()
    model.zero_grad()
    GradientReducer(model, **SMALL)
    assert_step(model, rank, world, 1)


@on("ranks")
@pytest.mark.parametrize("where", ["finish", "backward"])
def test_ranks_that_disagree_are_all_told(rank, world, where):
    """Rank 1 closes its window one micro-batch early, with the others in a backward or in finish() themselves."""
    model = mlp()
    reducer = GradientReducer(model, group=dist.new_group(), **SMALL)
    merge = reducer.accumulate(3)
    for step in range(2 - (rank == 1)):
        loss_of(model, rank, step).backward()
    expected = ", ".join(f"rank {r} {3 - (r == 1) - (where == 'finish')}" for r in range(world))
    if where == "backward" and rank == 1:
        loss_of(model, rank, 1).backward()
    with pytest.raises(InvalidUsage, match=f"different numbers of micro-batches: {expected}"):
        if where == "finish" or rank == 1:
            merge.finish()
        else:
            loss_of(model, rank, 2).backward()


class TwoArguments(torch.optim.SGD):
    """An optimizer whose step takes more than a closure."""

    def step(self, closure=None, scale=None):
        self.scale = scale
        return super().step(closure)


@on("two")
def test_a_step_gets_all_its_arguments(rank, world):
    model = mlp()
    merge = GradientReducer(model).accumulate(1)
    optimizer = TwoArguments(model.parameters(), lr=0.0)

    def closure():
        loss_of(model, rank).backward()
        return 3.0

    assert optimizer.step(closure, 0.5) == 3.0 and optimizer.scale == 0.5
    assert optimizer.step(closure=closure, scale=0.25) == 3.0 and optimizer.scale == 0.25
    assert merge.complete


@on("ranks")
def test_a_forgotten_window_leaves_no_hook(rank, world):
    """And its end does not disturb an optimizer's step, in which it may come."""
    GradientReducer(mlp()).accumulate(2)  # torch has its hooks from now on
    gc.collect()
    before = [len(hooks) for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)]
    first = [register_optimizer_step_pre_hook(lambda *_: collected()), register_optimizer_step_post_hook(collected)]
    for hooks, handle in zip((_global_optimizer_pre_hooks, _global_optimizer_post_hooks), first, strict=True):
        hooks.move_to_end(handle.id, last=False)
    gc.disable()
    for _ in range(3):
        GradientReducer(mlp()).accumulate(2)
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()
    gc.enable()
    for handle in first:
        handle.remove()
    assert [len(hooks) for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)] == before


def collected(*_arguments):
    gc.collect()


@on("ranks")
def test_zero_grad_after_a_stopped_backward_is_enough(rank, world):
    for k, stopped, set_to_none in ((1, 0, True), (1, 0, False), (2, 0, True), (2, 1, True), (2, 1, False)):
        torch.manual_seed(3)  # `expected` is of the rank's own parameters
        model = mlp()
        expected = expected_average(model, world, range(k))
        merge = GradientReducer(model, group=dist.new_group()).accumulate(k)
        for step in range(stopped):
            loss_of(model, rank, step).backward()
        with stopped_at(next(model.parameters())):  # the last one: others have arrived
            loss_of(model, rank, stopped).backward()
        model.zero_grad(set_to_none)
        for step in range(k):
            loss_of(model, rank, step).backward()
        assert merge.complete
        assert_gradients(model, [gradient / k for gradient in expected])


class Constant(nn.Module):
    """Whose gradient is 1."""

    def __init__(self, dtype):
        super().__init__()
        self.weight, self.other = (nn.Parameter(torch.zeros(40, dtype=dtype)) for _ in range(2))

    def forward(self, x):
        return (self.weight.sum() + self.other.sum()) * x


@on("ranks")
def test_a_long_window_of_16_bits_adds_up_in_float32(rank, world):
    for dtype, first in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):  # to which 1 adds nothing in this dtype
        steps = [torch.tensor(x, dtype=dtype) for x in [first, *[1.0] * 8]]
        total = first + 8
        for options in ({}, {"gradient_as_bucket_view": False}, {"static_graph": True}):
            model = Constant(dtype)
            merge = GradientReducer(model, **options).accumulate(9, average=False)
            for x in steps:
                model(x).backward()
            assert merge.complete and all(p.grad.unique().tolist() == [total] for p in model.parameters())
            model.zero_grad()
            for x in steps[:-2]:
                model(x).backward()
            assert model.weight.grad.unique().tolist() == [total - 2]
            model.weight.grad.fill_(-8)  # what a program writes counts
            model(steps[-1]).backward()
            assert merge.finish()
            assert model.weight.grad.unique().tolist() == [-7]
            assert model.other.grad.unique().tolist() == [torch.tensor(total - 1).to(dtype)]
            model = Constant(dtype)
            reducer = GradientReducer(model, **options)
            for _ in range(2):
                model.zero_grad()
                for step, x in enumerate(steps):
                    with reducer.no_sync() if step < 8 else contextlib.nullcontext():
                        loss = model(x)
                    loss.backward()
                assert all(p.grad.unique().tolist() == [total] for p in model.parameters())
    model = Constant(torch.bfloat16)
    merge = GradientReducer(model, accumulate_dtype=torch.bfloat16).accumulate(9, average=False)
    for x in (256.0, *[1.0] * 8):
        model(torch.tensor(x, dtype=torch.bfloat16)).backward()
    assert model.weight.grad.unique().tolist() == [256]


class Branch(Constant):
    """With a second branch that only some ranks take."""

    def forward(self, x, both):
        return (self.weight.sum() + self.other.sum()) * x if both else self.weight.sum() * x


@on("ranks")
def test_16_bit_values_in_grad_count_where_no_gradient_arrives(rank, world):
    """With a static graph the bucket is sent amid the backward."""
    one = torch.ones((), dtype=torch.bfloat16)
    for options in ({"static_graph": True}, {"find_unused_parameters": True}):
        model = Branch(torch.bfloat16)
        reducer = GradientReducer(model, bucket_mb=1e-6, first_bucket_mb=1e-6, **options)
        model(one, rank == 0).backward()
        for parameter in model.parameters():
            parameter.grad.fill_(4)
        with reducer.no_sync():
            model(one, rank == 0).backward()
        model(one, rank == 0).backward()
        average = torch.tensor(4 + 2 / world, dtype=torch.bfloat16)
        assert model.weight.grad.unique().tolist() == [6] and model.other.grad.unique().tolist() == [average]


@on("two")
@pytest.mark.parametrize("how", ["zero_grad", "drop"])
def test_dropped_16_bit_sums_leave_nothing_below_their_last_bit(rank, world, how):
    model = Constant(torch.bfloat16)
    reducer = GradientReducer(model)
    bits = [torch.tensor(x, dtype=torch.bfloat16) for x in (1, 2**-9, 2**-9)]  # each alone adds nothing to 1
    if how == "drop":
        merge = reducer.accumulate(3, average=False)
        for x in bits[:2]:
            model(x).backward()
        merge.drop()
        for x in bits:
            model(x).backward()
    else:
        with reducer.no_sync():
            for x in bits[:2]:
                model(x).backward()
            model.zero_grad()
            for x in bits[:2]:
                model(x).backward()
        model(bits[2]).backward()
    assert all(p.grad.unique().tolist() == [1] for p in model.parameters())  # 1 + 2**-8, a tie


@on("ranks")
def test_a_stopped_backward_leaves_16_bit_sums(rank, world):
    model = Constant(torch.bfloat16)
    reducer = GradientReducer(model)
    one = torch.ones((), dtype=torch.bfloat16)
    with reducer.no_sync():
        for _ in range(2):
            model(one).backward()
        with stopped_at(model.weight):
            model(one).backward()
        assert model.weight.grad.unique().tolist() == [2]
        model.zero_grad()
        model(one).backward()
    model(one).backward()
    assert all(p.grad.unique().tolist() == [2] for p in model.parameters())


@on("two")
@pytest.mark.parametrize("settings", [{}, {"reproducible": True}, {"dtype": torch.bfloat16}])
def test_a_dropped_window_leaves_nothing(rank, world, settings):
    options = {key: value for key, value in settings.items() if key != "dtype"}
    model = mlp(settings.get("dtype", torch.float64))
    reducer = GradientReducer(model, **SMALL, **options)
    merge = reducer.accumulate(2)
    loss_of(model, rank, 5).backward()
    model.zero_grad()
    if not options:  # else the sums are not in `.grad`
        refused("merge.drop.*, on every rank, to give a window up", loss_of, model, rank, 0)
        refused("merge.drop", merge.finish)
    refused("call finish.. or drop.. first", reducer.accumulate, 2)
    merge.drop()
    assert merge.seen == 0
    loss_of(model, rank, 5).backward()
    sent = loss_of(model, rank, 5)
    sent.register_hook(lambda gradient: Fails.backward(None, gradient))
    with pytest.raises(ArithmeticError):
        sent.backward()
    merge.drop()
    for step in range(2):
        loss_of(model, rank, step).backward()
    dropped = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for step in range(2):
        loss_of(model, rank, step).backward()
    assert merge.complete
    assert all(torch.equal(a, p.grad) for a, p in zip(dropped, model.parameters(), strict=True))
    merge.drop()  # nothing, as no window is open
    assert all(torch.equal(a, p.grad) for a, p in zip(dropped, model.parameters(), strict=True))
    assert reducer.accumulate(2).k == 2
    refused("drop.. of a window that a later accumulate", merge.drop)


class Gate(nn.Module):
    shut = False

    def forward(self, x):
        return Fails.apply(x) if self.shut else x


@on("two")
@pytest.mark.parametrize("layers_before", [2, 5])
def test_a_backward_that_raises_drops_a_reproducible_window(rank, world, layers_before):
    """Also before its first gradient."""
    layers, gate = mlp(torch.float64), Gate()
    model = nn.Sequential(*layers[:layers_before], gate, *layers[layers_before:])
    merge = GradientReducer(model, reproducible=True).accumulate(2)
    loss_of(model, rank, 5).backward()
    gate.shut = True
    with pytest.raises(ArithmeticError):
        loss_of(model, rank).backward()
    gate.shut = False
    refused("stopped in micro-batch 2 of a window of 2, which is dropped", loss_of, model, rank)
    for step in range(2):
        assert not merge.complete
        loss_of(model, rank, step).backward()
    assert merge.complete


@on("two")
def test_a_window_that_closed_badly_is_dropped_on_both(rank, world):
    """Also on a rank that had no micro-batch in it."""
    model = mlp(torch.float64)
    reducer = GradientReducer(model, **SMALL)
    merge = reducer.accumulate(2)
    for step in range(2):
        loss_of(model, rank, step).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    if rank == 0:
        loss_of(model, rank, 5).backward()
    refused("different numbers of micro-batches", merge.finish)
    assert not merge.complete
    merge.drop()
    assert all(p.grad is None for p in model.parameters())
    for step in range(2):
        loss_of(model, rank, step).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(expected, model.parameters(), strict=True))
