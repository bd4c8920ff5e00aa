"""What stays of groups that are closed: nothing; and groups whose close is refused stay open.

benchmarks/groups.py makes and closes thousands.
"""

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import ringlet
import stalls
from ranks import on
from ringlet import _C
from ringlet import group as groups


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


@on(2, "nothing")
@pytest.mark.parametrize("kind", ["group", "init", "c10d"])
def test_closed_groups_leave_nothing(rank, world, kind, path):
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
    assert [(h, d) for h, d in seen if h > heap + groups or d > descriptors + 6] == []


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


@on(2)
def test_a_group_whose_close_is_refused_stays_open(rank, world):
    group, refused = ringlet.current(), []

    def close(*_):
        for end in (group.close, ringlet.finalize):
            with pytest.raises(ringlet.InvalidUsage, match=r"close\(\) in a signal handler that interrupts a call"):
                end()
            refused.append(repr(group))

    if rank == 1:
        ringlet.recv(torch.ones(1), 0)  # the handler has run
        ringlet.send(torch.ones(4), 0)
    else:
        before = signal.signal(signal.SIGUSR1, close)
        work = ringlet.recv(torch.ones(4), 1, async_op=True)
        stalls.later(0.2, os.kill, os.getpid(), signal.SIGUSR1)
        while len(refused) < 2:
            with pytest.raises(ringlet.Timeout):
                work.wait(1.0)
        signal.signal(signal.SIGUSR1, before)
        ringlet.send(torch.ones(1), 1)
        work.wait()
    assert not any("closed" in text for text in refused) and len(refused) == 2 * (rank == 0)
    assert ringlet.all_reduce(torch.ones(1)).item() == world and ringlet.current() is group
    group.close(5)
    with pytest.raises(ringlet.InvalidUsage, match="on a group that was closed"):
        ringlet.all_reduce(torch.ones(1))
    ringlet.finalize()
    assert not groups.has_default()


@pytest.mark.parametrize("patience", [0, 0.5, 3, timedelta(0), timedelta(seconds=1)])
def test_the_patience_of_a_close_is_a_time_as_any_other(patience):
    group = ringlet.init(0, 1, transport="threads", name="patience")
    group.close(patience)
    assert repr(group).endswith("closed>")
    ringlet.finalize()


class Interrupted:
    """A handle whose close ends the group, and is interrupted."""

    def __init__(self, handle):
        self._handle = handle

    def close(self, patience):
        self._handle.close(patience)
        raise KeyboardInterrupt


def test_an_interrupted_finalize_ends_the_group():
    group = ringlet.init(0, 1, transport="threads", name="interrupted")
    group.handle, handle = Interrupted(group.handle), group.handle
    with pytest.raises(KeyboardInterrupt):
        ringlet.finalize()
    group.handle = handle
    assert not groups.has_default() and repr(group).endswith("closed>")
