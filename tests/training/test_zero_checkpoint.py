"""Checkpoints of a Zero through torch.distributed.checkpoint: any world, stage and limits may load them."""

import functools
import io
import itertools
import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import ringlet
from ranks import on
from refusals import refused
from ringlet.training.zero.checkpoint import boxes
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


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2), (2, 2, 2, 3)])
def test_boxes_make_up_every_range(shape):
    count = math.prod(shape)
    for start, stop in itertools.combinations(range(count + 1), 2):
        whole = torch.arange(count).view(shape)
        found = list(boxes(shape, start, stop))
        parts = []
        for box in found:
            part = whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
            assert part.flatten().tolist() == list(range(box.start, box.stop))
            parts += part.flatten().tolist()
        assert parts == list(range(start, stop))
        assert len(found) <= max(1, 2 * len(shape) - 1)
    assert list(boxes(shape, 0, 0)) == []


def save(rank, world, folder, settings, steps):
    zero = zero_of(make(), **settings)
    train_zero(zero, rank, steps)
    dcp.save({"zero": zero}, checkpoint_id=folder)
    return parameters_of(zero)


def load(rank, world, folder, settings, ranks_before):
    zero = zero_of(make(seed=99), **settings)  # other values
    if world == 1:  # the long way
        state = {"zero": zero.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        zero.load_state_dict(state["zero"])
    else:
        dcp.load({"zero": zero}, checkpoint_id=folder)
    loaded, steps = parameters_of(zero), zero.steps
    # goes on with the batches of as many ranks as before
    for step in range(steps, steps + 2):
        if world == ranks_before:
            loss_of(zero.module, *batch(step, rank)).backward()
        else:
            parts = [batch(step, r) for r in range(ranks_before)]
            loss_of(zero.module, *(torch.cat(part) for part in zip(*parts, strict=True))).backward()
        zero.step()
    return loaded, steps, parameters_of(zero)


def test_saved_by_2_ranks_loaded_by_one(pool, tmp_path):
    """Random trainings go on on more ranks, and at other stages."""
    after = {"stage": 3, "lr": 5.0, "bucket_elements": 1000, "sub_group_elements": 300}  # lr is the checkpoint's
    saved = pool.values(save, 2, str(tmp_path), {"stage": 2, "lr": 1e-2}, 3, join="dist:ringlet")[0]
    alone = make()
    train_alone(alone, 2, 5, lr=1e-2)
    ((loaded, steps, trained),) = pool.values(load, 1, str(tmp_path), after, 2, join="dist:ringlet")
    assert steps == 3
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(trained[name], parameter.detach(), **ROUNDING)


@pytest.mark.parametrize("join", ["dist:ringlet", "dist:gloo"])
def test_going_on_at_the_same_world_changes_no_bit(pool, tmp_path, join):
    settings = {"stage": 3, "lr": 1e-2}
    pool.values(save, 2, str(tmp_path), settings, 2, join=join)
    uninterrupted = pool.values(save, 2, str(tmp_path / "later"), settings, 4, join=join)[0]
    for _, _, trained in pool.values(load, 2, str(tmp_path), settings, 2, join=join):
        assert all(torch.equal(trained[name], value) for name, value in uninterrupted.items())


def test_a_plain_module_loads_it(pool, tmp_path):
    saved = pool.values(save, 4, str(tmp_path), {"stage": 3, "lr": 1e-2}, 2, join="dist:ringlet")[0]
    pool.values(into_a_plain_module, 1, str(tmp_path), saved, join="dist:gloo")


def into_a_plain_module(rank, world, folder, saved):
    model = make(seed=99)
    state = {"zero": {"model": model.state_dict()}}
    dcp.load(state, checkpoint_id=folder)
    assert all(torch.equal(p, saved[name]) for name, p in model.named_parameters())
    assert model.temperature == 1.0


@on(2, "dist:gloo", "dist:ringlet")
def test_training_goes_on_after_a_load(rank, world, folder):
    for stage in STAGES:
        zero = zero_of(make(), stage=stage, lr=1e-2)
        train_zero(zero, rank, 1)
        dcp.save({"zero": zero}, checkpoint_id=f"{folder}/{stage}")
        train_zero(zero, rank, 1, first=1)
        expected = parameters_of(zero)
        dcp.load({"zero": zero}, checkpoint_id=f"{folder}/{stage}")
        train_zero(zero, rank, 1, first=1)
        assert all(torch.equal(value, expected[name]) for name, value in parameters_of(zero).items())


@on("two")
def test_masters_are_what_is_saved(rank, world, folder):
    settings = {"dtype": torch.bfloat16, "lr": 1e-4}
    first = zero_of(make(torch.float32), stage=1, **settings)
    train_zero(first, rank, 2)
    dcp.save({"zero": first}, checkpoint_id=folder)
    second = zero_of(make(torch.float32, seed=99), stage=3, **settings)
    dcp.load({"zero": second}, checkpoint_id=folder)
    pairs = zip(first._sharded.pieces, second._sharded.pieces, strict=True)
    assert all(torch.equal(a.tensor, b.tensor) for a, b in pairs)
    assert train_zero(first, rank, 2, first=2) == train_zero(second, rank, 2, first=2)
    plain = make(torch.float32, seed=99)
    state = {"zero": {"model": plain.state_dict()}}
    dcp.load(state, checkpoint_id=folder)  # the masters, of more than bfloat16's digits
    assert any(not torch.equal(p, p.bfloat16().float()) for p in plain.parameters())


@on("two")
def test_a_checkpoint_before_the_first_step(rank, world, folder):
    settings = {
        "Adagrad": {"lr": 1e-2},  # makes its states at once
        "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},  # its first step is not like the others
    }
    for name, defaults in settings.items():
        cls = getattr(torch.optim, name)
        zero, alone = zero_of(make(), cls, 2, **defaults), make()
        dcp.save({"zero": zero}, checkpoint_id=f"{folder}/{name}")
        train_zero(zero, rank, 2)
        other = zero_of(make(seed=99), cls, 3, **defaults)
        dcp.load({"zero": other}, checkpoint_id=f"{folder}/{name}")
        train_zero(other, rank, 2)
        train_alone(alone, world, 2, cls, **defaults)
        assert_same(alone, zero, rtol=1e-7, atol=1e-8)  # saving changed nothing
        assert_same(alone, other, rtol=1e-7, atol=1e-8)
        dcp.load({"zero": other}, checkpoint_id=f"{folder}/{name}")  # back to the beginning
        assert other.steps == 0
        train_zero(other, rank, 2)
        assert_same(alone, other, rtol=1e-7, atol=1e-8)


class Pair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 16)


def groups_of(rank, world, folder, settings):
    """On 4 ranks a rank's shards hold weights or biases alone."""
    zero = ringlet.Zero(
        Pair().double(),
        torch.optim.AdamW,
        options_of=lambda name, p: {"lr": 1e-3, "weight_decay": 0.5} if p.ndim < 2 else {},
        lr=1e-2,
        **settings,
    )
    rates = [group["lr"] for group in zero.optimizer.param_groups]
    dcp.save({"zero": zero}, checkpoint_id=folder)
    for group in zero.optimizer.param_groups:
        group["lr"] = 5.0
    dcp.load({"zero": zero}, checkpoint_id=folder)
    return rates, [group["lr"] for group in zero.optimizer.param_groups]


@pytest.mark.parametrize("settings", [{"persistence_elements": 0}, {"bucket_elements": 20, "persistence_elements": 10}])
def test_groups_are_the_same_on_every_rank(pool, tmp_path, settings):
    for found in pool.values(groups_of, 4, str(tmp_path), {"stage": 2, **settings}, join="dist:ringlet"):
        assert found == ([1e-2, 1e-3], [1e-2, 1e-3])


@on("two")
def test_other_groups_are_refused(rank, world, folder):
    without_decay = {"options_of": lambda name, p: {"weight_decay": 0.0} if p.ndim < 2 else {}}
    dcp.save({"zero": ringlet.Zero(Pair(), torch.optim.AdamW, **without_decay)}, checkpoint_id=folder)
    model = Pair()
    torch.nn.init.constant_(model.second.weight, 5.0)
    zero = ringlet.Zero(model, torch.optim.AdamW)
    with pytest.raises(ringlet.InvalidUsage, match=r"parameter group 0 was saved .* those of first.bias, second.bias"):
        dcp.load({"zero": zero}, checkpoint_id=folder)
    assert not (model.second.weight == 5.0).any(), "every rank has the loaded values, not its own shard's alone"


@on("two")
def test_no_step_and_no_checkpoint_of_half_written_values(rank, world):
    for stage in (1, 2, 3):
        zero = zero_of(make(), stage=stage, lr=1e-2)
        state = zero.state_dict()
        train_zero(zero, rank, 1)
        loss_of(zero.module, *batch(1, rank)).backward()
        with zero.gathered():
            for call in (zero.step, zero.state_dict, functools.partial(zero.load_state_dict, state)):
                refused(r"\(\) inside gathered\(\): call it after the `with`", call)
            if stage == 3:
                with pytest.raises(ringlet.InvalidUsage, match=r"gathered\(\) inside gathered\(\)"), zero.gathered():
                    pass
        assert zero.step()


@on("two")
def test_a_load_that_is_refused_keeps_what_was_written(rank, world):
    """Masters would be rounded over it."""
    zero = zero_of(make(), stage=1, dtype=torch.bfloat16, lr=1e-2)
    state = zero.state_dict()
    loss_of(zero.module, *batch(0, rank)).backward()
    with torch.no_grad():
        zero.module.positions.fill_(3.0)
    refused("with parameters written since", zero.load_state_dict, state)
    assert zero.module.positions.eq(3.0).all()


@on("two")
def test_states_of_another_rank_are_not_taken(rank, world, folder):
    """Loops that know only optimizers save rank 0's and load that on every rank."""
    zero = zero_of(make(), stage=1, lr=1e-2)
    train_zero(zero, rank, 2)
    own = zero.optimizer.state_dict()
    if rank == 0:
        torch.save(own, folder + "/optimizer")
    torch.distributed.barrier()
    kept = torch.load(folder + "/optimizer")
    other = zero_of(make(), stage=1, lr=1e-2)
    other.optimizer.load_state_dict(own)
    if rank == 0:
        return other.optimizer.load_state_dict(kept)
    for state, whose in ((kept, "rank 0's shards"), (torch.optim.AdamW(make().parameters()).state_dict(), "another")):
        refused(f"the states of {whose}.*, and this is rank 1's shards", other.optimizer.load_state_dict, state)


@on("two")
def test_a_whole_module_is_saved_by_itself(rank, world):
    """torch.save of the module itself."""
    for stage in (1, 2, 3):
        zero = zero_of(make(), stage=stage, lr=1e-2)
        train_zero(zero, rank, 1)
        file = io.BytesIO()
        if stage == 3:
            refused("whose values are in shards", torch.save, zero.module, io.BytesIO())
        with zero.gathered():
            torch.save(zero.module, file)
        assert b"ringlet." not in file.getvalue()  # no module of ringlet is needed to load it
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        before = parameters_of(zero)
        assert all(torch.equal(before[name], p) for name, p in loaded.named_parameters())
        loss_of(loaded, *batch(0, rank)).backward()  # by itself: no step() is due, and no peer is waited for
        assert all(p.grad is not None for p in loaded.parameters())
        train_zero(zero, rank, 1)


@on("two")
def test_a_part_of_the_module_is_saved_by_itself(rank, world):
    for stage in (1, 2, 3):
        zero = zero_of(make(), stage=stage, lr=1e-2)
        train_zero(zero, rank, 1)
        module = zero.module
        with zero.gathered(), torch.no_grad():
            for tensor in (*module.parameters(), *module.state_dict().values()):
                # torch.save writes the storage, and safetensors refuses tensors that share one
                assert tensor.untyped_storage().nbytes() == tensor.nbytes
            file = io.BytesIO()
            torch.save({"bias": module.blocks[0].out.bias}, file)
            assert len(file.getvalue()) < 4000
            file.seek(0)
            assert torch.equal(torch.load(file)["bias"], module.blocks[0].out.bias)
            if rank == 0:  # as averages of weights are loaded
                module.state_dict()["blocks.0.out.bias"].fill_(0.5)
        assert parameters_of(zero)["blocks.0.out.bias"].unique().tolist() == [0.5]
        with zero.gathered():
            loss = loss_of(module, *batch(0, rank))  # autograd saves what it used there
        loss.backward()
        zero.step()


@on("two")
@pytest.mark.parametrize(("stage", "dtype"), [(1, torch.float64), (2, torch.bfloat16), (3, torch.float64)])
def test_writes_inside_gathered_that_cannot_be_followed_are_refused(rank, world, stage, dtype):
    zero = zero_of(make(dtype), stage=stage, lr=1e-2)
    train_zero(zero, rank, 1)
    module, kept = zero.module, parameters_of(zero)
    for of in (lambda p: p, lambda p: p.data):
        told = pytest.raises(ringlet.InvalidUsage, match=r"parameter blocks.2.out.weight was changed .* not on rank 0")
        with told, zero.gathered(), torch.no_grad():
            if rank == 1:
                of(module.blocks[2].out.weight).zero_()
    after = parameters_of(zero)
    assert all(torch.equal(after[name], value) for name, value in kept.items())
    loss = loss_of(module, *batch(0, 0))
    with zero.gathered(), torch.no_grad():
        module.positions.zero_()
    with pytest.raises(
        (RuntimeError, ringlet.InvalidUsage), match=r"modified by an inplace|after step\(\) has updated"
    ):
        loss.backward()


@on("two")
def test_a_checkpoint_in_an_open_window_is_refused(rank, world):
    for stage in (1, 2, 3):
        model = make()
        zero, unbroken = (zero_of(model, stage=stage, accumulate=2, lr=1e-2) for _ in range(2))
        train_zero(unbroken, rank, 1, micro=2)
        loss_of(zero.module, *batch(0, rank)).backward()
        zero.step()
        refused(r"state_dict\(\) after 1 of 2 micro-batches", zero.state_dict)
        loss_of(zero.module, *batch(1, rank)).backward()  # the window goes on
        assert zero.step()
        zero.state_dict()
        expected = parameters_of(unbroken)
        assert all(torch.equal(expected[name], value) for name, value in parameters_of(zero).items())


@on("two")
def test_a_checkpoint_has_rank_0s_buffers(rank, world, folder):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.BatchNorm1d(8))
    zero = ringlet.Zero(model, torch.optim.AdamW, 2, lr=1e-2)
    zero.module(torch.randn(4, 8) + 10 * rank).square().mean().backward()
    zero.step()
    expected = {name: buffer.clone() for name, buffer in zero.module.named_buffers()}
    for buffer in expected.values():
        dist.broadcast(buffer, 0)
    dcp.save({"zero": zero}, checkpoint_id=folder)
    loaded = {name: torch.zeros_like(buffer) for name, buffer in expected.items()}
    dcp.load({"zero": {"model": loaded}}, checkpoint_id=folder)
    assert all(torch.equal(loaded[name], buffer) for name, buffer in expected.items())
