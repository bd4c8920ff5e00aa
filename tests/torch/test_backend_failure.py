"""A rank that dies, and an aborted group, through torch.distributed: the others get the named error from `Work.wait`,
works behind it raise too, other groups go on, `destroy_process_group` returns, and those that are left can start again.
What the errors say, how soon they come, and ranks that stall, leave or make other calls are in tests/core.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import ringlet
from kills import only_died, pass_together
from ranks import on

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
COUNT = 1 << 16

# An asynchronous call; the peer is the last rank, which fails.
CALLS: dict[str, Callable[[int], dist.Work]] = {
    "all_reduce": lambda world: dist.all_reduce(torch.ones(COUNT), async_op=True),
    "irecv": lambda world: dist.irecv(torch.ones(COUNT), world - 1),
}


@contextlib.contextmanager
def group(rank: int, world: int, store: str) -> Iterator[None]:
    """A default group; that its end returns, whatever happened in it, is part of every test here."""
    limit = timedelta(seconds=30)
    dist.init_process_group("ringlet", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=limit)
    try:
        yield
    finally:
        dist.destroy_process_group()
        assert not dist.is_initialized()


def raises_peer_lost(work: dist.Work) -> str:
    """Again when asked again, and it is complete; the message."""
    for _ in range(2):
        with pytest.raises(ringlet.PeerLost) as caught:
            work.wait()
    assert work.is_completed() and not work.is_success()
    if TORCH >= (2, 13):  # before, torch itself cannot convert it, of whatever backend
        assert isinstance(work.exception(), RuntimeError)
    return str(caught.value)


def lose_a_peer(rank: int, world: int, folder: str, name: str) -> None:
    with group(rank, world, f"{folder}/store"):
        pair = dist.new_group([0, 1])
        pass_together(dist.barrier, rank, world, folder + "/passed")
        if rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        works = [CALLS[name](world)]
        with contextlib.suppress(ringlet.PeerLost):  # where the group has failed by then the call raises at once
            works.append(dist.all_reduce(torch.ones(3), async_op=True))
        texts = [raises_peer_lost(work) for work in works]
        assert f"the process of rank {world - 1} is gone" in texts[0]
        with pytest.raises(RuntimeError, match="is gone"):  # a Future keeps the message of an error, not its class
            works[0].get_future().wait()
        with pytest.raises(ringlet.PeerLost, match="this group failed before"):
            dist.all_reduce(torch.ones(3))
        work = dist.all_reduce(tensor := torch.ones(COUNT), group=pair, async_op=True)
        assert work.wait() and tensor.unique().tolist() == [2.0], "the dead rank was not in that group"
    with group(rank, world - 1, f"{folder}/store of those left"):
        dist.all_reduce(tensor := torch.ones(10))
        assert tensor.tolist() == [world - 1.0] * 10


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_dies(pool, tmp_path, name):
    only_died(pool.run(lose_a_peer, 3, str(tmp_path), name, join="nothing"), 2)


@on(3, "nothing")
def test_an_aborted_group(rank: int, world: int, folder: str) -> None:
    others = dist.FileStore(f"{folder}/others", world)
    with group(rank, world, f"{folder}/store"):
        if rank > 0:
            others.wait(["aborted"])
        work = dist.all_reduce(torch.ones(COUNT), async_op=True)
        if rank == 0:
            dist.group.WORLD.abort()
        raises_peer_lost(work)
        others.set("aborted", "")
