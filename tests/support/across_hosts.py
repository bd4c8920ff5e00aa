"""What one rank of an emulated host runs for test_across_hosts.py: `across_hosts.py JOB`, in torchrun's environment."""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch

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


def connections() -> None:
    """One all-reduce by each algorithm in a group of its own, and how many connections it took."""
    world = ringlet.init(timeout=timedelta(seconds=60)).world
    told = {}
    for algorithm in sys.argv[2].split(","):
        group = ringlet.new_group(range(world), timeout=timedelta(seconds=60))
        tensor = torch.full((1 << 18,), float(group.rank + 1))
        ringlet.all_reduce(tensor, algorithm=algorithm, group=group)
        right = bool((tensor == sum(range(1, world + 1))).all())
        told[algorithm] = {"right": right, "connections": group.connections}
        ringlet.barrier()  # of all, in another group, whose connections are its own
    say(**told)


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


if __name__ == "__main__":
    {"sums": sums, "connections": connections, "until_it_fails": until_it_fails}[sys.argv[1]]()
