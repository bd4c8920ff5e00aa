"""ZeRO against training by one process: the same numbers at every stage, with every optimizer, in windows, clipped."""

import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ringlet
from random_zero_modules import OPTIMIZERS
from ranks import on
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


@on("two")
def test_every_elementwise_optimizer(rank, world):
    for name, (defaults, *_) in {**OPTIMIZERS, "Rprop": [{}]}.items():
        model, cls = make(), getattr(torch.optim, name)
        zero = zero_of(model, cls, 3, lr=1e-2, **defaults)
        train_zero(zero, rank, 4)
        train_alone(model, world, 4, cls, lr=1e-2, **defaults)
        try:
            assert_same(model, zero, rtol=1e-6, atol=1e-8)
        except AssertionError as error:
            raise AssertionError(name) from error


@on("ranks")
def test_a_window_equals_one_larger_batch(rank, world):
    for zero, alone in at_each_stage(make(), accumulate=3, lr=1e-2):
        stage = zero.options.stage
        before = zero.stats()["communication"]["collectives"]
        losses = train_zero(zero, rank, 3, micro=3)
        torch.testing.assert_close(losses, train_alone(alone, world, 3, micro=3, lr=1e-2), **ROUNDING)
        assert_same(alone, zero, **ROUNDING)
        units = len(zero.stats()["units"])
        collectives = zero.stats()["communication"]["collectives"] - before
        if stage < 3:  # a reduction and a gather of every unit in each window, or a reduction in each backward
            assert collectives == 3 * units * {1: 2, 2: 4}[stage]


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
