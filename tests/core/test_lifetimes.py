"""What goes when its last user goes: reducers and ZeRO, with the module, its gradients and the group's connections."""

import gc
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import ringlet


def hooked(model, group):
    return ringlet.GradientReducer(model, group=group).register_comm_hook(None, allreduce_hook)


def zero(stage):
    return lambda model, group: ringlet.Zero(model, torch.optim.Adam, stage, group=group)


BUILDS = {
    "reducer": lambda model, group: ringlet.GradientReducer(model, group=group),
    "reducer with a hook": hooked,
    "gradient merge": lambda model, group: ringlet.GradientReducer(model, group=group).accumulate(2),
    "delay": lambda model, group: ringlet.GradientReducer(model, group=group, delay=1),
    "zero 1": zero(1),
    "zero 2": zero(2),
    "zero 3": zero(3),
}


def what_stays(rank: int, world: int, name: str) -> list[str]:
    """Trains, lets go of everything, and tells what does not go. A thread that completed a call may be the last to."""
    group = dist.new_group(range(world))
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    watched = {"module": weakref.ref(model), "parameter": weakref.ref(model[0].weight), "group": weakref.ref(group)}
    built = BUILDS[name](model, group)
    model(torch.ones(2, 4)).sum().backward()
    dist.destroy_process_group(group)
    del model, built, group
    deadline = time.monotonic() + 10
    while True:
        gc.collect()
        left = [what for what, reference in watched.items() if reference() is not None]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)


@pytest.mark.parametrize("name", BUILDS)
def test_a_dropped_module_takes_its_reducer_and_group_along(pool, name):
    assert pool.values(what_stays, 2, name, join="dist:ringlet") == [[], []]


def a_gradient_after_the_reducer(rank: int, world: int) -> str:
    part = nn.Linear(4, 3)
    ringlet.GradientReducer(nn.Sequential(part))  # nobody keeps the module that was given
    gc.collect()
    try:
        part(torch.ones(2, 4)).sum().backward()
    except ringlet.InvalidUsage as error:
        return str(error)
    return ""


def test_a_gradient_whose_reducer_is_gone_is_refused(pool):
    for said in pool.values(a_gradient_after_the_reducer, 2, join="dist:ringlet"):
        assert "of shape [" in said and "its GradientReducer or Zero is gone" in said
