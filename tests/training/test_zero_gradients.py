"""What `.grad` shows under Zero: torch's functions clip it, and what a program does to it is what the update takes."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ringlet
from ranks import on
from zero_checks import (
    ROUNDING,
    STAGES,
    assert_same,
    batch,
    loss_of,
    make,
    parameters_of,
    train_alone,
    train_zero,
    zero_of,
)


def backward_alone(model, world, step=0, micro=1):
    """The gradients of the batches of all ranks and micro-batches."""
    numbers = range(micro * step, micro * step + micro)
    sum(loss_of(model, *batch(m, r)) / (world * micro) for r in range(world) for m in numbers).backward()


def backward_of(zero, rank, step=0, micro=1):
    for m in range(micro * step, micro * step + micro):
        assert m == micro * step or not zero.step()
        loss_of(zero.module, *batch(m, rank)).backward()


def clip_norm(parameters, order=2.0, foreach=None):
    return nn.utils.clip_grad_norm_(parameters, 0.05, norm_type=order, foreach=foreach)


def by_hand(model):
    whole = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for p in model.parameters():
        p.grad.mul_(0.1 / whole)
    return whole


CLIPS = {
    "norm": lambda model: clip_norm(model.parameters()),
    "foreach": lambda model: clip_norm(model.parameters(), foreach=True),
    "norm of order 1": lambda model: clip_norm(model.parameters(), 1.0),
    "largest element": lambda model: clip_norm(model.parameters(), float("inf")),
    "each parameter": lambda model: sum(clip_norm(p) for p in model.parameters()),
    "some": lambda model: clip_norm(model.blocks.parameters()),
    "again": lambda model: [clip_norm(model.parameters()), clip_norm(model.blocks.parameters(), 1.0)][1],
    "value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.001),
    "value, foreach": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.001, foreach=True),
    "by hand": lambda model: by_hand(model),
    "data": lambda model: [p.grad.data.mul_(0.1).norm(2) for p in model.parameters()].pop(),
}


def clipped_by_torch(rank, world, kind):
    for stage in STAGES:
        for micro in (1, 2):
            alone = make()
            zero = zero_of(alone, torch.optim.SGD, stage, accumulate=micro, lr=0.5)
            optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
            for step in range(2):
                backward_of(zero, rank, step, micro)
                backward_alone(alone, world, step, micro)
                found, expected = CLIPS[kind](zero.module), CLIPS[kind](alone)
                if expected is not None:
                    torch.testing.assert_close(found, expected, **ROUNDING)
                assert zero.step()
                optimizer.step()
                optimizer.zero_grad()
            assert_same(alone, zero, **ROUNDING)


@pytest.mark.parametrize("kind", CLIPS)
def test_torch_clips_as_in_one_process(two, kind):
    two(clipped_by_torch, kind)


@on("two")
@pytest.mark.parametrize("reproducible", [False, True])
def test_a_clipped_gradient_stays_clipped(rank, world, reproducible):
    """Also if another backward adds to it, as one of a second loss does."""
    for stage in STAGES:
        alone = make()
        zero = zero_of(alone, torch.optim.SGD, stage, lr=0.5, reproducible=reproducible)
        backward_of(zero, rank)
        backward_alone(alone, world)
        torch.testing.assert_close(zero.clip_grad_norm_(0.05), clip_norm(alone.parameters()), **ROUNDING)
        if not reproducible:  # whose windows are full
            backward_of(zero, rank, 5)
            backward_alone(alone, world, 5)
        assert zero.step()
        torch.optim.SGD(alone.parameters(), lr=0.5).step()
        assert_same(alone, zero, **ROUNDING)


@on(4, "dist:ringlet", "dist:gloo")
def test_torch_clips_on_four_ranks(rank, world):
    clipped_by_torch(rank, world, "norm")


@on("two")
def test_torch_clips_bfloat16_with_masters(rank, world):
    model = make(torch.float32)
    for stage in STAGES:
        zeros = [
            zero_of(model, torch.optim.SGD, stage, dtype=torch.bfloat16, accumulate=2, lr=0.5, **settings)
            for settings in ({}, {"max_norm": 0.05})
        ]
        for zero in zeros:
            backward_of(zero, rank, micro=2)
        norm = nn.utils.clip_grad_norm_(zeros[0].module.parameters(), 0.05)
        torch.testing.assert_close(norm, zeros[1].clip_grad_norm_(float("inf")), rtol=1e-6, atol=0)
        for zero in zeros:
            zero.step()
        assert_same(zeros[1].module if stage < 3 else _whole(zeros[1]), zeros[0], rtol=2**-8, atol=2**-12)


def _whole(zero):
    model = make(torch.bfloat16)
    with torch.no_grad():
        for name, value in parameters_of(zero).items():
            model.get_parameter(name).copy_(value)
    return model


@on("two")
def test_torch_clips_the_parameters_of_the_optimizer(rank, world):
    for stage in STAGES:
        alone = make()
        zero = zero_of(alone, torch.optim.SGD, stage, lr=0.5)
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
        backward_of(zero, rank)
        backward_alone(alone, world)
        for order in (1.0, 2.0, float("inf")):  # as Lightning clips
            found = clip_norm([p for group in zero.optimizer.param_groups for p in group["params"]], order)
            torch.testing.assert_close(found, clip_norm(alone.parameters(), order), **ROUNDING)
        nn.utils.clip_grad_value_(zero.optimizer.param_groups[0]["params"], 1e-4)
        nn.utils.clip_grad_value_(alone.parameters(), 1e-4)
        zero.optimizer.step()
        optimizer.step()
        assert_same(alone, zero, **ROUNDING)
        groups = zero_of(alone, stage=stage, options_of=lambda name, p: {"lr": 0.1} if p.ndim < 2 else {})
        backward_of(groups, rank)
        with pytest.raises(ringlet.InvalidUsage, match=r"several groups.*zero\.clip_grad_norm"):
            clip_norm(groups.optimizer.param_groups[0]["params"])


def scaled(model):
    for p in model.parameters():
        p.grad *= 0.5


def replaced_one(model):
    model.positions.grad = torch.arange(96, dtype=torch.float64).reshape(6, 16)


def dropped_one(model):
    model.positions.grad = None
    model.blocks[1].mix.weight.grad = None


def zeroed_one(model):
    model.blocks[1].mix.weight.grad.zero_()


def added(model):
    for p in model.parameters():
        p.grad.add_(torch.linspace(0, 1, p.numel(), dtype=p.dtype).reshape(p.shape), alpha=0.5)


CHANGES = [scaled, replaced_one, dropped_one, zeroed_one, added]


@on("two")
@pytest.mark.parametrize("change", range(len(CHANGES)), ids=[change.__name__ for change in CHANGES])
def test_what_a_program_does_to_grad_is_taken(rank, world, change):
    change = CHANGES[change]
    for stage in STAGES:
        for micro in (1, 2):
            alone = make()
            zero = zero_of(alone, torch.optim.SGD, stage, accumulate=micro, lr=0.5)
            optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
            for step in range(2):
                backward_of(zero, rank, step, micro)
                backward_alone(alone, world, step, micro)
                change(zero.module)
                change(alone)
                if micro == 1 and step == 1:  # to which another backward adds
                    backward_of(zero, rank, 5)
                    backward_alone(alone, world, 5)
                assert zero.step()
                optimizer.step()
                optimizer.zero_grad()
            assert_same(alone, zero, **ROUNDING)


@on("two")
def test_zero_grad_of_the_module_drops_the_window_as_that_of_the_optimizer(rank, world):
    for stage in STAGES:
        model = make()
        zero = zero_of(model, torch.optim.SGD, stage, lr=0.5)
        backward_of(zero, rank, 3)
        zero.module.zero_grad()
        with pytest.raises(ringlet.InvalidUsage, match=r"step\(\) without a backward"):
            zero.step()
        backward_of(zero, rank, 3)
        zero.module.zero_grad()
        backward_of(zero, rank, 0)
        assert zero.step()
        backward_alone(model, world)
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        assert_same(model, zero, **ROUNDING)
        # a loop that calls it after every step()
        windows, alone = zero_of(model, torch.optim.SGD, stage, accumulate=2, lr=0.5), copy.deepcopy(model)
        for m, set_to_none in enumerate((True, False)):
            loss_of(windows.module, *batch(m, rank)).backward()
            windows.step()
            windows.module.zero_grad(set_to_none)
        alone.zero_grad()
        backward_alone(alone, world, micro=2)
        torch.optim.SGD(alone.parameters(), lr=0.5).step()
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
        with pytest.raises(ringlet.InvalidUsage, match="each rank holds a part of it only"):
            operation(grad)
    with pytest.raises(ringlet.InvalidUsage, match="which a Zero trains"):
        torch.optim.SGD(zero.module.parameters(), lr=0.1).step()
    zero.step()


def halve(parameter):
    parameter.grad.mul_(0.5)


@on("two")
def test_hooks_that_scale_and_drop_gradients(rank, world):
    """Hooks scale one gradient and drop another, in every backward; a loss that does not come from the output."""
    for stage in STAGES:
        alone = make(layers=1)
        zero = zero_of(alone, torch.optim.SGD, stage, accumulate=2, lr=0.5, bucket_elements=1 << 20)
        blocks = zero.module.blocks[0]
        blocks.mix.weight.register_post_accumulate_grad_hook(halve)
        blocks.out.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        train_zero(zero, rank, 1, micro=2)
        backward_alone(alone, world, micro=2)
        alone.blocks[0].mix.weight.grad *= 0.5
        alone.blocks[0].out.weight.grad = None
        torch.optim.SGD(alone.parameters(), lr=0.5).step()
        assert_same(alone, zero, **ROUNDING)


class Hidden(nn.Module):
    """Its output has no tensors that anybody can find."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        class Output:
            value = self.second(torch.tanh(self.first(x)))

        return Output()


@on("two")
def test_a_backward_that_begins_with_a_parameter_adds_to_what_is_shown(rank, world):
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for stage in STAGES:
        for micro in (1, 2):  # backwards of one micro-batch, and micro-batches
            alone = Hidden().double()
            for p in alone.parameters():
                dist.broadcast(p.data, 0)
            zero = zero_of(alone, torch.optim.SGD, stage, accumulate=micro, lr=0.5)
            for number in range(2):
                zero.module(x + number).value.square().sum().backward()
                if micro == 2:
                    zero.step()
                alone(x + number).value.square().sum().div(micro).backward()
            if micro == 1:
                zero.step()
            torch.optim.SGD(alone.parameters(), lr=0.5).step()
            assert zero.steps == 1
            assert_same(alone, zero, **ROUNDING)


class Constant(nn.Module):
    """Whose gradient is 1."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40))

    def forward(self):
        return self.weight.sum()


def long_window(rank, world, window, micro):
    for stage in STAGES:
        zero = ringlet.Zero(
            nn.Sequential(Constant()), torch.optim.SGD, stage, dtype=torch.bfloat16, lr=1.0, accumulate=window,
            persistence_elements=0,
        )  # fmt: skip
        for m in range(micro):
            zero.module[0]().backward()
            if m + 1 < window:
                zero.step()
        zero.step()
        (weight,) = parameters_of(zero).values()
        assert zero.steps == 1
        assert weight.unique().tolist() == [-micro / window], (stage, weight)


def test_a_long_window_of_bfloat16_adds_up_in_float32(two):
    two(long_window, 512, 512)


def test_many_backwards_of_bfloat16_add_up_in_float32(two):
    two(long_window, 1, 512)


@on("two")
def test_sums_of_bfloat16_where_memory_forbids_float32(rank, world):
    bytes_of = {}
    for dtype in (None, torch.bfloat16):
        for stage in STAGES:
            zero = zero_of(make(), stage=stage, dtype=torch.bfloat16, accumulate=2, accumulate_dtype=dtype)
            train_zero(zero, rank, 1, micro=2)
            bytes_of[dtype, stage] = zero.stats()["memory"]["gradients"]
    assert bytes_of[None, 1] == 2 * bytes_of[torch.bfloat16, 1]
    with pytest.raises(ringlet.InvalidUsage, match="accumulate_dtype must be float32 or bfloat16"):
        zero_of(make(), accumulate_dtype=torch.float16)


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

    for stage in STAGES:
        alone = make()
        zero = zero_of(alone, torch.optim.SGD, stage, lr=0.5, weight_decay=0.1, sub_group_elements=100)
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
            with pytest.raises(ringlet.InvalidUsage, match=r"step\(\) without a backward"):
                zero.step()
            backward_alone(alone, world, step)
            optimizer.step()
            optimizer.zero_grad()
            assert_same(alone, zero, **ROUNDING)
        backward_of(zero, rank, 2)
        zero.step()
        backward_alone(alone, world, 2)
        optimizer.step()
        assert_same(alone, zero, **ROUNDING)


class CountsInItsGroup(torch.optim.SGD):
    """The rate falls with the steps, which its group counts, as in fused optimizers of others."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / group["step"])


@on("two")
def test_an_update_in_sub_groups_is_one_step(rank, world):
    model = make()
    for stage in STAGES:
        zero = zero_of(model, CountsInItsGroup, stage, lr=0.5, elementwise=True, sub_group_elements=100)
        alone = copy.deepcopy(model)
        train_zero(zero, rank, 3)
        train_alone(alone, world, 3, CountsInItsGroup, lr=0.5)
        assert_same(alone, zero, **ROUNDING)
        assert [group["step"] for group in zero.optimizer.param_groups] == [3]


@on("two")
def test_a_hook_on_the_optimizer_clips(rank, world):
    model = make()
    zero, alone = zero_of(model, torch.optim.SGD, 2, lr=0.5), copy.deepcopy(model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
    for one, module in ((zero.optimizer, zero.module), (optimizer, alone)):
        one.register_step_pre_hook(lambda *_, module=module: CLIPS["norm"](module) and None)
    backward_of(zero, rank)
    backward_alone(alone, world)
    zero.step()
    optimizer.step()
    assert_same(alone, zero, **ROUNDING)


@on("two")
def test_a_backward_for_some_parameters_only(rank, world):
    for stage in (1, 2, 3):
        zero, alone = (make() for _ in range(2))
        zero = zero_of(zero, torch.optim.SGD, stage, lr=0.1)
        names = ["blocks.1.out.weight", "blocks.2.out.weight"]
        for r in range(world):
            (loss_of(alone, *batch(0, r)) / world).backward(inputs=[alone.get_parameter(name) for name in names])
        torch.optim.SGD(alone.parameters(), lr=0.1).step()
        some = [zero.module.get_parameter(name) for name in names]
        loss = loss_of(zero.module, *batch(0, rank))
        if stage == 3:
            with pytest.raises(ringlet.InvalidUsage, match=r"backward on parameter blocks.1.out.weight, .*out inputs="):
                loss.backward(inputs=some)
        else:
            loss.backward(inputs=some)
            zero.step()
            assert_same(alone, zero, rtol=1e-9, atol=1e-10)
