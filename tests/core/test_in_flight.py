"""What a call reads or writes stays where it is until the call is complete, whatever the program does to the tensor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import ringlet
from ranks import on

LIMIT_SECONDS = 60


def refuses_to_resize(tensor: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.detach().resize_(1 << 22)  # which torch leaves with those sizes
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.untyped_storage().resize_(0)


def exchange(tensor: torch.Tensor, how: str) -> None:
    if how == "data":
        tensor.data = torch.zeros(5)
    else:
        tensor.set_(torch.zeros(5))


@on(2, "shared_memory", "tcp")
def test_memory_of_asynchronous_calls(rank: int, world: int, folder: str) -> None:
    """Rank 0's calls are under way, and wait for the others, while it tries to take the memory away."""
    store = dist.FileStore(f"{folder}/store", world)
    for how, count, copies in (("data", 100, False), ("set", 1 << 18, False), ("data", 1 << 10, True)):
        key = f"{how} {count} {copies}"
        whole = torch.full((2 * count,), float(rank + 1))
        tensor = whole[::2] if copies else whole[:count]
        peer = torch.full((count,), float(rank + 1))
        view, received = tensor.detach(), peer.detach()
        if rank > 0:
            store.wait([key])
        works = [ringlet.all_reduce(tensor, async_op=True)]
        works += [ringlet.broadcast(tensor, 0, async_op=True)]
        transfer = ringlet.send if rank else ringlet.recv
        works += [transfer(peer, 1 - rank, async_op=True), transfer(peer, 1 - rank, async_op=True)]
        if rank == 0:
            refuses_to_resize(view)
            refuses_to_resize(peer)
            if not copies:
                exchange(tensor, how)
            exchange(peer, how)
            store.set(key, "")
        for work in works:
            work.wait()
        assert view.unique().tolist() == [world * (world + 1) / 2] and received.unique().tolist() == [2]
        whole.resize_(1 << 22)  # the caller's again when wait() has returned


@on(2, "shared_memory", "tcp")
def test_memory_of_a_call_of_another_thread(rank: int, world: int, folder: str) -> None:
    """The same of a call that its own thread waits for."""
    store = dist.FileStore(f"{folder}/store", world)
    calls: dict[str, tuple[int, Callable[[torch.Tensor], object]]] = {
        "small": (10, ringlet.all_reduce),
        "large": (1 << 18, ringlet.all_reduce),
        "list": (10, lambda tensor: ringlet.all_gather(list(tensor.view(world, -1)), torch.ones(10 // world))),
        "message": (10, lambda tensor: ringlet.send(tensor, 0) if rank else ringlet.recv(tensor, 1)),
    }
    for key, (count, call) in calls.items():
        tensor = torch.ones(count)
        if rank == 0:
            thread = threading.Thread(target=call, args=(tensor,))
            thread.start()
            until = time.monotonic() + LIMIT_SECONDS
            while tensor.untyped_storage().resizable() and time.monotonic() < until:
                pass
            refuses_to_resize(tensor)
            store.set(key, "")
            thread.join()
        else:
            store.wait([key])
            call(tensor)
        tensor.resize_(1 << 20)


@on("two")
def test_memory_in_flight_through_torch(rank: int, world: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", world)
    tensor, blocks, peer = torch.ones(100), [torch.zeros(3) for _ in range(world)], torch.ones(7)
    if rank > 0:
        store.wait(["tried"])
    works = [dist.all_reduce(tensor, async_op=True), dist.all_gather(blocks, torch.ones(3), async_op=True)]
    works += [dist.irecv(peer, 1) if rank == 0 else dist.isend(peer, 0)]
    if rank == 0:
        for one in (tensor, blocks[1], peer):
            refuses_to_resize(one)
        store.set("tried", "")
    for work in works:
        work.wait()
    assert tensor.unique().tolist() == [world]
    for one in (tensor, *blocks, peer):
        one.resize_(1000)


@on(2, "shared_memory", "tcp")
def test_memory_that_processes_share(rank: int, world: int, folder: str) -> None:
    """Of memory that share_memory_() has moved torch knows no allocator, and can make it resizable no more."""
    tensor = torch.ones(100)
    tensor.share_memory_()
    ringlet.all_reduce(tensor)
    ringlet.all_reduce(tensor, async_op=True).wait()
    assert tensor.unique().tolist() == [world**2]


@on(2, "shared_memory", "tcp")
def test_memory_moved_to_shared_memory(rank: int, world: int, folder: str) -> None:
    """A mistake that nothing can refuse: torch frees the memory that the call reads."""
    store = dist.FileStore(f"{folder}/moved", world)
    tensor = torch.ones(100)
    if rank == 0:
        work = ringlet.reduce(tensor, 1, async_op=True)
        tensor.share_memory_()
        store.set("moved", "")
        work.wait()
    else:
        store.wait(["moved"])
        ringlet.reduce(tensor, 1)
    ringlet.barrier()


def failing(call: Callable[[], object]) -> str:
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
    found = failing(lambda: ringlet.all_reduce(held[0], timeout=0.3 if rank == 0 else LIMIT_SECONDS))
    held.clear()
    if rank == 0:
        store.set("freed", "")
        store.wait(["read"])
    else:
        store.set("read", "")
    assert found == "Timeout"


@on(2, "threads")
@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("call", ("all_reduce", "send"))
def test_a_thread_does_not_free_what_another_reads(rank: int, world: int, call: str, turn: int) -> None:
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
    assert found == "PeerLost"
