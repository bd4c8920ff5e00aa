"""A function on ranks of this machine, and the times of their calls in turns."""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ringlet


def on_ranks(function: Callable[..., Any], world: int, *args: Any, backend: str = "ringlet", hosts: int = 1) -> Any:
    """What `function(rank, world, *args)` returns on rank 0, through JSON.

    A rank is a process with one thread, in ringlet's default group and in a process group of torch.distributed on
    `backend`. hosts: of so many in turn; they are this machine.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(act, (world, folder, function, args, backend, hosts), world)
        return result(folder)


def act(
    rank: int,
    world: int,
    folder: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    backend: str,
    hosts: int = 1,
) -> None:
    """One rank's part. folder: of a file system that all ranks see."""
    torch.set_num_threads(1)
    if hosts > 1:
        os.environ["RINGLET_HOST_ID"] = str(rank % hosts)
    ringlet.init(rank, world, dist.FileStore(f"{folder}/ringlet", world))
    dist.init_process_group(backend, store=dist.FileStore(f"{folder}/torch", world), rank=rank, world_size=world)
    found = function(rank, world, *args)
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    ringlet.finalize()


def result(folder: str) -> Any:
    return json.loads(Path(folder, "found").read_text())


def group_with(table: str) -> ringlet.Group:
    """A group of all ranks with this table; rank 0's counts."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(table)
        file.flush()
        os.environ["RINGLET_TABLE"] = file.name
        group = ringlet.new_group(range(ringlet.current().world))
    os.environ["RINGLET_TABLE"] = ""
    assert group is not None
    return group


def seconds_a_call(call: Callable[[], object], calls: int) -> float:
    """Of this rank. An untimed call begins, for which a rank that is early waits."""
    call()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def in_turns(ways: Sequence[Callable[[], object]], calls: int, shuffler: random.Random) -> list[float]:
    """The seconds of a call by each way, measured in an order drawn anew, the same on all ranks."""
    found = [0.0] * len(ways)
    for place in shuffler.sample(range(len(ways)), len(ways)):
        found[place] = seconds_a_call(ways[place], calls)
    return found


def agreed(mine: Sequence[float]) -> list[float]:
    """Of each number the largest of all ranks."""
    all_ranks = torch.tensor(mine, dtype=torch.float64)
    ringlet.all_reduce(all_ranks, op="max")
    return all_ranks.tolist()
