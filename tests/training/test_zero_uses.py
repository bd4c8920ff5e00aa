"""Operations and modules that use parameters in their own ways: what stage 3 must not corrupt in silence."""

import copy
import functools
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ringlet
from ranks import on
from zero_checks import (
    ROUNDING,
    STAGES,
    assert_same,
    assert_trains_alike,
    at_each_stage,
    batch,
    loss_of,
    make,
    parameters_of,
    zero_of,
)


class Angle(nn.Module):
    """Saves a frozen parameter, and behind it what a checkpoint computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.randn(10, 12))
        self.frozen = nn.Parameter(torch.randn(10, 12), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.atan2(x + self.trained, self.frozen)


@on("two")
def test_what_a_checkpoint_computes_again_leaves_a_frozen_parameter_alone(rank, world):
    torch.manual_seed(4)
    model = nn.Sequential(*(nn.Sequential(Angle(), Angle()) for _ in range(3))).double()
    for pair in model:
        pair.forward = functools.partial(checkpoint, pair.forward, use_reentrant=False)
    inputs = torch.randn(4, 10, 12, dtype=torch.float64)
    zero = zero_of(model, torch.optim.SGD, 3, lr=0.1, bucket_elements=130)
    assert_trains_alike(model, zero, inputs, **ROUNDING)


class Rotation(nn.Module):
    """Saves views of a parameter that have another dtype, are conjugate, negative."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.angles = kind, nn.Parameter(torch.randn(10, 12, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        by = torch.view_as_complex(self.angles)
        if self.kind == "conjugate":
            by = by.conj()
        turned = torch.view_as_complex(x) * by
        if self.kind == "negative":
            turned = turned * by.conj().imag
        return torch.view_as_real(turned).tanh()


@on("two")
def test_operations_that_save_a_parameter_as_something_else(rank, world):
    torch.manual_seed(4)
    inputs = torch.randn(3, 10, 12, 2, dtype=torch.float64)
    for kind, checkpointed in itertools.product(("complex", "conjugate", "negative"), (False, True)):
        model = nn.Sequential(*(Rotation(kind) for _ in range(3))).double()
        if checkpointed:
            model.forward = functools.partial(checkpoint, model.forward, use_reentrant=False)
        zero = zero_of(model, torch.optim.SGD, 3, lr=0.1, bucket_elements=250)
        assert_trains_alike(model, zero, inputs, **ROUNDING)


class KeepsViews(torch.autograd.Function):
    """A product that keeps a view of the weight beside what autograd saves."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight.t()
        return x @ ctx.weight

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient @ ctx.weight.t(), gradient.t() @ x


class KeepingLinear(nn.Linear):
    def forward(self, x):
        return KeepsViews.apply(x, self.weight) + self.bias


class Caching(nn.Linear):
    def forward(self, x):
        if not hasattr(self, "cache"):
            self.cache = self.weight.detach().t()
        return x @ self.cache + super().forward(x)


@on("two")
def test_views_of_a_parameter_that_are_kept(rank, world):
    torch.manual_seed(2)
    model = nn.Sequential(*(KeepingLinear(40, 40) for _ in range(6))).double()
    zero = zero_of(model, torch.optim.SGD, 3, lr=0.1)
    inputs = torch.randn(4, 3, 40, dtype=torch.float64)
    assert_trains_alike(model, zero, inputs, **ROUNDING)
    caching = nn.Sequential(*(Caching(40, 40) for _ in range(3))).double()
    zero = zero_of(caching, torch.optim.SGD, 3, lr=0.1)
    zero.module(inputs[0]).square().sum().backward()
    with pytest.raises(ringlet.InvalidUsage, match=r"a view of a parameter .*[0-2]\.weight.* is still held.*clone\(\)"):
        zero.step()
    for module in zero.module:
        module.cache = module.cache.clone()
    assert zero.step()


@on("two")
def test_transforms_of_torch_func(rank, world):
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)).double()
    x = torch.randn(3, 40, dtype=torch.float64)
    expected = torch.func.grad(lambda x: model(x).square().sum())(x)
    for stage in STAGES:
        zero = zero_of(model, torch.optim.SGD, stage, lr=0.1)
        used = zero.module
        if stage == 3:
            for transform in (torch.func.vmap(used), torch.func.grad(lambda x: used(x).sum())):  # noqa: B023
                with pytest.raises(ringlet.InvalidUsage, match=r"in a transform of torch.func .* copy.deepcopy"):
                    transform(x)
            with zero.gathered():
                used = copy.deepcopy(zero.module)
        torch.testing.assert_close(torch.func.grad(lambda x: used(x).square().sum())(x), expected)  # noqa: B023
        assert_trains_alike(copy.deepcopy(model), zero, [x], **ROUNDING)


class Expanded(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("shift", torch.full((2, 1, 1), value).expand(2, 3, 8))

    def forward(self, x):
        return self.linear(x) + self.shift


@on("two")
def test_expanded_buffers(rank, world):
    for stage in STAGES:
        zero = ringlet.Zero(Expanded(float(rank)), torch.optim.SGD, stage, lr=0.1)
        assert torch.equal(zero.module.shift, torch.zeros(2, 3, 8))
        zero.module(torch.ones(3, 8)).sum().backward()
        assert zero.step()


@on("two")
def test_a_checkpoint_inside_a_forward_is_refused(rank, world):
    model = nn.Sequential(Angle(), Angle())
    for angle in model:
        angle.forward = functools.partial(checkpoint, angle.forward, use_reentrant=False)
    zero = zero_of(model, torch.optim.SGD, 3, lr=0.1, bucket_elements=130)
    with pytest.raises(ringlet.InvalidUsage, match=r"trained, whose values are in shards.*put it around whole modules"):
        zero.module(torch.randn(10, 12)).sum().backward()


class Kinds(nn.Module):
    """Modules of torch that read parameters in their own ways."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Sequential(nn.Conv1d(8, 16, 3, padding=1), nn.BatchNorm1d(16), nn.ReLU())
        self.recur = nn.LSTM(16, 16, batch_first=True)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encode = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.convolve(x).transpose(1, 2)
        x = self.encode(self.recur(x)[0])
        return self.attend(x, x, x)[0]


@on("two")
def test_kinds_of_modules(rank, world):
    torch.manual_seed(2)
    model = Kinds().double()
    x = torch.randn(6, 8, 5, dtype=torch.float64)  # the same on both ranks: batch norms agree
    for zero, alone in at_each_stage(model, lr=1e-2, bucket_elements=1200, persistence_elements=0):
        optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
        for _ in range(3):
            zero.module(x).square().mean().backward()
            zero.step()
            optimizer.zero_grad()
            alone(x).square().mean().backward()
            optimizer.step()
        assert_same(alone, zero, **ROUNDING)
        zero.module.eval()
        alone.eval()
        with torch.no_grad():
            torch.testing.assert_close(zero.module(x), alone(x), **ROUNDING)


@on("two")
def test_a_backward_after_the_update_is_refused(rank, world):
    for stage in STAGES:
        zero = zero_of(make(), stage=stage, lr=1e-2)
        old = loss_of(zero.module, *batch(0, rank))
        loss_of(zero.module, *batch(1, rank)).backward(retain_graph=True)
        zero.step()
        reason = r"after step\(\) has updated" if stage == 3 else "modified by an inplace operation"
        with pytest.raises(RuntimeError, match=reason):
            old.backward()


@on("two")
def test_two_models_of_one_loss(rank, world):
    """As a generator and a discriminator: each in the other's backward."""
    torch.manual_seed(3)
    first = nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 6)).double()
    second = nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 1)).double()
    batches = [torch.randn(4, 6, dtype=torch.float64) for _ in range(world)]
    for stage in STAGES:
        pair = [zero_of(m, torch.optim.SGD, stage, lr=0.1, bucket_elements=200) for m in (first, second)]
        alone = [copy.deepcopy(m) for m in (first, second)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in alone]
        for _ in range(3):
            pair[1].module(pair[0].module(batches[rank])).mean().backward()
            alone[1](alone[0](torch.cat(batches))).mean().backward()
            for one in (*pair, *optimizers):
                one.step()
            for one in optimizers:
                one.zero_grad()
        for model, zero in zip(alone, pair, strict=True):
            assert_same(model, zero, **ROUNDING)


class Table(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Parameter((torch.arange(300) % 3).to(dtype), requires_grad=False)
        self.linear = nn.Linear(10, 10, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.table[:10]


@on("two")
def test_frozen_parameters_of_whole_numbers(rank, world):
    for dtype in (torch.int64, torch.int8, torch.uint8, torch.bool, torch.float16):
        model = Table(dtype)
        zero, x = zero_of(model, stage=3, lr=1e-2), torch.ones(2, 10, dtype=torch.float64)
        assert torch.equal(zero.module(x), model(x))
        zero.module(x).sum().backward()
        zero.step()
        assert torch.equal(parameters_of(zero)["table"], model.table)
        with pytest.raises(ringlet.InvalidUsage, match="table"):
            zero.module.table.sum()


@on("two")
@pytest.mark.parametrize("drops", [True, False])
def test_a_backward_that_raised_without_the_root(rank, world, drops):
    """Modules inside, called by themselves: the next gradient is what tells."""
    model = make(tied=False)
    x = torch.ones(2, 6, 16, dtype=torch.float64)

    def fail(_gradient):
        raise ValueError("of backward")

    for zero, alone in at_each_stage(model, torch.optim.SGD, lr=0.1):
        hook = zero.module.blocks[2].mix.weight.register_hook(fail)
        with pytest.raises(ValueError, match="of backward"):
            zero.module.blocks[2](x).square().sum().backward()
        hook.remove()
        if drops:
            zero.zero_grad()
        zero.module.blocks[2](x).square().sum().backward()
        assert zero.step()
        alone.blocks[2](x).square().sum().backward()
        torch.optim.SGD(alone.parameters(), lr=0.1).step()
        assert_same(alone, zero, **ROUNDING)
