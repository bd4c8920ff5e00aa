"""Groups of ringlet and of torch.distributed stand for each other, wherever one is asked for."""

import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ringlet
from ranks import leave_torch, on
from refusals import refused
from ringlet.group import has_default


def summed(world):
    return world * (world + 1) / 2


def train_on(group, rank, world):
    """A step of the reducer and one of Zero; the gradient's average of ranks that saw rank + 1."""
    for make in (ringlet.GradientReducer, lambda model, **of: ringlet.Zero(model, torch.optim.SGD, lr=1.0, **of)):
        model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        trainer = make(model, group=group)
        model(torch.full((1, 1), float(rank + 1))).sum().backward()
        if isinstance(trainer, ringlet.GradientReducer):
            assert model.weight.grad.item() == summed(world) / world
        else:
            trainer.step()
            assert model.weight.item() == -summed(world) / world


@on(3, "shared_memory", "tcp")
def test_a_group_is_one_of_torch_distributed(rank, world):
    assert not dist.is_initialized()
    train_on(None, rank, world)
    made = ringlet.current().process_group()
    assert made is dist.group.WORLD and ringlet.current().process_group() is made
    value = torch.full((3,), float(rank + 1))
    dist.all_reduce(value)
    assert value.tolist() == [summed(world)] * 3
    train_on(ringlet.current(), rank, world)
    if world > 2:
        part = ringlet.new_group([0, 2])
        if rank in (0, 2):
            refused(r"torch\.distributed\.new_group", part.process_group)
            part.close()
    ringlet.finalize()
    assert not dist.is_initialized()


@on(2)
def test_the_world_that_a_user_makes_instead_stays_the_users(rank, world, path):
    """ringlet's own may be destroyed, and another made."""
    group = ringlet.current()
    made = group.process_group()
    dist.destroy_process_group()
    again = group.process_group()
    assert again is not made and again is dist.group.WORLD
    dist.all_reduce(value := torch.ones(3))
    assert value.tolist() == [world] * 3
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(path, world), rank=rank, world_size=world)
    users = dist.group.WORLD
    assert group.process_group() is users
    ringlet.finalize()
    assert dist.group.WORLD is users
    leave_torch("gloo")


@on(2)
def test_an_interrupted_close_leaves_torch_distributed_too(rank, world):
    group = ringlet.current()
    group.process_group()

    def interrupted(patience, close=group.handle.close):
        close(patience)
        raise KeyboardInterrupt

    with mock.patch.object(group, "handle", mock.Mock(close=interrupted)), pytest.raises(KeyboardInterrupt):
        ringlet.finalize()
    assert not dist.is_initialized() and not has_default() and repr(group).endswith("closed>")


@on(2, "dist:gloo")
def test_the_group_of_a_destroyed_one_refuses_to_be_one(rank, world):
    pair = dist.new_group([0, 1])
    group = ringlet.Group.of(pair)
    assert group.process_group() is pair
    dist.destroy_process_group(pair)
    refused("process_group: its group of torch.distributed was destroyed", group.process_group)


@on(3, "dist:gloo", "dist:ringlet")
def test_a_group_of_torch_distributed_is_one_of_ringlet(rank, world):
    value = torch.full((3,), float(rank + 1))
    ringlet.ring_allreduce(value)
    assert value.tolist() == [summed(world)] * 3
    pair = dist.new_group([0, 1])
    if rank < 2:
        value = torch.full((3,), float(rank + 1))
        ringlet.all_reduce(value, group=pair)
        assert value.tolist() == [3.0] * 3 and ringlet.Group.of(pair) is ringlet.Group.of(pair)
        assert ringlet.Group.of(pair).ranks == (0, 1)
    else:
        refused("not a member", ringlet.all_reduce, value, group=pair)
    train_on(ringlet.Group.of(dist.group.WORLD), rank, world)
    ringlet.finalize()
    assert dist.is_initialized()


@on(2, "threads")
def test_threads_have_no_group_of_torch_distributed(rank, world):
    refused("ranks are threads", lambda: ringlet.current().process_group())
    refused("GradientReducer: group is a str", ringlet.GradientReducer, nn.Linear(1, 1), group="all")


@pytest.mark.parametrize(
    ("error", "caught"),
    [
        (ringlet.Error, (dist.DistError, RuntimeError)),
        (ringlet.InvalidUsage, (ringlet.Error, ValueError)),
        (ringlet.PeerLost, (ringlet.Error, dist.DistBackendError, ConnectionError)),
        (ringlet.Timeout, (ringlet.Error, dist.DistBackendError, TimeoutError)),
    ],
)
def test_an_error_is_what_programs_for_torch_catch(error, caught):
    again = pickle.loads(pickle.dumps(error("rank 1 is gone")))
    assert str(again) == "rank 1 is gone" and type(again) is error and all(isinstance(again, one) for one in caught)
