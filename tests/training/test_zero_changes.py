"""What is done to a module between two steps of its Zero: followed as plain torch would, or refused on every rank."""

import copy
import itertools
import re
from unittest import mock

import pytest
import torch
from torch import nn

import ringlet
from ranks import on
from refusals import refused
from ringlet.training import agree
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
    train_alone,
    train_zero,
    zero_of,
)

# -- what is refused, by the name of the parameter --


def unfreeze(model):
    model.positions.requires_grad_(True)


def another_norm():
    return nn.Parameter(torch.ones(16, dtype=torch.float64))


# Which change, what is said of it, and whether stage 3 lets torch's own calls make it: parameters are in shards then.
REFUSED = {
    "unfrozen": (unfreeze, "parameter positions was frozen and requires a gradient", False),
    "memory of another shape": (
        lambda model: setattr(model.blocks[0].norm.bias, "data", torch.zeros(3, dtype=torch.float64)),
        r"parameter blocks.0.norm.bias was .*\[16\].* and is .*\[3\]", True,
    ),
    "converted": (lambda model: model.float(), "parameter .* was torch.float64 .* and is torch.float32", False),
    "assigned": (
        lambda model: model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True),
        "parameter .* is another object", False,
    ),
    "adapter": (
        lambda model: setattr(model.blocks[1], "adapter", nn.Linear(3, 3, dtype=torch.float64)),
        "parameter blocks.1.adapter.weight was not there", True,
    ),
    "module taken out": (lambda model: model.blocks.__delitem__(2), "parameter blocks.2.gate is no longer there", True),
    "replaced": (
        lambda model: setattr(model.blocks[0].norm, "weight", another_norm()),
        "parameter blocks.0.norm.weight is another object", True,
    ),
    "another dictionary entry": (
        lambda model: model.blocks[0].norm._parameters.__setitem__("weight", another_norm()),
        "parameter blocks.0.norm.weight is another object", True,
    ),
}  # fmt: skip


def half_frozen(rank, stage):
    """A Zero that has trained."""
    model = make(tied=False)
    model.positions.requires_grad_(False)
    zero = zero_of(model, stage=stage, lr=1e-2)
    train_zero(zero, rank, 1)
    return zero


@on("two")
def test_other_parameters_are_refused(rank, world):
    for (name, (change, words, at_stage_3)), stage in itertools.product(REFUSED.items(), STAGES):
        if stage == 3 and not at_stage_3:
            continue
        zero = half_frozen(rank, stage)
        change(zero.module)
        said = rf"after Zero was made \(.*{words}.*\): .* remove"
        refused(said, loss_of, zero.module, *batch(1, rank))
        zero.remove()
        again = ringlet.Zero(zero.module.double(), torch.optim.SGD, stage, lr=0.1)
        if name not in ("adapter", "memory of another shape"):
            train_zero(again, rank, 1)


@on("two")
@mock.patch.object(agree, "ALIKE_SECONDS", 0.5)
def test_memory_that_one_rank_shared_is_refused_on_all(rank, world):
    zero = zero_of(make(), stage=2, lr=1e-2)
    train_zero(zero, rank, 1)
    if rank == 1:
        zero.module.blocks[1].share_memory()  # torch.multiprocessing does so to what it sends
    refused(r"the memory of parameter blocks.1.gate was shared .* a copy", train_zero, zero, rank, 1)


@on("two")
@mock.patch.object(agree, "ALIKE_SECONDS", 0.5)
def test_what_one_rank_unfroze_is_refused_on_all(rank, world):
    zero = half_frozen(rank, stage=1)
    if rank == 1:
        unfreeze(zero.module)
    words = "parameter positions was frozen"
    refused(words if rank == 1 else f"rank 1 refused .*{words}", train_zero, zero, rank, 1, first=1)


@on("two")
def test_a_frozen_parameter_is_not_decayed(rank, world):
    for stage in STAGES:
        zero = zero_of(make(), stage=stage, lr=1e-2)
        loss_of(zero.module, *batch(0, rank)).backward()
        zero.module.positions.requires_grad_(False)
        refused(r"parameter positions was frozen .* weight decay", zero.step)
        zero.module.positions.requires_grad_(True)  # as around the training of another model
        assert zero.step()
        zero.module.requires_grad_(False)
        train_in_turns(zero, rank, world)


def train_in_turns(zero, rank, world):
    """As a discriminator while the generator is trained."""
    alone = make()
    with zero.gathered():
        alone.load_state_dict(zero.module.state_dict())
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64, requires_grad=True)
    for block in (zero.module.blocks[1], alone.blocks[1].requires_grad_(False)):
        block(x).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * torch.autograd.grad(alone.blocks[1](x).square().sum(), x)[0], **ROUNDING)
    zero.module.requires_grad_(True)
    loss_of(zero.module, *batch(1, rank)).backward()
    assert zero.step()


class Bounded(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@on("two")
def test_a_module_that_writes_its_parameter_in_forward(rank, world):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 20), Bounded(20, 20), nn.Linear(20, 1)).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    for stage in (1, 2):
        zero = zero_of(model, torch.optim.SGD, stage, lr=0.1)
        assert_trains_alike(copy.deepcopy(model), zero, [x] * 3, **ROUNDING)
    zero = zero_of(model, torch.optim.SGD, 3, lr=0.1)
    refused(r"Bounded wrote into its parameter 1.weight in its forward", zero.module, x)


# -- what is followed --


@torch.no_grad()
def load(model):
    model.load_state_dict({k: v * 0.75 for k, v in model.state_dict().items()})


@torch.no_grad()
def scale(model):
    for p in model.parameters():
        p.mul_(0.5)


@on("two")
def test_another_memory_format_is_followed(rank, world):
    """Random trainings write values, and exchange memory."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 2)).double()
    inputs = torch.randn(4, 2, 3, 5, 5, dtype=torch.float64)
    for stage in (1, 2):
        zero, alone = zero_of(model, torch.optim.SGD, stage, lr=0.1), copy.deepcopy(model)
        for step in range(2):
            assert_trains_alike(alone, zero, inputs[2 * step : 2 * step + 2], **ROUNDING)
            for module in (zero.module, alone):
                module.to(memory_format=torch.channels_last)


@on("two")
def test_a_write_keeps_the_masters_of_what_it_leaves(rank, world):
    """Clipping that touches nothing leaves what bfloat16 would lose."""
    model = make(torch.float32)
    results = []
    for clips in (False, True):
        zero = zero_of(model, torch.optim.SGD, 2, dtype=torch.bfloat16, lr=1e-5)
        for step in range(4):
            train_zero(zero, rank, 1, first=step)
            if clips:
                with torch.no_grad():
                    for p in zero.module.parameters():
                        p.clamp_(-100, 100)
        results.append([piece.tensor.clone() for piece in zero._sharded.pieces])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@on("two")
@pytest.mark.parametrize("writer", [0, 1])
def test_a_write_on_one_rank_is_an_error_on_all(rank, world, writer):
    zero = zero_of(make(), stage=2, lr=1e-2)
    train_zero(zero, rank, 1)
    if rank == writer:
        scale(zero.module)
        refused(
            r"only some ranks wrote to these parameters: .*zero.gathered\(\)", loss_of, zero.module, *batch(1, rank)
        )
    else:
        with pytest.raises(ringlet.InvalidUsage):
            train_zero(zero, rank, 1, first=1)


@on("two")
def test_gathered_takes_what_rank_0_wrote_before_it(rank, world):
    model = make()
    for stage in (1, 2):
        zero, alone = zero_of(model, stage=stage, lr=1e-2), copy.deepcopy(model)
        if rank == 0:
            scale(zero.module)
        with zero.gathered():
            pass
        scale(alone)
        train_zero(zero, rank, 2)
        train_alone(alone, world, 2, lr=1e-2)
        assert_same(alone, zero, **ROUNDING)


@on("two")
def test_written_values_are_those_of_rank_0(rank, world):
    """As of an initialisation with another seed on every rank: rank 0's are taken."""
    model = make()
    zero, alone = zero_of(model, stage=1, lr=1e-2), copy.deepcopy(model)
    for module in (zero.module, alone):
        torch.manual_seed(rank if module is zero.module else 0)
        nn.init.normal_(module.blocks[0].mix.weight, std=0.1)
    train_zero(zero, rank, 2)
    train_alone(alone, world, 2, lr=1e-2)
    assert_same(alone, zero, **ROUNDING)


@on("two")
def test_buffers_of_unsigned_numbers(rank, world):
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        model = make()
        model.register_buffer("marks", torch.tensor([7 + rank, 2**15 + rank]).to(dtype))
        zero = zero_of(model, stage=2, lr=1e-2)
        assert zero.module.marks.tolist() == [7, 2**15]
        train_zero(zero, rank, 1)


@on("two")
def test_changes_that_concern_no_trained_value(rank, world):
    """What changes no value that is trained: renamed, swapped for a call, evaluated, copied."""
    model = make(tied=False)
    for stage in (1, 2):
        zero, alone = zero_of(model, stage=stage, lr=1e-2), copy.deepcopy(model)
        inputs, _ = batch(0, 0)
        train_zero(zero, rank, 1)
        other = {name: p.detach() * 2 for name, p in zero.module.named_parameters()}
        torch.func.functional_call(zero.module, other, (inputs,)).sum()
        zero.module.named_again = nn.ModuleList([zero.module.blocks[0]])
        copy.deepcopy(zero.module)(inputs)
        zero.module.register_buffer("extra", torch.zeros(3))
        zero.module.teacher = nn.Linear(3, 3).requires_grad_(False)
        train_zero(zero, rank, 2, first=1)
        train_alone(alone, world, 3, lr=1e-2)
        with zero.gathered():
            for name, p in alone.named_parameters():
                torch.testing.assert_close(zero.module.get_parameter(name).detach(), p.detach(), **ROUNDING)


# -- optimizers --


@on("two")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["closure", "scaler"])
def test_the_optimizer_of_a_zero_steps_it(rank, world, kind):
    from torch.optim.lr_scheduler import StepLR

    model = make()
    for zero, alone in at_each_stage(model, accumulate=2, lr=1e-2):
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        schedules = [StepLR(zero.optimizer, 1, 0.5)]
        own = torch.optim.AdamW(alone.parameters(), lr=1e-2)
        schedules.append(StepLR(own, 1, 0.5))
        for step in range(3):
            for micro in range(2):
                if kind == "closure":

                    def closure(module=zero.module, number=2 * step + micro):
                        loss = loss_of(module, *batch(number, rank))
                        loss.backward()
                        return loss

                    assert zero.optimizer.step(closure).requires_grad
                else:
                    scaler.scale(loss_of(zero.module, *batch(2 * step + micro, rank))).backward()
                    scaler.unscale_(zero.optimizer)
                    scaler.step(zero.optimizer)
                    scaler.update()
                zero.optimizer.zero_grad()
            train_alone(alone, world, 1, first=step, micro=2, optimizer=own)
            for schedule in schedules:
                schedule.step()
        assert zero.steps == 3
        assert_same(alone, zero, **ROUNDING)


@on("two")
def test_loss_scaling_is_refused(rank, world):
    for fused in (False, True):
        zero = zero_of(make(torch.float32), stage=2, lr=1e-2, fused=fused)
        for unscales in (False, True):
            scaler = torch.amp.GradScaler("cpu", enabled=True)
            scaler.scale(loss_of(zero.module, *batch(0, rank))).backward()
            call = scaler.unscale_ if unscales else scaler.step
            refused(r"GradScaler on zero.optimizer.*enabled=False.*zero.step\(\)", call, zero.optimizer)
            zero.zero_grad()
        train_zero(zero, rank, 1)


@on("two")
def test_another_optimizer_over_the_parameters(rank, world):
    for stage in STAGES:
        model = make()
        before = torch.optim.AdamW(model.parameters(), lr=1e-2)
        zero = ringlet.Zero(model, torch.optim.AdamW, stage, lr=1e-2, accumulate=2)
        after = torch.optim.SGD([zero.module.positions], lr=0.1)
        unrelated = nn.Parameter(torch.ones(3))
        apart = torch.optim.SGD([unrelated], lr=0.1)
        for micro in range(2):
            loss_of(zero.module, *batch(micro, rank)).backward()
            for optimizer in (before, after):
                refused(r"step\(\) of an optimizer .* Call zero.step\(\)", optimizer.step)
            unrelated.sum().backward()
            apart.step()
            zero.step()
        zero.remove()
        loss_of(zero.module, *batch(0, rank)).backward()
        before.step()


# -- others who train the module --


@on("two")
def test_one_trainer_for_a_parameter(rank, world):
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def zero(module, stage=1):
        return ringlet.Zero(module, torch.optim.SGD, stage, lr=0.1)

    inputs, _ = batch(0, rank)
    another = "Zero: another GradientReducer or Zero reduces the gradient of"
    for stage in STAGES:
        first = zero(make(), stage)
        refused(another, zero, first.module)
        refused(another, zero, nn.Sequential(first.module))
        first.remove()
        zero(first.module)
    reducer = ringlet.GradientReducer(make())
    refused(another, zero, nn.Sequential(reducer._module))
    for wrapper in (DistributedDataParallel(make()), nn.Sequential(DistributedDataParallel(make()))):
        refused("is a DistributedDataParallel, .* give Zero the plain module", zero, wrapper)
    refused("reduces gradients itself", zero, fully_shard(make()))
    around = "DistributedDataParallel around this module averages the gradient of"
    for stage in (1, 2):
        refused(around, lambda: DistributedDataParallel(zero(make(), stage).module)(inputs))  # noqa: B023
        inner = make()
        parallel = DistributedDataParallel(inner)
        zero(inner, stage)
        refused(around, parallel, inputs)
        last = zero(make(), stage).module
        last.blocks[1] = DistributedDataParallel(last.blocks[1])
        refused("blocks.1 is a DistributedDataParallel", last, inputs)


# -- what it tells --


@on("two")
def test_a_zero_tells_its_state(rank, world):
    zero = zero_of(make(torch.float32), stage=2, dtype=torch.bfloat16, accumulate=3, max_norm=0.5, lr=1e-2)
    loss_of(zero.module, *batch(0, rank)).backward()
    parameters = sum(p.numel() for p in zero.module.parameters())
    text = repr(zero)
    total = zero.stats()["memory"]["total"]
    for part in (
        f"Zero(stage=2, rank {rank} of 2, AdamW {{'lr': 0.01}}, 23 trained parameters of {parameters} elements in ",
        f"{total} bytes held, steps=0, micro-batch 1 of 3, dtype=torch.bfloat16, accumulate=3, max_norm=0.5, bucket_",
    ):
        assert part in text, text
    assert re.fullmatch(r"Options\(stage=2, dtype=torch.bfloat16, accumulate=3, max_norm=0.5, .*\)", repr(zero.options))


def test_an_offload_tells_its_settings(tmp_path):
    assert repr(ringlet.Offload("cpu")) == "Offload('cpu')"
    assert repr(ringlet.Offload("file", tmp_path)) == f"Offload('file', {str(tmp_path)!r})"
