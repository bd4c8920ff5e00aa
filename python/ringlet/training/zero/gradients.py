"""Gradients on their way from autograd into this rank's shards, one reduce-scatter a unit.

Stage 1 keeps whole gradients, as views of a flat buffer for each unit, and reduces in place in the last backward of a
window. Stages 2 and 3 borrow a buffer when a unit's first gradient arrives, reduce in every backward, and give the
buffer back. All ranks launch units in one order, whatever the order in which gradients arrive. At first this is the
reverse order of the model. After the first reduced backward it is the order in which rank 0's units filled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ringlet.training.flat_memory import allocate
from ringlet.training.gradient_hooks import HooksLast, on_gradient
from ringlet.training.refusals import refuse_again, refuse_layout

from .memory import Pool
from .shards import FlatUnit
from .traffic import Pending, Traffic
from .units import Slot


class UnitGradient:
    """The gradient of one unit. `shard`: this rank's part, complete after a reduced backward. `holds`: `shard` has a
    value of this window. `arrived`: slots of this backward. `seen`: slots of earlier ones that are not reduced yet.
    `sent`: in this backward."""

    def __init__(self, flat: FlatUnit, keeps_whole: bool, pool: Pool, group: dist.ProcessGroup) -> None:
        unit = flat.unit
        self.flat, self.pool = flat, pool
        self.keeps_whole = keeps_whole
        self.buffer: torch.Tensor | None = None
        if keeps_whole:
            self.buffer = allocate(unit.count, unit.dtype, unit.device, group)
            self.shard = self.buffer[flat.start : flat.stop]
        else:
            self.shard = allocate(unit.shard_count, unit.dtype, unit.device, group)
        self.holds = False
        self.arrived: set[int] = set()
        self.seen: set[int] = set()
        self.sent = False
        self.pending: Pending | None = None
        self._beside: torch.Tensor | None = None  # a value of this window, or the output, that is not in `shard` yet

    @torch.no_grad()
    def take(self, index: int, slot: Slot) -> None:
        """Moves the gradient from the parameter into the unit's buffer."""
        if self.sent:
            refuse_again(slot.name, "unit")
        if self.buffer is None:
            self.buffer = self.pool.borrow(self.flat.unit.count)
            for start, stop in self.flat.unit.gaps():
                self.buffer[start:stop].zero_()
        elif self.keeps_whole and self.holds and self._beside is None:
            self._beside = self.shard.clone()  # of an earlier backward of this window
        view = self.flat.view(slot, self.buffer)
        arrived = slot.parameter.grad
        assert arrived is not None
        refuse_layout(slot.name, arrived.layout)
        if arrived.data_ptr() != view.data_ptr() or arrived.numel() == 0:
            if index in self.arrived and not self.keeps_whole:
                view.add_(arrived)
            else:
                view.copy_(arrived)
            slot.parameter.grad = view if self.keeps_whole else None
        self.arrived.add(index)

    @torch.no_grad()
    def launch(self, traffic: Traffic) -> None:
        """Starts the reduction. A gradient that did not arrive counts as zero."""
        unit = self.flat.unit
        there = self.arrived | self.seen
        if self.keeps_whole and self.holds and self._beside is None:
            self._beside = self.shard.clone()
        if self.buffer is None:
            self.buffer = self.pool.borrow(unit.count).zero_()
        for index, slot in enumerate(unit.slots):
            if index not in there:
                self.buffer[slot.start : slot.stop].zero_()
            slot.parameter.grad = None
        out = self.shard
        if self.holds and not self.keeps_whole:
            out = self._beside = self.pool.borrow(unit.shard_count)
        self.sent = True
        self.pending = traffic.reduce_scatter(out, self.buffer)

    @torch.no_grad()
    def complete(self) -> None:
        if self.pending is None:
            return
        self.pending.wait()
        self.pending = None
        if self._beside is not None:
            self.shard.add_(self._beside)
            if not self.keeps_whole:
                self.pool.give_back(self._beside)
            self._beside = None
        if not self.keeps_whole:
            assert self.buffer is not None
            self.pool.give_back(self.buffer)
            self.buffer = None
        self.holds = True
        self.seen.clear()

    @torch.no_grad()
    def drop(self, late: bool) -> bool:
        """Drops the gradients of a backward that raised. Returns False if they are already added to others. `late`: a
        gradient of the next backward has arrived."""
        self.complete()
        for index, slot in enumerate(self.flat.unit.slots):
            if index not in self.seen and not late:
                slot.parameter.grad = None
        if self.buffer is not None and not self.keeps_whole:
            self.pool.give_back(self.buffer)
            self.buffer = None
        if self._beside is not None:
            self.shard.copy_(self._beside)
            self._beside = None
        return not (self.arrived if late and self.keeps_whole else self.arrived & self.seen)

    def begin_window(self) -> None:
        self.holds = False
        self.seen.clear()
        self.arrived.clear()


class Gradients:
    """All units' gradients. `on_arrived(flat)` is called when a unit has all of a backward's gradients."""

    def __init__(
        self,
        flats: list[FlatUnit],
        stage: int,
        traffic: Traffic,
        on_backward: Callable[[], None],
        on_arrived: Callable[[FlatUnit], None],
    ) -> None:
        self.pools: dict[tuple[torch.dtype, torch.device], Pool] = {}
        self._traffic = traffic
        self._on_backward, self._on_arrived = on_backward, on_arrived
        self._in_flight = len(flats) if stage == 1 else 1  # reductions beside the one that is being filled
        self.units: list[UnitGradient] = []
        for flat in flats:
            key = (flat.unit.dtype, flat.unit.device)
            pool = self.pools.setdefault(key, Pool(*key, traffic.group))
            self.units.append(UnitGradient(flat, stage == 1, pool, traffic.group))
        self._order = sorted(self.units, key=lambda u: (u.flat.unit.small, -u.flat.unit.index))
        self._filled: list[UnitGradient] = []  # in the order seen in this backward
        self._launched = 0
        self._ordered = False
        self.reducing = True  # whether the backward under way is reduced
        self._last = HooksLast()

    def attach(self) -> list[Any]:
        """Hooks on every parameter; returns their handles."""
        handles = []
        for number, unit in enumerate(self.units):
            for index, slot in enumerate(unit.flat.unit.slots):
                handles.append(on_gradient(slot.parameter, self._on_gradient, number, index))
                self._last.add(slot.parameter, handles[-1])
        return handles

    def open(self, reducing: bool) -> None:
        """A backward begins. `reducing`: its gradients are reduced."""
        self.reducing = reducing
        self._last.keep()

    @property
    def launched(self) -> int:
        return self._launched

    def finish(self, reduce: bool) -> bool:
        """Ends a backward; with `reduce`, returns with the shards complete. False if nothing arrived."""
        if not any(unit.arrived for unit in self.units):
            return False
        if reduce:
            self.reduce_all()
            if not self._ordered:
                self._settle_order()
        else:
            for unit in self.units:
                unit.seen |= unit.arrived
        self.rearm()
        return True

    def reduce_all(self) -> None:
        while self._launched < len(self._order):
            self._launch_next()
        for unit in self._order:
            unit.complete()

    def rearm(self) -> None:
        self._filled, self._launched = [], 0
        for unit in self.units:
            unit.arrived.clear()
            unit.sent = False

    def abandon(self, late: bool) -> bool:
        """Drops the gradients of a backward that raised, and returns borrowed buffers. False: the window is wrong."""
        whole = [unit.drop(late) for unit in self.units]
        self.rearm()
        return all(whole)

    def begin_window(self) -> None:
        for unit in self.units:
            unit.begin_window()

    def _on_gradient(self, number: int, index: int) -> None:
        self._on_backward()
        unit = self.units[number]
        unit.take(index, unit.flat.unit.slots[index])
        if len(unit.arrived) < len(unit.flat.unit.slots) or unit in self._filled:
            return
        self._filled.append(unit)
        self._on_arrived(unit.flat)
        while self.reducing and self._launched < len(self._order) and self._order[self._launched] in self._filled:
            self._launch_next()

    def _launch_next(self) -> None:
        self._order[self._launched].launch(self._traffic)
        self._launched += 1
        under_way = [unit for unit in self._order[: self._launched] if unit.pending is not None]
        for unit in under_way[: -self._in_flight]:
            unit.complete()

    def _settle_order(self) -> None:
        """Sets the order once: the order in which rank 0's units filled. Units that did not fill come last."""
        self._ordered = True
        if len(self.units) < 2:
            return
        seen = [*self._filled, *(unit for unit in self._order if unit not in self._filled)]
        order = torch.tensor([self.units.index(unit) for unit in seen], device=self.units[0].flat.unit.device)
        dist.broadcast(order, group=self._traffic.group, group_src=0)
        self._order = [self.units[index] for index in order.tolist()]
