"""What stays of groups that are closed: nothing. benchmarks/groups.py makes and closes thousands."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

import ringlet
from ringlet import _C


def made_and_closed(kind, rank, world, store):
    if kind == "group":
        group = ringlet.new_group(range(world))
        ringlet.all_reduce(torch.ones(1000), group=group)
        group.close()
    elif kind == "init":
        ringlet.init(rank, world, store, transport="shared_memory", timeout=60)
        ringlet.all_reduce(torch.ones(1000))
        ringlet.finalize()
    else:
        dist.init_process_group("ringlet", store=store, rank=rank, world_size=world)
        dist.all_reduce(torch.ones(1000))
        dist.destroy_process_group()


def what_groups_leave(rank, world, kind, path):
    store = dist.FileStore(path, world)
    if kind == "group":
        ringlet.init(rank, world, store, transport="shared_memory", timeout=60)
    seen = []
    for cycle in range(30):
        made_and_closed(kind, rank, world, store)
        if cycle >= 9:
            seen.append((_C.heap()["allocated_bytes"], len(os.listdir("/proc/self/fd"))))
    if kind == "group":
        ringlet.finalize()
    (heap, descriptors), groups = seen[0], 2 * (6 << 20)  # the last may still be held by a peer that is not as far
    return [(h, d) for h, d in seen if h > heap + groups or d > descriptors + 6]


@pytest.mark.parametrize("kind", ["group", "init", "c10d"])
def test_closed_groups_leave_nothing(pool, tmp_path, kind):
    assert pool.values(what_groups_leave, 2, kind, str(tmp_path / "store"), join="nothing") == [[], []]


def closed_after_a_kill(rank, world, path):
    """A peer that was killed never departs; its end gives this rank's range back."""
    ringlet.init(0, 1, dist.HashStore(), transport="shared_memory")  # makes the heap
    ringlet.finalize()
    before = _C.heap()["allocated_bytes"]
    ringlet.init(rank, world, dist.FileStore(path, world), transport="shared_memory", timeout=20)
    ringlet.all_reduce(torch.ones(10))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ringlet.PeerLost):
        ringlet.all_reduce(torch.ones(10))
        ringlet.all_reduce(torch.ones(10))
    ringlet.finalize()
    return _C.heap()["allocated_bytes"] - before


def test_a_killed_peer_holds_nothing(pool, tmp_path):
    outcome = pool.run(closed_after_a_kill, 2, str(tmp_path / "store"), join="nothing")[0]
    assert outcome.kind is None and outcome.value <= 0, outcome
