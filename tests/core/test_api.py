"""The public surface: names, docstrings, errors, registered tensors, a world of one; and an import does nothing."""

from __future__ import annotations

import inspect
import re
import sys
import types

import numpy
import pytest
import torch
import torch.distributed as dist

import ringlet
from exact_data import DTYPES
from programs import printed
from ranks import on
from refusals import refused


def test_every_public_name_is_there_and_documented():
    assert len(set(ringlet.__all__)) == len(ringlet.__all__)
    for name in ringlet.__all__:
        thing = getattr(ringlet, name)
        assert inspect.getdoc(thing), f"ringlet.{name} has no docstring"
        for member, value in vars(thing).items() if inspect.isclass(thing) else ():
            if not member.startswith("_") and callable(value) and thing.__module__.startswith("ringlet"):
                assert inspect.getdoc(value), f"ringlet.{name}.{member} has no docstring"


def test_errors_are_one_tree():
    kinds = [ringlet.InvalidUsage, ringlet.PeerLost, ringlet.Timeout, ringlet.ResourceError, ringlet.DeviceError]
    assert all(issubclass(kind, ringlet.Error) for kind in kinds) and issubclass(ringlet.Error, RuntimeError)
    assert issubclass(ringlet.InvalidUsage, ValueError)
    for kind in kinds:
        assert not any(issubclass(kind, other) for other in kinds if other is not kind)
        assert kind.__module__ == "ringlet.errors" and kind.__doc__


def test_empty_is_registered_memory():
    for dtype in DTYPES:
        for size in ((), (0,), (7,), (3, 4), (2, 0, 5)):
            tensor = ringlet.empty(size, dtype=dtype)
            assert (
                tensor.shape == size and tensor.dtype == dtype and tensor.is_contiguous() and not tensor.requires_grad
            )
            assert ringlet.is_registered(tensor) or tensor.numel() == 0  # which has no address in torch
    assert ringlet.empty(2, 3).shape == (2, 3) and ringlet.empty([2, 3]).shape == (2, 3)
    assert ringlet.empty(torch.Size([4])).dtype == torch.get_default_dtype()
    assert ringlet.empty(1 << 20).data_ptr() % (2 << 20) == 0, "large ones lie on huge pages"
    assert ringlet.empty(1).data_ptr() % 64 == 0


@on(1, "threads")
def test_empty_refuses_a_dtype_that_no_call_takes(rank: int, world: int) -> None:
    """empty makes tensors of exactly those dtypes that calls take."""
    dtypes = {thing for thing in vars(torch).values() if isinstance(thing, torch.dtype)}
    assert len(dtypes) > len(DTYPES)
    for dtype in dtypes:
        try:
            ringlet.broadcast(torch.empty(3, dtype=dtype))
        except ringlet.InvalidUsage:
            refused(rf"empty: no call takes {dtype}: choose one of float64, fl", ringlet.empty, 3, dtype=dtype)
        else:
            assert ringlet.empty(3, dtype=dtype).dtype == dtype


def test_what_counts_as_registered():
    tensor = ringlet.empty(10, 10)
    assert ringlet.is_registered(tensor[2:5]) and ringlet.is_registered(tensor.view(-1)[7:])
    assert ringlet.is_registered(tensor.numpy()) and not ringlet.is_registered(tensor.clone())
    assert not ringlet.is_registered(torch.ones(3)) and not ringlet.is_registered(numpy.ones(3))
    parameter = torch.nn.Parameter(tensor)
    (parameter.sum() * 2).backward()
    assert ringlet.is_registered(parameter) and parameter.grad.unique().tolist() == [2.0]


def test_registered_memory_is_given_back():
    before = ringlet._C.heap()["allocated_bytes"]
    kept = [ringlet.empty(1000 * i) for i in range(50)]
    view = kept[30][5:]
    assert ringlet._C.heap()["allocated_bytes"] >= before + 4 * 1000 * sum(range(50))
    del kept
    view.fill_(1)  # a view keeps its block
    assert ringlet._C.heap()["allocated_bytes"] - before >= 4 * 30_000
    del view
    assert ringlet._C.heap()["allocated_bytes"] == before


def test_import_does_nothing_but_register_the_backend():
    program = """
import os, threading
import torch, torch.distributed, numpy
def state():
    links = []
    for entry in os.listdir("/proc/self/fd"):
        try: links.append(os.readlink(f"/proc/self/fd/{entry}"))
        except FileNotFoundError: pass
    return len(os.listdir("/proc/self/task")), threading.active_count(), sorted(l for l in links if "/proc" not in l)
before = state()
import ringlet
assert state() == before, (before, state())
assert "ringlet-heap" not in open("/proc/self/maps").read()
assert torch.distributed.Backend.RINGLET == "ringlet"
assert torch.distributed.Backend.default_device_backend_map["cpu"] == "gloo", "the default stays"
from ringlet import backend
backend.register()
"""
    printed(sys.executable, "-c", program)


@on(1, "nothing")
def test_a_world_of_one_needs_nothing(rank: int, world: int) -> None:
    group = ringlet.init(0, 1)
    assert ringlet.ring_allreduce(torch.arange(3.0)).tolist() == [0, 1, 2]
    assert repr(group) == "<ringlet.Group 'default': rank 0 of 1, shared_memory>"
    ringlet.finalize()


@on(1, "shared_memory", "threads")
def test_world_of_one(rank: int, world: int) -> None:
    values = torch.tensor([3.0, -1.0])
    assert ringlet.all_reduce(values) is values and values.tolist() == [3.0, -1.0]
    assert ringlet.all_reduce(values, "avg").tolist() == [3.0, -1.0]
    assert ringlet.all_reduce(values.clone(), "premul_sum", scale=2.0).tolist() == [6.0, -2.0]
    other = torch.zeros(2)
    assert ringlet.all_reduce(values, output=other) is other and other.tolist() == [3.0, -1.0]
    assert ringlet.ring_allreduce(values) is values and ringlet.butterfly_allreduce(values, op="max") is values
    array = numpy.array([1, 2])
    assert ringlet.all_reduce(array).tolist() == [1, 2]
    work = ringlet.all_reduce(values, async_op=True)
    assert isinstance(work, ringlet.Work)
    work.wait()
    for named in ({"op": "max"}, {"algorithm": "ring", "op": "sum"}, {"timeout": 5}):
        assert isinstance(ringlet.all_reduce(values, async_op=1, **named), ringlet.Work)
        assert isinstance(ringlet.all_reduce(values, async_op=True, **named), ringlet.Work)
        assert ringlet.all_reduce(values, async_op=False, **named) is values
    ringlet.all_reduce(values, async_op=True).wait()
    values.resize_(2)  # no call holds its memory any more
    ringlet.barrier()
    refused("send: peer must be a rank", ringlet.send, values, 0)
    group = ringlet.new_group([0])
    assert ringlet.all_reduce(values, group=group) is values
    refused("min is not defined for complex64", ringlet.all_reduce, torch.ones(1, dtype=torch.complex64), "min")


@on(3, "shared_memory", "threads")
def test_a_group_refuses_ranks_that_are_no_members(rank: int, world: int) -> None:
    group = ringlet.new_group([1, 2])
    if rank == 0:
        assert group == dist.GroupMember.NON_GROUP_MEMBER
        x, both = torch.zeros(2), [torch.zeros(1), torch.zeros(1)]
        for name, arguments in {
            "all_reduce": [x],
            "reduce_scatter": [both[0], x],
            "all_gather": [both, both[0]],
            "broadcast": [x],
            "reduce": [x],
            "gather": [None, x],
            "scatter": [x, None],
            "all_to_all": [x, x.clone()],
            "barrier": [],
            "send": [x, 1],
            "recv": [x, 1],
        }.items():
            with pytest.raises(ringlet.InvalidUsage, match=f"^{name}: this rank is not a member of the group"):
                getattr(ringlet, name)(*arguments, group=group)
    else:
        assert (group.rank, group.world, group.ranks) == (rank - 1, 2, (1, 2))
        assert ringlet.all_reduce(torch.ones(2), group=group).tolist() == [2, 2]
    assert ringlet.all_reduce(torch.full((2,), float(rank))).tolist() == [3, 3]


@on(2)
def test_handles_tell_their_state(rank: int, world: int, path: str) -> None:
    group = ringlet.current()
    if rank == 1:
        dist.FileStore(path, world).wait(["said"])
    work = ringlet.all_reduce(torch.ones(4), "max", async_op=True)
    transfer = ringlet.recv if rank else ringlet.send
    message = transfer(torch.ones(2), 1 - rank, async_op=True)
    if rank == 0:
        said = repr(work)
        assert re.fullmatch(
            r"<ringlet.Work all_reduce #0 \(auto, max, float32, 4 elements\): pending for \d+\.\d s>", said
        ), said
        dist.FileStore(path, world).set("said", "")
    work.wait()
    message.wait()
    assert repr(work) == "<ringlet.Work all_reduce #0 (auto, max, float32, 4 elements): complete>"
    assert repr(message).endswith("(2 elements of float32): complete>")
    wrong = ringlet.all_reduce(torch.ones(4 + rank), async_op=True)
    with pytest.raises(ringlet.InvalidUsage):
        wrong.wait()
    assert ": failed: InvalidUsage: " in repr(wrong) and repr(group).endswith(", failed (InvalidUsage)>")


def test_options_tell_what_they_are():
    options = ringlet.BackendOptions(algorithm="ring")
    assert repr(options) == "<ringlet.BackendOptions: algorithm 'ring', transport 'auto', max_ctas 0>"


def test_dir_shows_the_public_names_only():
    assert dir(ringlet) == sorted(ringlet.__all__)


@on(2, "shared_memory", "threads")
def test_what_calls_return(rank: int, world: int) -> None:
    values = torch.ones(world)
    assert ringlet.all_reduce(values) is values
    assert ringlet.all_reduce(values, op="max", algorithm="ring") is values
    output = torch.zeros(1)
    assert ringlet.reduce_scatter(output, values) is output
    assert ringlet.all_gather(values, output) is values
    assert ringlet.broadcast(values) is values and ringlet.reduce(values) is values
    assert ringlet.gather(values if rank == 0 else None, output) is (values if rank == 0 else None)
    assert ringlet.scatter(output, values if rank == 0 else None) is output
    assert ringlet.all_to_all(values, values.clone()) is values
    assert ringlet.barrier() is None
    array = numpy.ones(3, dtype="float32")
    assert isinstance(ringlet.all_reduce(array), torch.Tensor) and array.tolist() == [float(world)] * 3
    with pytest.raises(TypeError):
        ringlet.all_reduce(values, "sum", "ring")
    with pytest.raises(TypeError):
        ringlet.all_reduce(values, operation="sum")
    grad = torch.ones(4, requires_grad=True)
    with torch.no_grad():
        assert ringlet.all_reduce(grad).tolist() == [float(world)] * 4


def test_the_shortcut_keeps_its_text():
    """all_reduce is a C function for the plain call; help() still sees Python's."""
    assert "every rank gets the same bits" in inspect.getdoc(ringlet.all_reduce)


def test_a_call_finds_its_function_at_once() -> None:
    """CPython looks names up slowly, call after call, in a module that has a __getattr__."""
    assert "__getattr__" not in vars(ringlet)
    assert type(ringlet) is types.ModuleType
