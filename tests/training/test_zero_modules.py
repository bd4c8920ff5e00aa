"""What modules do that ZeRO must survive: checkpointed activations, shared, frozen and unused parameters, errors."""

import copy
import functools
import itertools
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ringlet
from ranks import on
from refusals import refused, stopped_at
from zero_checks import (
    ROUNDING,
    STAGES,
    WIDTH,
    assert_same,
    assert_trains_alike,
    at_each_stage,
    batch,
    loss_of,
    make,
    parameters_of,
    train_alone,
    train_zero,
    zero_of,
)


@on("two")
def test_hooks_of_others_on_saved_tensors_see_activations(rank, world):
    """A checkpoint without reentrance keeps nothing of the activations inside, at stage 3 as elsewhere."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
    zero = ringlet.Zero(block, torch.optim.SGD, 3, lr=0.1, persistence_elements=0)
    kept = []

    def pack(tensor):
        kept.append(tensor.shape)
        return tensor

    x = torch.randn(4, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        checkpoint(block, x, use_reentrant=False).sum().backward()
    assert torch.Size([4, 64]) not in kept
    del kept[:]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        block(x).sum().backward()
    assert torch.Size([4, 64]) in kept and torch.Size([64, 8]) not in kept  # activations are theirs, parameters ours
    zero.step()


class Selective(nn.Module):
    def __init__(self, inner: nn.Module, seen: set) -> None:
        super().__init__()
        self.inner, self.seen = inner, seen

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        def policy(_context, op, *_arguments, **_options):
            self.seen.add(str(op))
            return CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

        x = self.inner.embedding(tokens)
        for block in self.inner.blocks:
            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return self.inner.head(x)


@on("two")
def test_selective_checkpoints(rank, world):
    model = make(tied=False)
    model.positions = None
    zero = zero_of(Selective(model, set()), torch.optim.SGD, 3, lr=0.1)
    train_zero(zero, rank, 2)
    ops = zero.module.seen
    assert ops and not any("c10d" in op or "gather" in op for op in ops), ops
    alone = Selective(model, set())
    train_alone(alone, world, 2, torch.optim.SGD, lr=0.1)
    assert_same(alone, zero, **ROUNDING)


@on("two")
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_ranks_that_run_different_modules(rank, world, transport):
    """Gathers of equal size: only their labels tell the modules apart."""
    for width in (6, 600):  # so that ranks compare before the data and with it
        torch.manual_seed(1)
        model = nn.ModuleDict({"a": nn.Linear(width, 30), "b": nn.Linear(width, 30)})
        group = dist.new_group(timeout=timedelta(seconds=30), pg_options=ringlet.BackendOptions(transport=transport))
        zero = ringlet.Zero(model, torch.optim.SGD, 3, group=group, lr=0.1, persistence_elements=0)
        with pytest.raises(ringlet.InvalidUsage) as told:
            zero.module["ab"[rank]](torch.ones(4, width)).sum()
        assert re.search(r"rank 0 is in all_gather .*, unit 0 of Zero 0 \(a.weight, a.bias\)\)", str(told.value)), told
        assert re.search(r"rank 1 is in all_gather .*, unit 1 of Zero 0 \(b.weight, b.bias\)\)", str(told.value)), told


@on("two")
def test_a_parameter_in_shards_says_so(rank, world):
    model = make()
    zero = zero_of(model, stage=3, lr=1e-2)
    weight = zero.module.blocks[0].mix.weight
    assert weight.shape == (48, 16) and weight.dtype is torch.float64 and weight.numel() == 768
    assert isinstance(weight, nn.Parameter) and weight in set(zero.module.parameters()) and weight.grad is None
    assert "blocks.0.mix.weight" in repr(weight)
    for use in (
        lambda: nn.functional.linear(torch.zeros(1, 16, dtype=torch.float64), weight),
        lambda: weight.sum(),
        lambda: weight.data,
        lambda: torch.cat([torch.zeros(1, 16), weight]),
        lambda: zero.module.state_dict(),
        lambda: copy.deepcopy(zero.module),
        lambda: zero.module.float(),
    ):
        refused(r"in shards: stage 3 gathers a parameter only during", use)
    with zero.gathered():
        assert torch.equal(weight, model.blocks[0].mix.weight)
        saved = zero.module.state_dict()
        assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
    train_zero(zero, rank, 1)
    refused(r"blocks\.0\.mix\.weight", weight.sum)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(20, 20))

    def forward(self) -> torch.Tensor:
        return self.weight.t()


@on("two")
def test_a_module_that_returns_its_parameter(rank, world):
    bare = Bare()
    ringlet.Zero(bare, torch.optim.SGD, 3, lr=0.1, persistence_elements=0)
    refused(r"Bare returns a view of its own parameter .*weight.*return a copy", bare)


@on("two")
def test_an_interrupted_forward_leaves_nothing_behind(rank, world):
    def interrupt(_module, _inputs, _output):
        raise KeyboardInterrupt

    def as_it_is(tensor):
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks
    inputs, _ = batch(0, rank)
    x = torch.ones(1, WIDTH, dtype=torch.float64)
    for place, checkpointed in (("blocks.1.norm", False), ("blocks.1.out", True), ("head", False)):
        model = make(tied=False)
        zero = zero_of(model, stage=3, lr=1e-2)
        block = zero.module.blocks[1]
        train_zero(zero, rank, 1)
        model.load_state_dict(parameters_of(zero), strict=False)
        hook = zero.module.get_submodule(place).register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt), hooks(as_it_is, as_it_is), hooks(as_it_is, as_it_is):
            if checkpointed:
                checkpoint(block, x, use_reentrant=False)
            zero.module(inputs)
        hook.remove()
        with hooks(as_it_is, as_it_is):
            assert torch.equal(zero.module(inputs), model(inputs))
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        hook = zero.module.get_submodule(place).register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            zero.module(inputs)
        hook.remove()
        train_zero(zero, rank, 1)
        model.load_state_dict(parameters_of(zero), strict=False)
        assert torch.equal(block(x), model.blocks[1](x))


@on("two")
def test_autograd_grad_reduces_nothing(rank, world):
    model = make()
    for stage in STAGES:
        zero = zero_of(model, stage=stage, lr=1e-2)
        embedded = zero.module.embedding(batch(0, rank)[0])
        out = zero.module.blocks[0](embedded)
        (gradient,) = torch.autograd.grad(out.sum(), embedded)
        there = model.embedding(batch(0, rank)[0])
        (expected,) = torch.autograd.grad(model.blocks[0](there).sum(), there)
        assert torch.equal(gradient, expected)
        refused("without a backward", zero.step)
        full = zero_of(model, stage=stage, accumulate=2, lr=1e-2)
        for micro in range(2):
            loss_of(full.module, *batch(micro, rank)).backward()
        logits = full.module(batch(2, rank)[0])
        torch.autograd.grad(logits.square().sum(), logits)  # no third backward of the window
        assert full.step()


@on("two")
def test_a_backward_that_raised_before_it_sent_leaves_nothing_behind(rank, world):
    """By a hook that raises before any unit is full; tried again with and without another forward."""
    model = make()
    for tries in (1, 2):
        for zero, alone in at_each_stage(model, lr=1e-2):
            for step in range(2):
                loss = loss_of(zero.module, *batch(step, rank))
                for _ in range(tries):
                    with stopped_at(zero.module.blocks[2].mix.weight):
                        loss.backward(retain_graph=True)
                (loss if tries == 2 else loss_of(zero.module, *batch(step, rank))).backward()
                assert zero.step()
            train_alone(alone, world, 2, lr=1e-2)
            assert_same(alone, zero, **ROUNDING)


@on("two")
@pytest.mark.parametrize("drops", [True, False])
def test_a_backward_that_raised_in_a_window(rank, world, drops):
    for zero, alone in at_each_stage(make(), accumulate=3, lr=1e-2):
        stage = zero.options.stage
        loss_of(zero.module, *batch(0, rank)).backward()
        zero.step()
        with stopped_at(zero.module.blocks[2].mix.weight):
            loss = loss_of(zero.module, *batch(1, rank))
            loss.backward()
        if drops:
            zero.zero_grad()
        elif stage == 1:  # its gradients are in the sums already
            refused("so Zero dropped them: begin the window again", zero.step, partial=True)
        for micro in range(0 if drops or stage == 1 else 1, 3):
            loss_of(zero.module, *batch(micro, rank)).backward()
            assert zero.step() == (micro == 2)
        train_alone(alone, world, 1, micro=3, lr=1e-2)
        assert_same(alone, zero, **ROUNDING)


# --- operations and modules that use parameters in their own ways: what stage 3 must not corrupt in silence


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
    refused(r"a view of a parameter .*[0-2]\.weight.* is still held.*clone\(\)", zero.step)
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
                refused(r"in a transform of torch.func .* copy.deepcopy", transform, x)
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
    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table, requires_grad=False)
        self.linear = nn.Linear(10, 10, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.table.real if self.table.is_complex() else self.table
        return self.linear(x) * table[:10].double()


NUMBERS = torch.arange(300) % 3
TABLES = [
    *(NUMBERS.to(d) for d in (torch.int64, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float16)),
    *(NUMBERS.float().to(d) for d in (torch.complex64, torch.float8_e4m3fn, torch.float8_e8m0fnu)),
]


@on(2, "dist:gloo", "dist:ringlet")
@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_of_any_dtype(rank, world, stage):
    """Also of those that no call of the backend takes: gathered, and written by rank 0."""
    for table in TABLES:
        model = Table(table)
        zero, x = zero_of(model, stage=stage, lr=1e-2), torch.ones(2, 10, dtype=torch.float64)
        assert torch.equal(zero.module(x), model(x))
        zero.module(x).sum().backward()
        zero.step()
        with zero.gathered():
            assert torch.equal(zero.module.table, model.table)
            if rank == 0:
                zero.module.table.data.view(torch.uint8).fill_(1)
        assert parameters_of(zero)["table"].view(torch.uint8).unique().tolist() == [1]
        if stage == 3:
            refused("table", zero.module.table.sum)


@on("two")
@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_of_any_layout(rank, world, stage):
    """One element seen 300 times, transposed ones, complex conjugates."""
    square = torch.arange(100.0).view(10, 10)
    for table in (torch.ones(1).expand(300), square.t(), torch.complex(square, square).conj()):
        written = 7j if table.is_complex() else 7
        zero = ringlet.Zero(Table(table), torch.optim.SGD, stage, lr=1e-2, persistence_elements=0)
        assert torch.equal(parameters_of(zero)["table"], table)
        with zero.gathered():
            for row in zero.module.table if rank == 0 else ():
                row.fill_(written)
        assert (parameters_of(zero)["table"] == written).all()


@on("two")
@pytest.mark.parametrize("drops", [True, False])
def test_a_backward_that_raised_without_the_root(rank, world, drops):
    """Modules inside, called by themselves: the next gradient is what tells."""
    model = make(tied=False)
    x = torch.ones(2, 6, 16, dtype=torch.float64)
    for zero, alone in at_each_stage(model, torch.optim.SGD, lr=0.1):
        with stopped_at(zero.module.blocks[2].mix.weight):
            zero.module.blocks[2](x).square().sum().backward()
        if drops:
            zero.zero_grad()
        zero.module.blocks[2](x).square().sum().backward()
        assert zero.step()
        alone.blocks[2](x).square().sum().backward()
        torch.optim.SGD(alone.parameters(), lr=0.1).step()
        assert_same(alone, zero, **ROUNDING)


@on("two")
def test_a_write_outside_hinders_no_backward_of_others(rank, world):
    """Of whole parameters: what a loss has saved of the others is as it was."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    twin = copy.deepcopy(model)
    zero = ringlet.Zero(model, torch.optim.SGD, 3, lr=0.1, persistence_elements=10)
    with torch.no_grad():
        model[0].bias.mul_(0.5)
        twin[0].bias.mul_(0.5)
    with zero.gathered():
        loss = sum(p.square().sum() for p in model.parameters())
    loss.backward()
    sum(p.square().sum() for p in twin.parameters()).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    zero.step()
    with zero.gathered():
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q)
