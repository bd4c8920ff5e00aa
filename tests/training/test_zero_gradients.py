"""What `.grad` shows under Zero: torch's functions clip it, and what a program does to it is what the update takes."""

import contextlib
import copy
from unittest import mock

import pytest
import torch
from torch import nn

import ringlet
from ranks import on
from refusals import refused
from ringlet.training.zero.traffic import Pending
from zero_checks import (
    ROUNDING,
    STAGES,
    assert_same,
    at_each_stage,
    batch,
    loss_of,
    make,
    parameters_of,
    train_alone,
    train_zero,
    zero_of,
)

RATE = 0.5


def backward_alone(model, world, step=0, micro=1):
    """The gradients of the batches of all ranks and micro-batches."""
    numbers = range(micro * step, micro * step + micro)
    sum(loss_of(model, *batch(m, r)) / (world * micro) for r in range(world) for m in numbers).backward()


def backward_of(zero, rank, step=0, micro=1):
    for m in range(micro * step, micro * step + micro):
        assert m == micro * step or not zero.step()
        loss_of(zero.module, *batch(m, rank)).backward()


def after_a_backward(rank, world, **settings):
    """For each stage a Zero with SGD and a model alone, both with the gradients of a first backward."""
    for zero, alone in at_each_stage(make(), torch.optim.SGD, lr=RATE, **settings):
        backward_of(zero, rank)
        backward_alone(alone, world)
        yield zero, alone


def step_both(zero, alone, step=None):
    (step or zero.step)()
    torch.optim.SGD(alone.parameters(), lr=RATE).step()
    assert_same(alone, zero, **ROUNDING)


def clip_norm(parameters, order=2.0, foreach=None):
    return nn.utils.clip_grad_norm_(parameters, 0.05, norm_type=order, foreach=foreach)


@on("two")
@pytest.mark.parametrize("reproducible", [False, True])
def test_a_clipped_gradient_stays_clipped(rank, world, reproducible):
    """Also if another backward adds to it, as one of a second loss does."""
    for zero, alone in after_a_backward(rank, world, reproducible=reproducible):
        torch.testing.assert_close(zero.clip_grad_norm_(0.05), clip_norm(alone.parameters()), **ROUNDING)
        if not reproducible:  # whose windows are full
            backward_of(zero, rank, 5)
            backward_alone(alone, world, 5)
        step_both(zero, alone)


@on("two")
@pytest.mark.parametrize("reproducible", [False, True])
def test_a_norm_that_was_read_before_a_clip_is_not_that_after_it(rank, world, reproducible):
    """As by a program that logs norms, and clips by Zero, and once more."""
    for zero, alone in after_a_backward(rank, world, reproducible=reproducible):
        assert zero.module.positions.grad.norm() > 0
        for clip in (zero.clip_grad_norm_, lambda _, zero=zero: clip_norm(zero.module.parameters())):
            torch.testing.assert_close(clip(0.05), clip_norm(alone.parameters()), **ROUNDING)
            norms = [torch.linalg.vector_norm(module.positions.grad) for module in (zero.module, alone)]
            torch.testing.assert_close(*norms, **ROUNDING)
        step_both(zero, alone)


@on(4, "dist:gloo")
@pytest.mark.parametrize("foreach", [None, True])
def test_torch_clips_on_gloo(rank, world, foreach):
    """Random trainings clip, and change gradients otherwise, on ringlet."""
    for zero, alone in after_a_backward(rank, world):
        found, expected = (clip_norm(m.parameters(), foreach=foreach) for m in (zero.module, alone))
        torch.testing.assert_close(found, expected, **ROUNDING)
        step_both(zero, alone)


@on("two")
@pytest.mark.parametrize("foreach", [None, True])
def test_torch_clips_whole_gradients_beside_sharded_ones(rank, world, foreach):
    """The program may have put some into `.grad`."""
    for zero, alone in after_a_backward(rank, world):
        for module in (zero.module, alone):
            module.positions.grad = torch.ones(module.positions.shape, dtype=module.positions.dtype)
        for clip in (clip_norm, lambda parameters, foreach: nn.utils.clip_grad_value_(parameters, 1e-3, foreach)):
            found, expected = (clip(module.parameters(), foreach=foreach) for module in (zero.module, alone))
            torch.testing.assert_close(found, expected, **ROUNDING)
        if zero.options.stage < 3:  # a step by hand is refused before it changes anything
            parameters = [zero.module.positions, *zero.module.blocks.parameters()]
            before = [p.detach().clone() for p in parameters]
            with torch.no_grad(), pytest.raises(ringlet.InvalidUsage, match="each rank holds a part of it only"):
                torch._foreach_add_(parameters, [p.grad for p in parameters], alpha=-0.5)
            assert all(map(torch.equal, parameters, before))
        step_both(zero, alone)


@on("two")
def test_a_norm_of_bfloat16_is_that_of_the_sums(rank, world):
    for stage in STAGES:
        zero = zero_of(make(torch.float32), torch.optim.SGD, stage, dtype=torch.bfloat16, accumulate=2, lr=0.5)
        backward_of(zero, rank, micro=2)
        norm = nn.utils.clip_grad_norm_(zero.module.parameters(), float("inf"))
        torch.testing.assert_close(norm, zero.clip_grad_norm_(float("inf")), rtol=1e-6, atol=0)


@on("two")
def test_torch_clips_the_parameters_of_the_optimizer(rank, world):
    for zero, alone in after_a_backward(rank, world):
        for order in (1.0, 2.0, float("inf")):  # as Lightning clips
            found = clip_norm([p for group in zero.optimizer.param_groups for p in group["params"]], order)
            torch.testing.assert_close(found, clip_norm(alone.parameters(), order), **ROUNDING)
        nn.utils.clip_grad_value_(zero.optimizer.param_groups[0]["params"], 1e-4)
        nn.utils.clip_grad_value_(alone.parameters(), 1e-4)
        step_both(zero, alone, zero.optimizer.step)
        groups = zero_of(alone, stage=zero.options.stage, options_of=lambda name, p: {"lr": 0.1} if p.ndim < 2 else {})
        backward_of(groups, rank)
        refused(r"several groups.*zero\.clip_grad_norm", clip_norm, groups.optimizer.param_groups[0]["params"])


def scaled(model):
    for p in model.parameters():
        p.grad *= 0.5


def replaced_one(model):
    model.positions.grad = torch.arange(96, dtype=torch.float64).reshape(6, 16)


def dropped_one(model):
    model.positions.grad = None
    model.blocks[1].mix.weight.grad = None


@on("two")
def test_zero_grad_of_the_module_drops_what_no_step_has_taken(rank, world):
    for windows, alone in at_each_stage(make(), torch.optim.SGD, accumulate=2, lr=RATE):
        backward_of(windows, rank, 3)
        windows.module.zero_grad()
        refused(r"step\(\) without a backward", windows.step)
        # a loop that calls it after every step()
        for m, set_to_none in enumerate((True, False)):
            loss_of(windows.module, *batch(m, rank)).backward()
            windows.step()
            windows.module.zero_grad(set_to_none)
        backward_alone(alone, world, micro=2)
        torch.optim.SGD(alone.parameters(), lr=RATE).step()
        assert windows.steps == 1
        assert_same(alone, windows, **ROUNDING)


@on("two")
def test_changes_in_an_open_window_are_refused(rank, world):
    for stage in STAGES:
        for change in (
            lambda model: clip_norm(model.parameters()),
            scaled,
            lambda model: model.positions.grad.zero_(),
            dropped_one,
            replaced_one,
        ):
            zero = zero_of(make(), torch.optim.SGD, stage, accumulate=2, lr=0.5)
            backward_of(zero, rank)
            with pytest.raises(ringlet.InvalidUsage, match="after 1 of 2 micro-batches: it is not complete"):
                change(zero.module)
                zero.step()
            zero.zero_grad()
            train_zero(zero, rank, 1, micro=2)


@on("two")
def test_what_needs_the_whole_gradient_is_refused(rank, world):
    zero = zero_of(make(), stage=2, lr=1e-2)
    backward_of(zero, rank)
    grad = zero.module.positions.grad
    assert grad.shape == (6, 16) and "of the elements of [6, 16]" in repr(grad)
    for operation in (torch.clone, lambda g: g + 1, lambda g: g.abs(), lambda g: torch.linalg.norm(g, dim=0)):
        refused("each rank holds a part of it only", operation, grad)
    refused("which a Zero trains", lambda: torch.optim.SGD(zero.module.parameters(), lr=0.1).step())
    zero.step()


def halve(parameter):
    parameter.grad.mul_(0.5)


@on("two")
def test_hooks_that_scale_and_drop_gradients(rank, world):
    """Hooks scale one gradient and drop another, in every backward; a loss that does not come from the output."""
    settings = {"accumulate": 2, "lr": RATE, "bucket_elements": 1 << 20}
    for zero, alone in at_each_stage(make(layers=1), torch.optim.SGD, **settings):
        blocks = zero.module.blocks[0]
        blocks.mix.weight.register_post_accumulate_grad_hook(halve)
        blocks.out.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        train_zero(zero, rank, 1, micro=2)
        backward_alone(alone, world, micro=2)
        alone.blocks[0].mix.weight.grad *= 0.5
        alone.blocks[0].out.weight.grad = None
        torch.optim.SGD(alone.parameters(), lr=0.5).step()
        assert_same(alone, zero, **ROUNDING)


class Constant(nn.Module):
    """Whose gradient is 1."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40))

    def forward(self):
        return self.weight.sum()


@on("two")
@pytest.mark.parametrize("window", [512, 1])
def test_512_backwards_of_bfloat16_add_up_in_float32(rank, world, window):
    """In a window of as many micro-batches, or in one."""
    for stage in STAGES:
        zero = ringlet.Zero(
            nn.Sequential(Constant()), torch.optim.SGD, stage, dtype=torch.bfloat16, lr=1.0, accumulate=window,
            persistence_elements=0,
        )  # fmt: skip
        for m in range(512):
            zero.module[0]().backward()
            if m + 1 < window:
                zero.step()
        zero.step()
        (weight,) = parameters_of(zero).values()
        assert zero.steps == 1
        assert weight.unique().tolist() == [-512 / window], (stage, weight)


@on("two")
def test_sums_of_bfloat16_where_memory_forbids_float32(rank, world):
    bytes_of = {}
    for dtype in (None, torch.bfloat16):
        for stage in STAGES:
            zero = zero_of(make(), stage=stage, dtype=torch.bfloat16, accumulate=2, accumulate_dtype=dtype)
            train_zero(zero, rank, 1, micro=2)
            bytes_of[dtype, stage] = zero.stats()["memory"]["gradients"]
    assert bytes_of[None, 1] == 2 * bytes_of[torch.bfloat16, 1]
    refused("accumulate_dtype must be float32 or bfloat16", zero_of, make(), accumulate_dtype=torch.float16)


@on("two")
def test_hooks_on_the_optimizer_run_once_a_step(rank, world):
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    for stage in STAGES:
        calls = []
        zero = zero_of(make(), stage=stage, lr=1e-2, sub_group_elements=100)
        mine = zero.optimizer
        assert len(zero._sharded.sub_groups) > 2

        def call(name, mine=mine, calls=calls):
            return lambda optimizer, *_: calls.append(name) if optimizer is mine else calls.append("other")

        handles = [
            mine.register_step_pre_hook(call("before")), mine.register_step_post_hook(call("after")),
            register_optimizer_step_pre_hook(call("any before")), register_optimizer_step_post_hook(call("any after")),
        ]  # fmt: skip
        try:
            zero.state_dict()  # makes states, by steps of others
            for step in range(2):
                backward_of(zero, rank, step)
                (zero.step if step else zero.optimizer.step)()
        finally:
            for handle in handles:
                handle.remove()
        assert calls == ["any before", "before", "after", "any after"] * 2 or calls == [
            "before", "any before", "after", "any after"
        ] * 2, calls  # fmt: skip


@on("two")
def test_an_update_after_which_a_hook_raises_is_over(rank, world):
    """And an update that a hook before it refuses has not begun: its gradients are still there."""

    def refuse(*_):
        raise KeyError

    for zero, alone in at_each_stage(make(), torch.optim.SGD, lr=0.5, weight_decay=0.1, sub_group_elements=100):
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.5, weight_decay=0.1)
        for step, register in enumerate(
            (zero.optimizer.register_step_pre_hook, zero.optimizer.register_step_post_hook)
        ):
            handle = register(refuse)
            backward_of(zero, rank, step)
            with pytest.raises(KeyError):
                zero.step()
            handle.remove()
            if step == 0:
                assert zero.step()
            refused(r"step\(\) without a backward", zero.step)
            backward_alone(alone, world, step)
            optimizer.step()
            optimizer.zero_grad()
            assert_same(alone, zero, **ROUNDING)
        backward_of(zero, rank, 2)
        zero.step()
        backward_alone(alone, world, 2)
        optimizer.step()
        assert_same(alone, zero, **ROUNDING)


class RaisesLate(torch.optim.SGD):
    calls = 0

    def step(self, closure=None):
        type(self).calls += 1
        if self.calls == 3:
            raise KeyError
        super().step()


@on("two")
@pytest.mark.parametrize("cls", [torch.optim.SGD, RaisesLate])
def test_an_update_whose_gathers_raise_is_over(rank, world, cls):
    """All are waited for, as they write parameters. What the optimizer has raised comes first."""

    def late(self):
        wait(self)
        waited.append(self)
        raise ringlet.Timeout

    wait = Pending.wait
    for stage in STAGES:
        limits = {"persistence_elements": 1 << 20, "sub_group_elements": 700, "bucket_elements": 700}
        zero = zero_of(make(), cls, stage, lr=RATE, elementwise=True, **limits)
        backward_of(zero, rank)
        again = zero.module.head.weight.square().sum()
        first = ringlet.Timeout if cls is torch.optim.SGD else KeyError
        waited, RaisesLate.calls = [], 0
        with mock.patch.object(Pending, "wait", late), pytest.raises(first):
            zero.step()
        assert zero.steps == 1 and len(waited) > 1
        refused(r"step\(\) without a backward", zero.step)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            again.backward()


@on("two")
def test_hooks_after_an_update_find_its_parameters(rank, world):
    """As hooks that average weights do; and what is wrapped around `step` runs once."""
    alone = make()
    optimizer = torch.optim.SGD(alone.parameters(), lr=RATE)
    for stage in STAGES:
        zero = zero_of(make(), torch.optim.SGD, stage, lr=RATE)
        seen, saved, calls = [], [], []

        def after(*_, zero=zero, seen=seen, saved=saved):
            with zero.gathered():
                seen.append([p.detach().clone() for p in zero.module.parameters()])
            if zero.steps == 2:
                saved.append(zero.state_dict()["steps"])
                raise KeyError

        def wrapped(*args, zero=zero, inner=zero.optimizer.step, calls=calls):
            calls.append(zero.steps)
            return inner(*args)

        zero.optimizer.register_step_post_hook(after)
        zero.optimizer.step = wrapped
        alone.load_state_dict(make().state_dict())
        for step, call in enumerate([zero.step, wrapped]):
            backward_of(zero, rank, step)
            with pytest.raises(KeyError) if step == 1 else contextlib.nullcontext():
                call()
            train_alone(alone, world, 1, optimizer=optimizer, first=step)
            for ours, theirs in zip(seen[step], alone.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs.detach(), **ROUNDING)
        assert saved == [2] and calls == [0, 1]
        refused(r"step\(\) without a backward", zero.step)


@on("two")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_written_into_the_optimizers_own_tensors(rank, world, dtype):
    """Counts in an update. After it, the module's parameters would not follow."""

    def halve(zero):
        with torch.no_grad():
            for group in zero.optimizer.param_groups:
                torch._foreach_mul_(group["params"], 0.5)

    for stage in STAGES:
        zero = zero_of(
            make(torch.float32 if dtype.itemsize < 4 else dtype), stage=stage, dtype=dtype, lr=0.0, weight_decay=0.0
        )
        before = parameters_of(zero)
        backward_of(zero, rank)
        halve(zero)
        zero.step()
        for name, value in parameters_of(zero).items():
            torch.testing.assert_close(value, before[name] / 2)
        halve(zero)
        refused("the parameters of zero.optimizer.* were written after a step", backward_of, zero, rank)


@on("two")
def test_a_hook_on_the_optimizer_clips(rank, world):
    model = make()
    zero, alone = zero_of(model, torch.optim.SGD, 2, lr=0.5), copy.deepcopy(model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
    for one, module in ((zero.optimizer, zero.module), (optimizer, alone)):
        one.register_step_pre_hook(lambda *_, module=module: clip_norm(module.parameters()) and None)
    backward_of(zero, rank)
    backward_alone(alone, world)
    zero.step()
    optimizer.step()
    assert_same(alone, zero, **ROUNDING)


@on("two")
def test_a_backward_for_some_parameters_only(rank, world):
    for zero, alone in at_each_stage(make(), torch.optim.SGD, lr=0.1):
        names = ["blocks.1.out.weight", "blocks.2.out.weight"]
        for r in range(world):
            (loss_of(alone, *batch(0, r)) / world).backward(inputs=[alone.get_parameter(name) for name in names])
        torch.optim.SGD(alone.parameters(), lr=0.1).step()
        some = [zero.module.get_parameter(name) for name in names]
        loss = loss_of(zero.module, *batch(0, rank))
        if zero.options.stage == 3:
            refused(r"backward on parameter blocks.1.out.weight, .*out inputs=", loss.backward, inputs=some)
        else:
            loss.backward(inputs=some)
            zero.step()
            assert_same(alone, zero, **ROUNDING)
