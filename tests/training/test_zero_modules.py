"""What modules do that ZeRO must survive: checkpointed activations, shared, frozen and unused parameters, errors."""

import copy
import functools
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ringlet
from ranks import on
from zero_checks import (
    ROUNDING,
    STAGES,
    WIDTH,
    assert_same,
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


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 30), nn.Linear(6, 30)

    def forward(self, x: torch.Tensor, names: str) -> torch.Tensor:
        return torch.cat([getattr(self, name)(x) for name in names]).square().mean()


@on("two")
def test_modules_in_changing_order(rank, world):
    torch.manual_seed(1)
    model = Branches().double()
    x = torch.randn(4, 6, dtype=torch.float64)
    results = []
    for stage in STAGES:
        zero = zero_of(model, torch.optim.SGD, stage, bucket_elements=200, lr=0.1, momentum=0.9)
        for names in ("b", "ab", "ba", "a"):
            zero.module(x, names).backward()
            zero.step()
        results.append(parameters_of(zero))
    for other in results[1:]:
        assert all(torch.equal(other[name], value) for name, value in results[0].items())


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
        with pytest.raises(ringlet.InvalidUsage, match=r"in shards: stage 3 gathers a parameter only during"):
            use()
    with zero.gathered():
        assert torch.equal(weight, model.blocks[0].mix.weight)
        saved = zero.module.state_dict()
        assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
    train_zero(zero, rank, 1)
    with pytest.raises(ringlet.InvalidUsage, match=r"blocks\.0\.mix\.weight"):
        weight.sum()


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
    with pytest.raises(ringlet.InvalidUsage, match=r"Bare returns a view of its own parameter .*weight.*return a copy"):
        bare()


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
        with pytest.raises(ringlet.InvalidUsage, match="without a backward"):
            zero.step()
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

    def fail(_gradient):
        raise ValueError("of backward")

    for stage in STAGES:
        for tries in (1, 2):
            zero, alone = zero_of(model, stage=stage, lr=1e-2), copy.deepcopy(model)
            for step in range(2):
                hook = zero.module.blocks[2].mix.weight.register_hook(fail)
                loss = loss_of(zero.module, *batch(step, rank))
                for _ in range(tries):
                    with pytest.raises(ValueError, match="of backward"):
                        loss.backward(retain_graph=True)
                hook.remove()
                (loss if tries == 2 else loss_of(zero.module, *batch(step, rank))).backward()
                assert zero.step()
            train_alone(alone, world, 2, lr=1e-2)
            assert_same(alone, zero, **ROUNDING)


@on("two")
@pytest.mark.parametrize("drops", [True, False])
def test_a_backward_that_raised_in_a_window(rank, world, drops):
    model = make()

    def fail(_gradient):
        raise ValueError("of backward")

    for stage in STAGES:
        zero, alone = zero_of(model, stage=stage, accumulate=3, lr=1e-2), copy.deepcopy(model)
        loss_of(zero.module, *batch(0, rank)).backward()
        zero.step()
        hook = zero.module.blocks[2].mix.weight.register_hook(fail)
        loss = loss_of(zero.module, *batch(1, rank))
        with pytest.raises(ValueError, match="of backward"):
            loss.backward()
        hook.remove()
        if drops:
            zero.zero_grad()
        elif stage == 1:  # its gradients are in the sums already
            with pytest.raises(ringlet.InvalidUsage, match="so Zero dropped them: begin the window again"):
                zero.step(partial=True)
        for micro in range(0 if drops or stage == 1 else 1, 3):
            loss_of(zero.module, *batch(micro, rank)).backward()
            assert zero.step() == (micro == 2)
        train_alone(alone, world, 1, micro=3, lr=1e-2)
        assert_same(alone, zero, **ROUNDING)
