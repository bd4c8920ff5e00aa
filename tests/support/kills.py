"""A rank that dies as kill -9 ends it, and how soon the others know."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from collections.abc import Callable

import torch.distributed as dist

from ranks import Outcome
from stalls import Stalls


def die(stamp: str) -> None:
    """Writes the time, and ends this process."""
    pathlib.Path(stamp).write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def seconds_since(stamp: str, stalls: Stalls) -> float:
    """Since a rank died; without those in which this process stood still."""
    now, killed = time.monotonic(), float(pathlib.Path(stamp).read_text())
    return now - killed - stalls.since(killed)


def pass_together(barrier: Callable[[], object], rank: int, world: int, path: str) -> None:
    """The last rank, which is to die, returns when all have left the barrier: who is still in it would hear of the
    death there. path: of a store beside the group's own."""
    barrier()
    others = dist.FileStore(path, world)
    if rank == world - 1:
        others.wait([f"passed {q}" for q in range(world - 1)])
    else:
        others.set(f"passed {rank}", "")


def only_died(outcomes: list[Outcome], victim: int) -> None:
    """Fails the test unless the others returned."""
    wrong = [outcome for outcome in outcomes if outcome.kind != ("died" if outcome.rank == victim else None)]
    assert not wrong, "\n".join(map(str, wrong))
