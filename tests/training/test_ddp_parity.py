"""What DDP can do and the reducer must too, compared with DDP where DDP manages it."""

import contextlib
import copy
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ranks import on
from reducer_checks import (
    SMALL,
    Branches,
    Checkpointed,
    Fails,
    assert_gradients,
    data,
    expected_average,
    loss_of,
    mlp,
    same,
    sends_late,
)
from refusals import refused
from ringlet import GradientReducer, InvalidUsage

# --- static graph


@on("ranks")
def test_static_graph_with_reentrant_checkpoints(rank, world):
    """Layers reached twice in one backward, in buckets of one parameter: refused without static_graph. With no_sync()
    first, DDP fails an internal assertion (pytorch#143580), or silently stops to reduce."""
    model = Checkpointed([0, 1, 1, 2, 1], layers=3)
    reducer = GradientReducer(model, static_graph=True, bucket_mb=1e-6, first_bucket_mb=1e-6)
    for step in range(4):
        model.zero_grad()
        with reducer.no_sync():
            loss_of(model, rank, 10 + step).backward()
        loss_of(model, rank, step).backward()
        assert_gradients(model, expected_average(model, world, (10 + step, step)))
    stats = reducer.stats()
    assert stats["rebuilt"] and len(stats["bucket_bytes"]) == 6
    launched = [bucket["launched_s"] for bucket in stats["buckets"]]
    if not sends_late(reducer):
        assert launched[0] < stats["backward_s"]  # no longer all at the end, as in the first


@dataclass
class Output:
    y: list[torch.Tensor]


@on("ranks")
def test_static_graph_with_a_dataclass_as_output(rank, world):
    """Where all gradients arrive in reentrant checkpoints: the backward begins at the output, not at the first."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    alone = copy.deepcopy(model)
    model.forward = lambda x: Output(
        [checkpoint(model[1], checkpoint(model[0], x, use_reentrant=True), use_reentrant=True)]
    )
    reducer = GradientReducer(model, static_graph=True, **SMALL)
    for step in range(3):
        model.zero_grad()
        model(data(rank, step).requires_grad_()).y[0].square().mean().backward()
        assert_gradients(model, expected_average(alone, world, (step,)))
        assert reducer.stats()["backwards"] == step + 1


@on("ranks")
def test_static_graph_that_changes_is_told(rank, world):
    model = Branches()
    GradientReducer(model, group=dist.new_group(), static_graph=True, **SMALL)
    model(data(rank), "b").backward()
    with pytest.raises(InvalidUsage, match=r"static_graph=True, but 4 of 4 parameters .*: a\.weight, a\.bias"):
        model(data(rank), "a").backward()


@on("ranks")
def test_no_sync_around_a_part_does_what_ddp_does(rank, world):
    for inside in ("forward", "backward", "both"):
        ours = mlp()
        theirs = DistributedDataParallel(copy.deepcopy(ours))
        reducer = GradientReducer(ours, **SMALL)
        for model, module, no_sync in ((ours, ours, reducer.no_sync), (theirs, theirs.module, theirs.no_sync)):
            with no_sync() if inside != "backward" else contextlib.nullcontext():
                loss = loss_of(model, rank, 0)
            with no_sync() if inside != "forward" else contextlib.nullcontext():
                loss.backward()
            assert all(p.grad is not None for p in module.parameters())
        assert_gradients(ours, [p.grad for p in theirs.module.parameters()])
        for model in (ours, theirs):
            loss_of(model, rank, 1).backward()
        assert_gradients(ours, [p.grad for p in theirs.module.parameters()])


# --- uneven inputs


def train_unevenly(model, context, rank, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    with context:
        for step in range(2 + 2 * (rank % 2)):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()


@on("ranks")
def test_join_with_unused_parameters_and_no_sync(rank, world):
    for options in ({"find_unused_parameters": True}, {"static_graph": True}, {}):
        model = mlp()
        reducer = GradientReducer(model, **options, **SMALL)
        with reducer.join():
            for step in range(1 + rank):  # rank 0 leaves before the buckets are laid out anew
                model.zero_grad()
                with reducer.no_sync():
                    loss_of(model, rank, step).backward()
                loss_of(model, rank, step).backward()
                if step == world - 1:  # the last rank is alone by now: the others give zeros
                    own = expected_average(model, 1, (step, step), lambda m, _, step: loss_of(m, rank, step))
                    assert_gradients(model, [gradient / world for gradient in own])


@on("ranks")
def test_join_can_end_early(rank, world):
    model = mlp()
    reducer = GradientReducer(model, group=dist.new_group(), **SMALL)
    with pytest.raises(RuntimeError, match="exhausted"):
        train_unevenly(model, reducer.join(throw_on_early_termination=True), rank)


@on("ranks")
def test_an_error_inside_join_ends_it(rank, world):
    model = mlp()
    reducer = GradientReducer(model, **SMALL)
    with pytest.raises(KeyError), reducer.join():
        loss_of(model, rank, 0).backward()
        raise KeyError
    model.zero_grad()
    merge = reducer.accumulate(1)  # which excludes join()
    loss_of(model, rank, 1).backward()
    assert merge.complete
    assert_gradients(model, expected_average(model, world, (1,)))


# --- buffers and what is ignored


@on("ranks")
def test_other_ignored_parameters_on_one_rank_are_refused(rank, world):
    model = nn.Linear(6, 6)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["bias" if rank == 1 else "weight"])
    refused("rank 0 has 'ignored weight', rank 1 has 'ignored bias'", GradientReducer, model)


# --- the optimizer in backward


@on("ranks")
def test_an_optimizer_in_backward_equals_one_after_it(rank, world):
    torch.manual_seed(5)
    inside, after, torchs = mlp(), mlp(), mlp()
    after.load_state_dict(inside.state_dict())
    torchs.load_state_dict(inside.state_dict())
    make = lambda parameters: torch.optim.Adam(parameters, lr=0.01)  # noqa: E731
    reducer = GradientReducer(inside, optimizer_in_backward=make, **SMALL)
    _apply_optimizer_in_backward(torch.optim.Adam, torchs.parameters(), {"lr": 0.01})
    GradientReducer(torchs, gradient_as_bucket_view=False, **SMALL)
    GradientReducer(after, **SMALL)
    optimizer = make(after.parameters())
    assert list(reducer.optimizers) == [name for name, _ in inside.named_parameters()]
    for step in range(4):
        optimizer.zero_grad()
        for model in (inside, torchs, after):
            loss_of(model, rank, step).backward()
        optimizer.step()
        same(inside, after, 0)
        same(torchs, after, 0)
        assert all(p.grad is None for p in (*inside.parameters(), *torchs.parameters()))


@on("ranks")
def test_an_optimizer_in_backward_steps_where_works_tell_late(rank, world):
    """On a GPU wait() orders streams only: the work need not be completed when it returns."""
    torch.manual_seed(5)
    model = mlp()
    before = copy.deepcopy(model)
    reducer = GradientReducer(model, optimizer_in_backward=lambda p: torch.optim.SGD(p, lr=1.0), **SMALL)
    expected = expected_average(before, world)
    start = reducer._channel.start
    reducer._channel.start = lambda *arguments, **named: TellsLate(start(*arguments, **named))
    loss_of(model, rank).backward()
    for parameter, old, gradient in zip(model.parameters(), before.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), old.detach() - gradient)


class TellsLate:
    def __init__(self, work):
        self.wait, self.get_future = work.wait, work.get_future

    def is_completed(self) -> bool:
        return False


@on(1, "dist:gloo", "dist:ringlet")  # of several ranks, each has updated other parameters when the error comes
def test_an_optimizer_in_backward_steps_after_a_backward_that_stopped(rank, world):
    """What had stepped before the error steps again in the next backward, as all else does."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 9))
    reducer = GradientReducer(model, optimizer_in_backward=lambda p: torch.optim.SGD(p, lr=1.0), **SMALL)
    loss_of(model, rank, 0).backward()  # after which buckets are in the order of arrival
    with pytest.raises(ArithmeticError):
        model[1](Fails.apply(model[0](data(rank)))).sum().backward()
    refused("stopped after", model, data(rank))
    for step in (1, 2):
        model.zero_grad()
        before, expected = copy.deepcopy(model), expected_average(model, world, (step,))
        loss_of(model, rank, step).backward()
        for parameter, old, gradient in zip(model.parameters(), before.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.detach(), old.detach() - gradient)
    assert reducer.optimizers


@on("ranks")
def test_torchs_optimizer_in_backward_stays_where_the_reducer_does_not(rank, world):
    """A reducer that refuses its options, or is removed, leaves torch's optimizers at work."""
    model = mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})

    def steps_alone():
        before = copy.deepcopy(model)
        loss_of(before, rank).backward()
        loss_of(model, rank).backward()
        for parameter, old in zip(model.parameters(), before.parameters(), strict=True):
            assert parameter.grad is None
            torch.testing.assert_close(parameter.detach(), old.detach() - old.grad)

    steps_alone()
    for options in ({"delay": 1}, {"optimizer_in_backward": lambda p: torch.optim.SGD(p, lr=1.0)}):
        refused("optimizer_in_backward", GradientReducer, model, **options)
        steps_alone()
    GradientReducer(model, **SMALL).remove()
    steps_alone()


@on((2, 4), "dist:gloo")
def test_join_with_another_joinable(rank, world):
    """What is tested is torch's Join with two joinables: on gloo alone."""
    ours = mlp()
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    for model, joinable in ((ours, GradientReducer(ours, **SMALL)), (theirs, theirs)):
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        train_unevenly(model, Join([joinable, optimizer]), rank, optimizer)
    same(ours, theirs.module)
