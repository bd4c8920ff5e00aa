"""A rank that dies, and an aborted group, through torch.distributed: the others get the named error from `Work.wait`,
works behind it raise too, `destroy_process_group` returns, and those that are left can start again. What the errors
say, and of ranks that stall, leave or make other calls, is in tests/core."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import ringlet
from ranks import on
from stalls import watched

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
PROMISE_SECONDS = 1.0
COUNT = 1 << 16

# An asynchronous call of each kind; root and peer is the last rank, which fails.
CALLS: dict[str, Callable[[int, int], dist.Work]] = {
    "all_reduce": lambda rank, world: dist.all_reduce(torch.ones(COUNT), async_op=True),
    "small": lambda rank, world: dist.all_reduce(torch.ones(3), async_op=True),
    "scatter": lambda rank, world: dist.scatter(
        torch.ones(COUNT), list(torch.ones(world, COUNT)) if rank == world - 1 else None, world - 1, async_op=True
    ),
    "barrier": lambda rank, world: dist.barrier(async_op=True),
    "irecv": lambda rank, world: dist.irecv(torch.ones(COUNT), world - 1),
    "isend": lambda rank, world: dist.isend(torch.ones(1 << 22), world - 1),  # more than fits on the way
}


@contextlib.contextmanager
def group(rank: int, world: int, store: str, seconds: float = 30) -> Iterator[None]:
    """A default group; that its end returns, whatever happened in it, is part of every test here."""
    limit = timedelta(seconds=seconds)
    dist.init_process_group("ringlet", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=limit)
    try:
        yield
    finally:
        dist.destroy_process_group()
        assert not dist.is_initialized()


def meeting(folder: str, world: int) -> dist.Store:
    """Where ranks tell each other how far a test is, beside the group that fails."""
    store = dist.FileStore(f"{folder}/others", world)
    store.set_timeout(timedelta(seconds=20))
    return store


def works_of(
    first: Callable[[int, int], dist.Work], rank: int, world: int, kind: type[ringlet.Error]
) -> list[dist.Work]:
    """The call's work, and one behind it, unless the group has failed by then: then the call raises at once."""
    works = [first(rank, world)]
    with contextlib.suppress(kind):
        works.append(CALLS["small"](rank, world))
    return works


def works_raise(works: list[dist.Work], kind: type[ringlet.Error]) -> str:
    """Every work raises the kind, again when asked again, and is complete; the first one's message."""
    texts = []
    for work in works:
        for _ in range(2):
            with pytest.raises(kind) as caught:
                work.wait()
        texts.append(str(caught.value))
        assert work.is_completed() and not work.is_success()
        if TORCH >= (2, 13):  # before, torch itself cannot convert it, of whatever backend
            assert isinstance(work.exception(), RuntimeError)
    return texts[0]


def begin_again(rank: int, world: int, store: str) -> None:
    """The ranks but the last make a group of their own."""
    with group(rank, world - 1, f"{store} of those left"):
        dist.all_reduce(tensor := torch.ones(10))
        assert tensor.tolist() == [world - 1.0] * 10


# --- a rank dies ----------------------------------------------------------------------------------------------------


def pass_together(rank: int, world: int, folder: str) -> None:
    """A barrier, after which the last rank returns when all have left it: who is still in it would hear there of a
    rank that dies."""
    dist.barrier()
    if rank == world - 1:
        meeting(folder, world).wait([f"passed {q}" for q in range(world - 1)])
    else:
        meeting(folder, world).set(f"passed {rank}", "")


def lose_a_peer(rank: int, world: int, folder: str, name: str) -> None:
    stamp = pathlib.Path(folder, "stamp")
    with group(rank, world, f"{folder}/store"):
        pass_together(rank, world, folder)
        if rank == world - 1:
            stamp.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        with watched() as stalls:
            works = works_of(CALLS[name], rank, world, ringlet.PeerLost)
            text = works_raise(works, ringlet.PeerLost)
        now, killed = time.monotonic(), float(stamp.read_text())
        late = now - killed - stalls.since(killed)
        assert late < PROMISE_SECONDS, f"PeerLost {late:.2f} s after the kill"
        assert f"the process of rank {world - 1} is gone" in text
        with pytest.raises(RuntimeError, match="is gone"):  # a Future keeps the message of an error, not its class
            works[0].get_future().wait()
        with pytest.raises(ringlet.PeerLost, match="this group failed before"):
            dist.all_reduce(torch.ones(3))
    begin_again(rank, world, f"{folder}/store")


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_dies(pool, tmp_path, name):
    outcomes = pool.run(lose_a_peer, 3, str(tmp_path), name, join="nothing")
    assert [outcome.kind for outcome in outcomes] == [None, None, "died"], "\n".join(map(str, outcomes))


def lose_a_peer_of_a_subgroup(rank: int, world: int, folder: str) -> None:
    """The group that the dead rank was in fails; another goes on."""
    with group(rank, world, f"{folder}/store"):
        pair = dist.new_group([0, 1])
        pass_together(rank, world, folder)
        if rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        works_raise([dist.all_reduce(torch.ones(COUNT), async_op=True)], ringlet.PeerLost)
        work = dist.all_reduce(tensor := torch.ones(COUNT), group=pair, async_op=True)
        assert work.wait() and tensor.unique().tolist() == [2.0]


def test_a_subgroup_without_the_dead_rank_goes_on(pool, tmp_path):
    outcomes = pool.run(lose_a_peer_of_a_subgroup, 3, str(tmp_path), join="nothing")
    assert [outcome.kind for outcome in outcomes] == [None, None, "died"], "\n".join(map(str, outcomes))


# --- the end of a group with works under way ------------------------------------------------------------------------


@on(3, "nothing")
def test_an_aborted_group(rank: int, world: int, folder: str) -> None:
    others = meeting(folder, world)
    with group(rank, world, f"{folder}/store"):
        if rank == 0:
            work = dist.all_reduce(torch.ones(COUNT), async_op=True)
            dist.group.WORLD.abort()
            works_raise([work], ringlet.PeerLost)
            others.set("aborted", "")
        else:
            others.wait(["aborted"])
            works_raise([dist.all_reduce(torch.ones(COUNT), async_op=True)], ringlet.PeerLost)
