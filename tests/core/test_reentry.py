"""What callbacks and signal handlers may do with a group while this thread is in one of its calls."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringlet
import stalls
from ranks import on

SOON_S = 30.0  # a wait that does not end ends here


class Stop(Exception):
    """What the handler raises in the end."""


def closed_by_a_handler(rank: int, world: int, path: str) -> str:
    """A handler closes the group while its thread waits for an asynchronous call, and is refused."""
    store = dist.FileStore(path, world)
    if rank == 1:
        store.wait(["refused"])
        return "refused"
    group, said = ringlet.current(), []

    def handler(*_: Any) -> None:
        with pytest.raises(ringlet.InvalidUsage) as refused:
            group.handle.close(timedelta(seconds=1))
        said.append(str(refused.value))
        raise Stop

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        stalls.later(0.3, os.kill, os.getpid(), signal.SIGUSR1)
        work = ringlet.all_reduce(torch.ones(4), async_op=True)
        with pytest.raises(Stop):
            work.wait(SOON_S)
    finally:
        signal.signal(signal.SIGUSR1, before)
        store.set("refused", "")
    return said[0]


@pytest.mark.parametrize("transport", ("shared_memory", "tcp"))
def test_a_handler_cannot_close_the_group_whose_call_it_interrupts(pool, tmp_path, transport):
    said = pool.values(closed_by_a_handler, 2, str(tmp_path / "store"), join=transport)[0]
    assert "close() in a signal handler that interrupts a call of the group" in said


def dropped_by_a_handler(rank: int, world: int, path: str) -> bool:
    """A handler drops the last reference to a group in whose message its thread waits."""
    store = dist.FileStore(path, world)
    if rank == 1:
        group = ringlet.new_group([0, 1])
        store.wait(["ended"])
        return group is not None
    held = [ringlet.new_group([0, 1])]
    work = ringlet.recv(torch.ones(4), 1, group=held[0], async_op=True)
    before = signal.signal(signal.SIGUSR1, lambda *_: held.clear())
    try:
        stalls.later(0.3, os.kill, os.getpid(), signal.SIGUSR1)
        with pytest.raises(ringlet.Error):
            work.wait(SOON_S)
    finally:
        signal.signal(signal.SIGUSR1, before)
        store.set("ended", "")
    return not held


def test_a_handler_may_drop_the_group_whose_message_it_interrupts(pool, tmp_path):
    assert pool.values(dropped_by_a_handler, 2, str(tmp_path / "store"), join="shared_memory") == [True, True]


@on("two")
@pytest.mark.parametrize("whole", ("strided", "uneven"))
def test_a_callback_may_wait_for_a_later_call_that_runs_in_one_go(rank: int, world: int, whole: str) -> None:
    """The callback of a call waits for the next one, which runs in one go."""
    for _ in range(5):
        dist.barrier()
        first = dist.all_reduce(torch.ones(4), async_op=True)
        if whole == "strided":
            taken = torch.ones(8)[::2]
            second = dist.all_reduce(taken, async_op=True)
        else:
            taken = torch.empty(world * (rank + 1))
            second = dist.all_to_all_single(
                taken, torch.full((sum(range(1, world + 1)),), 2.0),
                [rank + 1] * world, list(range(1, world + 1)), async_op=True,
            )  # fmt: skip
        told = first.get_future().then(lambda _, second=second: second.wait(timedelta(seconds=SOON_S)))
        first.wait()
        told.wait()
        second.wait()
        assert taken.eq(2).all()


def failing(call: Callable[[], Any]) -> str:
    """The name of the error; the error itself would keep the tensor, which is in its traceback."""
    try:
        call()
    except ringlet.Error as error:
        return type(error).__name__
    return "none"


@on(2, "threads")
def test_a_thread_does_not_read_what_another_has_freed(rank: int, world: int, path: str) -> None:
    """Rank 0 gives up and frees its tensor; rank 1 comes late, and would read it."""
    store = dist.FileStore(path, world)
    held = [torch.ones(16 << 20)]  # so large that free() unmaps it
    if rank == 1:
        store.wait(["freed"])
    found = failing(lambda: ringlet.all_reduce(held[0], timeout=0.3 if rank == 0 else SOON_S))
    held.clear()
    if rank == 0:
        store.set("freed", "")
        store.wait(["read"])
    else:
        store.set("read", "")
    assert found == "Timeout"


def aborted_reader(rank: int, world: int, call: str) -> str:
    """Rank 0 aborts, and frees its tensor, while rank 1 reads it."""
    held = [torch.ones(24 << 20)]
    if rank == 0:
        threading.Timer(0.05, ringlet.current().abort, ("enough",)).start()

    def transfer() -> None:
        while True:
            if call == "all_reduce":
                ringlet.all_reduce(held[0])
            else:
                (ringlet.send if rank == 0 else ringlet.recv)(held[0], 1 - rank)

    found = failing(transfer)
    held.clear()
    return found


@pytest.mark.parametrize("call", ("all_reduce", "send"))
def test_a_thread_does_not_free_what_another_reads(pool, call):
    for _ in range(3):
        assert pool.values(aborted_reader, 2, call, join="threads") == ["PeerLost", "PeerLost"]
