"""Schedules: what every rank does in a collective, as plain data made by the C++ core.

>>> import ringlet
>>> ringlet.schedule("ring", "all_reduce", world=3)
ring all_reduce, world 3: 3 parts, 4 rounds
  rank 0: send [2] to 1, reduce [1] from 2 | send [1] to 1, reduce [0] from 2 | ...

The same data is proved (`prove`), costed (`cost`), drawn (`draw`) and run (the engines). Nothing here imports torch.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from typing import Any

from ringlet.schedule.author import Algorithm, load
from ringlet.schedule.hosts import numbered
from ringlet.schedule.steps import Round, Schedule, ScheduleError, Step, copy, recv, reduce, send

__all__ = [
    "Algorithm",
    "Round",
    "Schedule",
    "ScheduleError",
    "Step",
    "algorithms",
    "copy",
    "load",
    "recv",
    "reduce",
    "schedule",
    "send",
]


def schedule(
    algorithm: str | Algorithm,
    collective: str = "all_reduce",
    *,
    world: int | None = None,
    root: int = 0,
    hosts: Sequence[int] | None = None,
) -> Schedule:
    """The schedule of all `world` ranks, as the engines run it.

    algorithm: a name of `algorithms()`, or an `Algorithm` of your own, whose collective then counts.
    root: for broadcast, reduce, gather and scatter.
    hosts: `hosts[r]` is any number for rank r's host, the same for ranks that share a host (default: all do). If given,
    its length is the world.
    Raises ValueError, which names what is known, for an unknown algorithm or collective, or a wrong world, root or
    hosts.
    """
    import ringlet._C as _C
    from ringlet.schedule.named import registered

    if world is None:
        if not hosts:
            raise ValueError("schedule: pass world= (the number of ranks) or hosts= (the host of each rank)")
        world = len(hosts)
    own = [algorithm] if isinstance(algorithm, Algorithm) else registered(algorithm, collective)
    if own:
        return own[0].schedule(world, root, hosts)
    data: dict[str, Any] = _C.schedule(str(algorithm), collective, world, root, hosts)
    ranks = tuple(tuple(Round(tuple(Step(*s) for s in steps)) for steps in rounds) for rounds in data["ranks"])
    inputs, outputs = tuple(data["inputs"]), tuple(data["outputs"])
    on_hosts = numbered(hosts) if hosts and len(set(hosts)) > 1 else ()
    return Schedule(str(algorithm), collective, len(ranks), root, data["parts"], ranks, inputs, outputs, on_hosts)


def algorithms() -> list[tuple[str, str, str]]:
    """(algorithm, collective, one-line summary) of everything built in, in the registry's order."""
    import ringlet._C as _C

    return list(_C.algorithms())


class _CallableModule(types.ModuleType):
    """`ringlet.schedule` is a package and `ringlet.schedule("ring", world=4)` a call (docs/decisions/0002)."""

    def __call__(
        self,
        algorithm: str | Algorithm,
        collective: str = "all_reduce",
        *,
        world: int | None = None,
        root: int = 0,
        hosts: Sequence[int] | None = None,
    ) -> Schedule:
        return schedule(algorithm, collective, world=world, root=root, hosts=hosts)


sys.modules[__name__].__class__ = _CallableModule
