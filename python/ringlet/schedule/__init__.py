"""Schedules: what every rank does in a collective, as plain data made by the C++ core.

>>> import ringlet
>>> ringlet.schedule("ring", "all_reduce", world=3)
ring all_reduce, world 3: 3 parts, 4 rounds
  rank 0: send [2] to 1, reduce [1] from 2 | send [1] to 1, reduce [0] from 2 | ...

The same data is proved (`prove`), costed (`cost`), drawn (`draw`) and run (the engines). Nothing here imports torch.
"""

from __future__ import annotations

import inspect
import sys
import types

from ringlet.schedule import cost, draw, files, msccl, prove
from ringlet.schedule.data import Round, Schedule, ScheduleError, Step, copy, recv, reduce, send
from ringlet.schedule.loading import load
from ringlet.schedule.registry import Algorithm, algorithms, schedule

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


for _name, _method in {
    "prove": prove.prove,
    "cost": cost.cost,
    "svg": draw.svg,
    "text": draw.text,
    "json": files.to_json,
    "xml": msccl.to_xml,
    "_repr_svg_": draw.notebook_picture,
}.items():
    setattr(Schedule, _name, _method)


class _CallableModule(types.ModuleType):
    """`ringlet.schedule` is a package and `ringlet.schedule("ring", world=4)` a call (docs/decisions/0002)."""

    __call__ = staticmethod(schedule)
    __signature__ = inspect.signature(schedule)


sys.modules[__name__].__class__ = _CallableModule
