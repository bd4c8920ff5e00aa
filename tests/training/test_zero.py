"""ZeRO against training by one process: the same numbers at every stage, with every optimizer, in windows, clipped."""

import copy
import itertools
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ringlet
from ranks import on
from zero_checks import (
    LIMITS,
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


@on("ranks")
def test_stages_equal_each_other_exactly_and_one_process_within_rounding(rank, world):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_at_all_stages(rank, world)


def train_at_all_stages(rank, world):
    model, results = make(), {}
    for stage in STAGES:
        zero = zero_of(model, stage=stage, lr=1e-2)
        results[stage] = (train_zero(zero, rank, 5), parameters_of(zero))
    losses = train_alone(model, world, 5, lr=1e-2)
    assert losses[-1] < losses[0]
    torch.testing.assert_close(results[1][0], losses, **ROUNDING)
    assert_same(model, zero, **ROUNDING)
    for stage in (2, 3):
        assert results[stage][0] == results[1][0]
        assert all(torch.equal(results[stage][1][name], value) for name, value in results[1][1].items())


OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"lr": 1e-2, "amsgrad": True},
    "AdamW": {"lr": 1e-2, "foreach": True},
    "NAdam": {"lr": 1e-2},
    "RAdam": {"lr": 1e-2},
    "Adamax": {"lr": 1e-2},
    "Adagrad": {"lr": 1e-2},
    "Adadelta": {"lr": 0.5},
    "RMSprop": {"lr": 1e-3, "centered": True, "momentum": 0.5},
    "Rprop": {"lr": 1e-3},
    "ASGD": {"lr": 1e-2},
}


@on("two")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_elementwise_optimizer(rank, world, name):
    model = make()
    cls = getattr(torch.optim, name)
    zero = zero_of(model, cls, 3, **OPTIMIZERS[name])
    train_zero(zero, rank, 4)
    train_alone(model, world, 4, cls, **OPTIMIZERS[name])
    # Rprop looks at signs alone, and divisions by small roots magnify roundings
    assert_same(model, zero, rtol=1e-6, atol=1e-8)


@on("two")
def test_fused_optimizer(rank, world):
    model = make(torch.float32)
    zero = zero_of(model, torch.optim.AdamW, 2, lr=1e-2, fused=True)
    train_zero(zero, rank, 3)
    train_alone(model, world, 3, lr=1e-2)
    assert_same(model, zero, rtol=1e-3, atol=1e-5)


@on("ranks")
def test_a_window_equals_one_larger_batch(rank, world):
    model = make()
    for stage in STAGES:
        alone = copy.deepcopy(model)
        zero = zero_of(model, stage=stage, accumulate=3, lr=1e-2)
        before = zero.stats()["communication"]["collectives"]
        losses = train_zero(zero, rank, 3, micro=3)
        torch.testing.assert_close(losses, train_alone(alone, world, 3, micro=3, lr=1e-2), **ROUNDING)
        assert_same(alone, zero, **ROUNDING)
        units = len(zero.stats()["units"])
        collectives = zero.stats()["communication"]["collectives"] - before
        if stage < 3:  # a reduction and a gather of every unit in each window, or a reduction in each backward
            assert collectives == 3 * units * {1: 2, 2: 4}[stage]


@on("two")
def test_a_window_that_ends_early_averages_what_it_has(rank, world):
    model = make()
    for zero, alone in at_each_stage(model, accumulate=4, lr=1e-2):
        assert not zero.step(partial=True)  # nothing to end
        with pytest.raises(
            ringlet.InvalidUsage, match=r"partial must be True or False, .*zero\.optimizer\.step\(closure\)"
        ):
            zero.step(lambda: None)
        for micro in range(2):
            loss_of(zero.module, *batch(micro, rank)).backward()
            assert not zero.step()
        assert zero.step(partial=True) and zero.steps == 1
        train_alone(alone, world, 1, micro=2, lr=1e-2)
        assert_same(alone, zero, **ROUNDING)
        assert not zero.step(partial=True)


@on("two")
def test_a_window_that_one_rank_has_not_begun(rank, world):
    for stage in STAGES:
        group = dist.new_group(timeout=timedelta(seconds=40))
        zero = zero_of(make(), stage=stage, lr=1e-2, accumulate=4, group=group)
        before = parameters_of(zero)
        assert not zero.step(partial=True)  # on no rank
        assert all(torch.equal(value, before[name]) for name, value in parameters_of(zero).items())
        said = r"rank 0 1, rank 1 0\. Nothing was updated" if stage == 1 else r"calls do not match"
        with pytest.raises(ringlet.InvalidUsage, match=said):
            if rank == 0:
                loss_of(zero.module, *batch(0, rank)).backward()
            zero.step(partial=True)
        if stage == 1:  # the others reduce in every backward, which the other rank has not begun
            zero.zero_grad()
            loss_of(zero.module, *batch(0, rank)).backward()
            assert zero.step(partial=True)


@on("two")
def test_a_window_can_sum(rank, world):
    model = make()
    alone = copy.deepcopy(model)
    zero = zero_of(model, torch.optim.SGD, 2, accumulate=2, average=False, lr=0.1)
    train_zero(zero, rank, 1, micro=2)
    train_alone(alone, world, 1, torch.optim.SGD, micro=2, lr=0.2)
    assert_same(alone, zero, **ROUNDING)


@on("two")
def test_backwards_of_one_micro_batch_add_up(rank, world):
    model = make()
    for zero, alone in at_each_stage(model, torch.optim.SGD, lr=0.1):
        loss_of(zero.module, *batch(0, rank)).backward()
        loss_of(zero.module, *batch(1, rank)).backward()
        assert zero.step()
        train_alone(alone, world, 1, torch.optim.SGD, micro=2, lr=0.2)
        assert_same(alone, zero, **ROUNDING)


@on("ranks")
def test_clipping_equals_clip_grad_norm(rank, world):
    model = make()
    for zero, alone in at_each_stage(model, torch.optim.SGD, max_norm=0.05, lr=0.5):
        train_zero(zero, rank, 3)
        train_alone(alone, world, 3, torch.optim.SGD, clip=0.05, lr=0.5)
        assert_same(alone, zero, **ROUNDING)
        loss_of(zero.module, *batch(9, rank)).backward()
        norm = zero.clip_grad_norm_(1e9)
        alone.zero_grad()
        sum(loss_of(alone, *batch(9, r)) / world for r in range(world)).backward()
        expected = nn.utils.clip_grad_norm_(alone.parameters(), 1e9)
        torch.testing.assert_close(norm, expected, **ROUNDING)
        zero.step()


@on("two")
def test_clipping_again_clips_what_was_clipped(rank, world):
    model = make()
    for zero, alone in at_each_stage(model, torch.optim.SGD, max_norm=0.05, lr=0.5):
        loss_of(zero.module, *batch(0, rank)).backward()
        sum(loss_of(alone, *batch(0, r)) / world for r in range(world)).backward()
        for most in (float("inf"), 0.1, float("inf")):  # the first is how loops read the norm
            expected = nn.utils.clip_grad_norm_(alone.parameters(), most)
            torch.testing.assert_close(zero.clip_grad_norm_(most), expected, **ROUNDING)
        nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
        zero.step()
        torch.optim.SGD(alone.parameters(), lr=0.5).step()
        assert_same(alone, zero, **ROUNDING)


@on("two")
def test_gaps_between_parameters_count_nothing(rank, world):
    torch.manual_seed(6)
    sizes = [7, 13, 9, 21, 5]  # whose units have gaps, in buffers of other units before
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    model = nn.Sequential(*layers).double()
    for zero, alone in at_each_stage(
        model, torch.optim.SGD, max_norm=0.05, lr=0.5, bucket_elements=200, persistence_elements=0
    ):
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
        for _ in range(3):
            x = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            zero.module(x).square().mean().backward()
            zero.step()
            optimizer.zero_grad()
            alone(x).square().mean().backward()
            nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
            optimizer.step()
        assert_same(alone, zero, **ROUNDING)


@on("two")
def test_windows_are_clipped_whole(rank, world):
    model = make()
    for zero, alone in at_each_stage(model, torch.optim.SGD, max_norm=0.05, accumulate=3, lr=0.5):
        train_zero(zero, rank, 2, micro=3)
        train_alone(alone, world, 2, torch.optim.SGD, clip=0.05, micro=3, lr=0.5)
        assert_same(alone, zero, **ROUNDING)
        for micro in (6, 7):  # a window of 2
            loss_of(zero.module, *batch(micro, rank)).backward()
        assert zero.step(partial=True)
        train_alone(alone, world, 1, torch.optim.SGD, first=3, clip=0.05, micro=2, lr=0.5)
        assert_same(alone, zero, **ROUNDING)


@on("two")
def test_masters_keep_what_bfloat16_would_lose(rank, world):
    model = make(torch.float32)
    for stage in STAGES:
        zero = zero_of(model, torch.optim.SGD, stage, dtype=torch.bfloat16, lr=1e-5)
        before = parameters_of(zero)
        assert all(p.dtype is torch.bfloat16 for p in before.values())
        assert all(torch.equal(before[n], p.detach().bfloat16()) for n, p in model.named_parameters())
        started = [piece.tensor.clone() for piece in zero._sharded.pieces]
        train_zero(zero, rank, 2)
        for piece, old in zip(zero._sharded.pieces, started, strict=True):
            assert piece.is_master and piece.tensor.dtype is torch.float32
            assert torch.equal(piece.flat.shard[piece.start : piece.stop], piece.tensor.bfloat16())
            moved = (piece.tensor - old).abs()
            assert moved.max() > 0  # steps too small for bfloat16 are not lost
            assert moved.max() < 2**-9 * old.abs().max()


@on("ranks")
def test_bfloat16_trains_as_float32_does(rank, world):
    model = make(torch.float32)
    curves = []
    for stage in STAGES:
        zero = zero_of(model, stage=stage, dtype=torch.bfloat16, lr=1e-2)
        curves.append(train_zero(zero, rank, 6))
    alone = train_alone(model, world, 6, lr=1e-2)
    torch.testing.assert_close(curves[0], alone, rtol=0.02, atol=0.02)
    assert curves[1] == curves[0] and curves[2] == curves[0]


@on("two")
def test_options_by_parameter(rank, world):
    model = make()
    zero = ringlet.Zero(
        copy.deepcopy(model),
        torch.optim.AdamW,
        2,
        options_of=lambda name, p: {"weight_decay": 0.0, "lr": 3e-2} if p.ndim < 2 else {},
        lr=1e-2,
        weight_decay=0.3,
        **LIMITS,
    )
    narrow = [p for p in model.parameters() if p.ndim < 2]
    wide = [p for p in model.parameters() if p.ndim >= 2]
    optimizer = torch.optim.AdamW(
        [{"params": wide}, {"params": narrow, "weight_decay": 0.0, "lr": 3e-2}], lr=1e-2, weight_decay=0.3
    )
    train_zero(zero, rank, 4)
    train_alone(model, world, 4, optimizer=optimizer)
    assert_same(model, zero, **ROUNDING)


@on("two")
def test_learning_rate_schedules(rank, world):
    model = make()
    zero = zero_of(model, stage=1, lr=1e-2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (zero.optimizer, optimizer)]
    for step in range(3):
        train_zero(zero, rank, 1, first=step)
        train_alone(model, world, 1, first=step, optimizer=optimizer)
        for one in schedules:
            one.step()
    assert zero.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 1e-2 / 8
    assert_same(model, zero, **ROUNDING)


@on("two")
def test_sub_groups_and_overlap_change_no_bit(rank, world):
    model = make()
    results = []
    for settings in ({}, {"sub_group_elements": 100}, {"overlap": False}):
        zero = zero_of(model, stage=3, lr=1e-2, **settings)
        train_zero(zero, rank, 3)
        results.append(parameters_of(zero))
    for other in results[1:]:
        assert all(torch.equal(other[name], value) for name, value in results[0].items())
    zero = zero_of(model, stage=3, dtype=torch.bfloat16, sub_group_elements=100, lr=1e-2)
    train_zero(zero, rank, 1)
    assert 0 < zero.stats()["buffers"]["sub_group_peak_bytes"] <= 400


@on(4, "dist:ringlet")
def test_a_group_of_some_ranks(rank, world):
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        model = make()
        zero = zero_of(model, stage=3, group=group, lr=1e-2)
        for step in range(2):
            loss_of(zero.module, *batch(step, rank // 2)).backward()
            zero.step()
        train_alone(model, 2, 2, lr=1e-2)
        assert_same(model, zero, **ROUNDING)


@on(1, "dist:ringlet")
def test_one_rank(rank, world):
    model = make()
    for zero, alone in at_each_stage(model, lr=1e-2):
        train_zero(zero, rank, 2)
        train_alone(alone, 1, 2, lr=1e-2)
        assert_same(alone, zero, **ROUNDING)


@on("two")
def test_removal_leaves_an_ordinary_module(rank, world):
    for stage in STAGES:
        zero = zero_of(make(), stage=stage, lr=1e-2)
        train_zero(zero, rank, 1)
        before = parameters_of(zero)
        zero.remove()
        assert all(torch.equal(before[name], p) for name, p in zero.module.named_parameters())
        loss_of(zero.module, *batch(0, rank)).backward()
        assert all(p.grad is not None for p in zero.module.parameters())
        copy.deepcopy(zero.module)


def printed(rank, world):
    import contextlib
    import io

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        zero = zero_of(make(), print_every=2, print_times=True, lr=1e-2)
        train_zero(zero, rank, 5)
    return text.getvalue()


def test_rank_0_prints_every_so_many_steps(two):
    first, second = two(printed)
    lines = first.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 2", "step 4"] and second == ""
    assert all(phase in lines[0] for phase in ("lr 0.01", "forward", "backward", "step ", "exposed"))


class Rotary(nn.Module):
    """A linear map in bfloat16, a norm in float32 whose weights bfloat16 does not hold, and complex rotations."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8, dtype=torch.bfloat16), nn.LayerNorm(8)
        nn.init.constant_(self.norm.weight, 1.001)
        self.register_buffer("rotations", torch.polar(torch.ones(4), torch.arange(4.0)))


@on("two")
def test_conversion_keeps_values_and_complex_buffers(rank, world):
    exact = torch.tensor(1.001).item()
    for stage in STAGES:
        zero = ringlet.Zero(
            nn.Sequential(Rotary()), torch.optim.AdamW, stage, dtype=torch.float32, persistence_elements=0
        )
        with zero.gathered():
            assert zero.module[0].norm.weight.unique().tolist() == [exact]
        model = Rotary()
        before = model.rotations.clone()
        zero = ringlet.Zero(model, torch.optim.AdamW, stage, dtype=torch.bfloat16)
        masters = zero.state_dict()["model"]["norm.weight"]
        assert all(values.unique().tolist() == [exact] for _, values in masters.runs)
        assert torch.equal(model.rotations, before)
