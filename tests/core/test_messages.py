"""Point-to-point messages: tags, any source, many at once, and what happens to those that are never received."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import ringlet
from ranks import on


def value(count: int, number: int) -> torch.Tensor:
    return torch.full((count,), float(number))


@on((2, 3), "dist:ringlet")
def test_messages_move_by_themselves(rank: int, world: int, path: str) -> None:
    """Messages move while their ranks are elsewhere, and handles may be dropped."""
    shared = dist.FileStore(path, world)
    if rank == 0:
        dist.isend(value(500_000, 4), 1)
        shared.wait(["received"])
    elif rank == 1:
        work = dist.irecv(got := value(500_000, -1), 0)
        future = work.get_future()
        del work
        assert torch.equal(future.wait()[0], value(500_000, 4)) and torch.equal(got, value(500_000, 4))
        shared.set("received", "")
    dist.barrier()


@on(2, "dist:ringlet")
def test_a_receive_from_anyone_times_out(rank: int, world: int, path: str) -> None:
    shared = dist.FileStore(path, world)
    if rank == 1:
        shared.wait(["timed out"])
        return
    dist.group.WORLD.set_timeout(timedelta(seconds=0.5))
    work = dist.irecv(torch.empty(3), tag=5)
    said = r"recv from any rank \(3 elements of float32, tag 5\).* waited 0.5 s for any rank"
    with pytest.raises(ringlet.Timeout, match=said):
        work.wait()
    with pytest.raises(ringlet.Timeout, match="this group failed before"):
        dist.send(torch.empty(3), 1)
    shared.set("timed out", "")


@on(3, "dist:ringlet")
def test_the_monitored_barrier_names_who_is_missing(rank: int, world: int, path: str) -> None:
    shared = dist.FileStore(path, world)
    ringlet.monitored_barrier()
    ringlet.monitored_barrier(timeout=10.0, wait_all_ranks=True)
    if rank == 1:
        shared.wait([f"told {q}" for q in range(world) if q != 1])
    else:
        said = {
            0: "Rank 1 failed to pass monitoredBarrier after 3000 ms",
            2: "Rank 2 successfully reached monitoredBarrier, but received errors",
        }[rank]
        with pytest.raises(ringlet.Timeout, match=said):
            ringlet.monitored_barrier(timeout=3.0, wait_all_ranks=True)
        shared.set(f"told {rank}", "")
    dist.all_reduce(torch.ones(3))  # the group is not poisoned


@on(2, "dist:ringlet")
def test_the_monitored_barrier_leaves_no_more_keys_with_every_call(rank: int, world: int, path: str) -> None:
    store = dist.distributed_c10d._get_default_store()
    keys = []
    for _ in range(6):
        ringlet.monitored_barrier()
        dist.barrier()
        keys.append(store.num_keys())
        dist.barrier()
    assert keys[-1] <= keys[1], keys


@on(2, "dist:ringlet")
def test_the_monitored_barrier_counts_nobody_who_gave_up(rank: int, world: int, path: str) -> None:
    shared = dist.FileStore(path, world)
    if rank == 0:
        shared.wait(["gave up"])
    said = "rank 0 said nothing" if rank else "Rank 1 failed to pass monitoredBarrier"
    with pytest.raises(ringlet.Timeout, match=said):
        ringlet.monitored_barrier(timeout=0.2)
    if rank == 1:
        shared.set("gave up", "")


@on(3, "dist:ringlet")
def test_the_monitored_barrier_looks_again_at_who_was_there(rank: int, world: int, path: str) -> None:
    """Rank 0 sees rank 1, which gives up before rank 2 comes."""
    shared = dist.FileStore(path, world)
    if rank == 2:
        shared.wait(["gave up"])
    with pytest.raises(ringlet.Timeout, match="" if rank == 1 else "Rank 1 failed to pass monitoredBarrier"):
        ringlet.monitored_barrier(timeout=0.2 if rank == 1 else 1.5)
    if rank == 1:
        shared.set("gave up", "")
