"""Communication hooks: those of torch run unchanged, and give what they give under DDP."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ranks import on
from reducer_checks import SMALL, expected_average, loss_of, mlp, same, train
from refusals import refused
from ringlet import GradientReducer, InvalidUsage


def hooked_pair(state_of, hook):
    """One model under the reducer and under DDP, with the same hook; one bucket each, so that both see the same."""
    torch.manual_seed(5)
    ours = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 3))
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    reducer = GradientReducer(ours)
    reducer.register_comm_hook(state_of(), hook)
    theirs.register_comm_hook(state_of(), hook)
    return ours, theirs


def local_sgd_state():
    return post_localSGD_hook.PostLocalSGDState(None, dist.new_group(), start_localSGD_iter=2)


def power_sgd_state():
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1)


HOOKS = {
    "allreduce": (lambda: None, default_hooks.allreduce_hook, 1e-6),
    "fp16": (lambda: None, default_hooks.fp16_compress_hook, 1e-3),
    "fp16 around allreduce": (lambda: None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), 1e-3),
    "local SGD": (local_sgd_state, post_localSGD_hook.post_localSGD_hook, 1e-5),
    "PowerSGD": (power_sgd_state, powerSGD_hook.powerSGD_hook, 1e-4),
}


@on("ranks")
def test_hooks_equal_ddps(rank, world):
    for state_of, hook, tolerance in HOOKS.values():
        ours, theirs = hooked_pair(state_of, hook)
        train(ours, rank, 6)
        train(theirs, rank, 6)
        same(ours, theirs.module, tolerance)


@on("ranks")
def test_bf16_hook_rounds_and_averages(rank, world):
    """DDP refuses this hook on a CPU."""
    model = mlp()
    GradientReducer(model, **SMALL).register_comm_hook(None, default_hooks.bf16_compress_hook)
    loss_of(model, rank).backward()
    for parameter, gradient in zip(model.parameters(), expected_average(model, world), strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=2e-2, atol=1e-3)
        assert torch.equal(parameter.grad.bfloat16().float(), parameter.grad)


@on("ranks")
def test_a_hook_averages_complex_gradients(rank, world):
    """torch's all_reduce gives its future the real view of a complex tensor."""
    model = nn.Linear(3, 2, dtype=torch.complex64)
    GradientReducer(model).register_comm_hook(None, default_hooks.allreduce_hook)
    model(torch.full((1, 3), complex(rank, 1), dtype=torch.complex64)).sum().abs().backward()
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    plain = copy.deepcopy(model)
    for r in range(world):
        plain(torch.full((1, 3), complex(r, 1), dtype=torch.complex64)).sum().abs().backward()
    for gradient, parameter in zip(ours, plain.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad / world)


@on("ranks")
def test_hooks_see_ddps_bucket(rank, world):
    seen = []

    def hook(state, bucket):
        assert state == "state"
        seen.append((bucket.index(), bucket.is_last(), [tuple(p.shape) for p in bucket.parameters()]))
        assert bucket.buffer().dim() == 1
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            assert gradient.shape == parameter.shape
            start = gradient.data_ptr() - bucket.buffer().data_ptr()
            assert 0 <= start <= bucket.buffer().nbytes - gradient.nbytes
        future = torch.futures.Future()
        future.set_result(torch.full_like(bucket.buffer(), 7.0))  # not the buffer itself
        return future

    model = mlp()
    reducer = GradientReducer(model, **SMALL)
    reducer.register_comm_hook("state", hook)
    for _ in range(2):
        seen.clear()
        loss_of(model, rank).backward()
        assert [index for index, _, _ in seen] == list(range(len(seen))) and len(seen) > 2
        assert [last for _, last, _ in seen] == [False] * (len(seen) - 1) + [True]
        assert all(p.grad.eq(7.0).all() for p in model.parameters())
    assert [shape for _, _, shapes in seen for shape in shapes] == [
        tuple(dict(model.named_parameters())[name].shape) for name in reducer.stats()["ready_order"]
    ]


@on("ranks")
def test_wrong_hooks_are_refused(rank, world):
    model = mlp()
    reducer = GradientReducer(model, group=dist.new_group())
    refused("hook must be callable, got a int", reducer.register_comm_hook, None, 3)
    reducer.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    refused("has a communication hook already", reducer.register_comm_hook, None, default_hooks.allreduce_hook)
    refused(r"returned a Tensor; it must return a torch\.futures\.Future", lambda: loss_of(model, rank).backward())
    with pytest.raises(InvalidUsage, match="a hook excludes bucket_mb='measured', algorithm= and reproducible=True"):
        GradientReducer(mlp(), bucket_mb="measured").register_comm_hook(None, default_hooks.allreduce_hook)


@on("ranks")
def test_a_hook_that_failed_once_is_called_again(rank, world):
    """On all ranks alike: the error is raised once, and the next backward and its window are as if nothing had been."""
    model = mlp()
    reducer = GradientReducer(model, **SMALL)
    merge = reducer.accumulate(2)
    fails = [True]

    def hook(state, bucket):
        if bucket.is_last() and fails:
            fails.clear()
            future = torch.futures.Future()
            future.set_exception(ArithmeticError("on purpose"))
            return future
        return default_hooks.allreduce_hook(state, bucket)

    reducer.register_comm_hook(None, hook)
    loss_of(model, rank, 0).backward()
    with pytest.raises(ArithmeticError, match="on purpose"):
        loss_of(model, rank, 1).backward()
    assert merge.seen == 0 and not merge.complete
    for steps in ((2, 3), (4, 5)):
        model.zero_grad()
        for step in steps:
            loss_of(model, rank, step).backward()
        assert merge.complete
        for parameter, gradient in zip(model.parameters(), expected_average(model, world, steps), strict=True):
            torch.testing.assert_close(parameter.grad, gradient / 2)


def compress_in_many_buckets(rank, world, by_ddp):
    """PowerSGD's collectives start where others complete: buckets beside each other must not mix them up on any rank.
    Under DDP on gloo this never ends: each bucket's callback waits, on one of gloo's two threads, for calls that need
    one."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 3))
    state = power_sgd_state()
    if by_ddp:
        trained = DistributedDataParallel(model, bucket_cap_mb=0.001)
        trained.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        trained = model
        reducer = GradientReducer(model, bucket_mb=0.001, first_bucket_mb=0.0002)
        reducer.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    first = loss_of(trained, rank).item()
    train(trained, rank, 12)
    assert state.iter > 2 and len(state.error_dict) > 1  # buckets that were compressed
    for value in model.state_dict().values():
        everyone = [torch.empty_like(value) for _ in range(world)]
        dist.all_gather(everyone, value)
        assert all(torch.equal(other, everyone[0]) for other in everyone)
    assert loss_of(trained, rank).item() < first


def test_power_sgd_in_many_buckets(ranks):
    ranks(compress_in_many_buckets, False)


@pytest.mark.parametrize("attempt", range(2))
@pytest.mark.parametrize("world", [2, 4])
def test_ddp_with_power_sgd_in_many_buckets(world, attempt, pool):
    """Again: who lets go of the group last, and on which thread, is a matter of luck."""
    pool.values(compress_in_many_buckets, world, True, join="dist:ringlet")
