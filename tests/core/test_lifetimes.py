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
from ranks import on


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


@on(2, "dist:ringlet")
@pytest.mark.parametrize("name", BUILDS)
def test_a_dropped_module_takes_its_reducer_and_group_along(rank: int, world: int, name: str) -> None:
    """A thread that completed a call may be the last to let go."""
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
        if not left:
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


@on(3, "tcp")
def test_a_group_leaves_no_key_in_the_store(rank: int, world: int) -> None:
    store, keys = ringlet.current().store, []
    for _ in range(4):
        group = ringlet.new_group([2, 0, 1])
        ringlet.all_reduce(torch.ones(3), group=group)
        group.close()
        ringlet.barrier()
        keys.append(store.num_keys())
        ringlet.barrier()
    assert keys == keys[:1] * 4
