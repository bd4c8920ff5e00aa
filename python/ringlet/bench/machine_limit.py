"""The least time of a collective on one host, from what two cores of this machine can do without any library.

docs/performance.md#the-limit has the model. The measurements take turns with the libraries as a peer does, so the
machine's drift is theirs too.
"""

from __future__ import annotations

import os

from ringlet.core_bandwidth import Cores

from .cases import bus_factor
from .ranks.case import Case

# Ranks of these calls send and do not wait: calls in a loop overlap, and a line's way counts in none of them.
_ONE_WAY = ("broadcast", "reduce", "gather", "scatter")


def refusal(world: int) -> str | None:
    """Why there is no limit for so many ranks; None: there is one."""
    usable = len(os.sched_getaffinity(0))
    if world < 2 or usable < 2:
        return "the limit is that of two ranks or more, on two processors or more"
    if world > usable:
        return f"{world} ranks on {usable} processors take turns: the limit is that of ranks with a processor each"
    return None


def touched_factor(collective: str, world: int) -> float:
    """Bytes of buffers that the busiest rank must read or write, whoever's caches they are in, per byte of the
    buffer."""
    return {
        "reduce_scatter": 1 + 1 / world,
        "all_gather": 1 + 1 / world,
        "broadcast": 1.0,
        "gather": 1.0,
        "scatter": 1.0,
    }.get(collective, 2.0)


def least_us(case: Case, cores: Cores) -> float:
    """The least time of a call. From others the busiest rank must read bus_factor bytes per byte of the buffer."""
    collective = case.moves
    way = 0.0 if collective in _ONE_WAY else cores.line_us / 2
    foreign = bus_factor(collective, case.world) * case.bytes / cores.foreign_gbps / 1000
    memory = touched_factor(collective, case.world) * case.bytes / cores.copy_gbps / 1000
    return max(way + foreign, memory)
