"""What one rank of an emulated host runs for test_across_hosts.py: `across_hosts.py JOB`, in torchrun's environment."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import ringlet


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def sums() -> None:
    """All algorithms and sizes; then how this rank was connected."""
    group = ringlet.init(timeout=timedelta(seconds=60))
    wrong = []
    expected = sum(range(1, group.world + 1))
    names = [name for name, collective, _ in ringlet.schedule.algorithms() if collective == "all_reduce"]
    for algorithm in ("auto", *names):
        for count in (1, 1000, 300_001):
            tensor = torch.full((count,), float(group.rank + 1))
            ringlet.all_reduce(tensor, algorithm=algorithm)
            if not bool((tensor == expected).all()):
                wrong.append((algorithm, count))
    say(rank=group.rank, transport=group.transport, hosts=group.hosts, wrong=wrong)


def until_it_fails() -> None:
    """All-reduces without end, and what ended them."""
    group = ringlet.init(timeout=timedelta(seconds=60))
    tensor = torch.ones(1 << 20)
    ringlet.all_reduce(tensor, algorithm="ring")
    say(rank=group.rank, ready=True)
    try:
        while True:
            ringlet.all_reduce(tensor, "avg", algorithm="ring", timeout=float(sys.argv[2]))
    except ringlet.errors.Error as error:
        say(rank=group.rank, kind=type(error).__name__, message=str(error))


def join_by_file(limit: float) -> ringlet.Group:
    """Without MASTER_ADDR: the store is a file, so nothing says which address leads to the other host."""
    rank, world, path = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    return ringlet.init(rank, world, dist.FileStore(path, world), timeout=timedelta(seconds=limit))


def sum_and_messages() -> None:
    """An all-reduce, and a message in each direction."""
    group = join_by_file(60)
    tensor = torch.ones(1000)
    ringlet.all_reduce(tensor)
    pass_on(group, group.rank)
    say(rank=group.rank, right=tensor.tolist() == [group.world] * 1000)


def pass_on(group: ringlet.Group, rank: int) -> None:
    for sender in (0, 1):
        tensor = torch.full((100_000,), float(sender))
        if rank == sender:
            ringlet.send(tensor, 1 - sender, group=group)
        else:
            ringlet.recv(received := torch.empty(100_000), sender, group=group)
            assert torch.equal(received, tensor)


def one_way() -> None:
    """What argv[5] names, after the test has put up a firewall in front of rank argv[6]."""
    what, open_rank = sys.argv[5], int(sys.argv[6])
    if what == "any":
        return receive_from_any(open_rank)
    group = join_by_file(60)
    blocked = group.rank != open_rank
    wait_for_firewall()
    tensor, wanted = torch.full((100_000,), float(group.rank)), float(1 - group.rank)
    if what == "all_reduce":
        ringlet.all_reduce(tensor)
        wanted = 1.0
    elif what == "both":
        pass_on(group, group.rank)
        tensor.fill_(wanted)
    elif blocked:
        ringlet.send(tensor, open_rank)
        tensor.fill_(wanted)
    else:
        if what == "late":
            time.sleep(3)  # the sender must wait for this rank, however long it has tried
        ringlet.recv(tensor, 1 - open_rank)
    say(rank=group.rank, right=bool((tensor == wanted).all()))


def receive_from_any(open_rank: int) -> None:
    rank, world, path = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    dist.init_process_group("ringlet", store=dist.FileStore(path, world), rank=rank, world_size=world)
    wait_for_firewall()
    tensor = torch.full((100_000,), float(rank))
    if rank == open_rank:
        assert dist.recv(tensor) == 1 - rank
    else:
        dist.send(tensor, open_rank)
    say(rank=rank, right=bool((tensor == 1 - open_rank).all()))
    dist.destroy_process_group()


def wait_for_firewall() -> None:
    say(ready=True)
    sys.stdin.readline()


if __name__ == "__main__":
    jobs = (sums, until_it_fails, sum_and_messages, one_way)
    {job.__name__: job for job in jobs}[sys.argv[1]]()
