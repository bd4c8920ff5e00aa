"""Gradients on their way from autograd into this rank's shards, one reduce-scatter a unit.

Stage 1 keeps whole gradients, in a flat buffer for each unit, and reduces in place in the last backward of a window.
Stages 2 and 3 borrow a buffer when a unit's first gradient arrives, reduce in every backward, and give the buffer back.
All ranks launch units in one order, whatever the order in which gradients arrive. At first this is the reverse order of
the model. After the first reduced backward it is the order in which rank 0's units filled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ringlet.training.flat_memory import allocate
from ringlet.training.gradient_hooks import HooksLast, on_gradient
from ringlet.training.refusals import refuse_again, refuse_layout
from ringlet.training.reproducible import TreeSums

from .memory import Pool
from .options import Options
from .shards import FlatUnit
from .traffic import Pending, Traffic
from .units import Slot


class UnitGradient:
    """The gradient of one unit. `shard`: this rank's part of the latest reduction. `holds`: `value` is of this window.
    `arrived`: slots of this backward. `seen`: slots of earlier ones that are not reduced yet. `sent`: in this backward.
    `sum_dtype`: in which the reductions of a window add up. `whole_dtype`: of the whole gradient, if it is kept.
    `tree_of`: reproducible, with windows of so many micro-batches."""

    def __init__(
        self,
        flat: FlatUnit,
        pool: Pool,
        group: dist.ProcessGroup,
        sum_dtype: torch.dtype,
        whole_dtype: torch.dtype | None,
        tree_of: int | None,
    ) -> None:
        unit = flat.unit
        self.flat, self.pool = flat, pool
        self.keeps_whole = whole_dtype is not None
        self.buffer: torch.Tensor | None = None
        if whole_dtype is not None:
            self.buffer = allocate(unit.count, whole_dtype, unit.device, group)
            self.shard = self.buffer[flat.start : flat.stop]
        else:
            self.shard = allocate(unit.shard_count, unit.dtype, unit.device, group)
        self.holds = False
        self.arrived: set[int] = set()
        self.seen: set[int] = set()
        self.sent = False
        self.pending: Pending | None = None
        self.tree = None if tree_of is None else TreeSums()
        self._tree_of = tree_of
        self._received: torch.Tensor | None = None  # scratch of a reproducible reduction
        self._sum_dtype = sum_dtype
        self._sum: torch.Tensor | None = None  # made for the first window of several reductions
        self._sums = False  # `_sum` has the earlier reductions of this window

    @property
    def value(self) -> torch.Tensor:
        """This rank's part of the window's gradient."""
        if self._sums:
            assert self._sum is not None
            return self._sum
        return self.shard

    def tensors(self) -> list[torch.Tensor]:
        """The memory that it keeps."""
        kept = [self.buffer if self.keeps_whole and self.buffer is not None else self.shard]
        if self._sum is not None:
            kept.append(self._sum)
        return kept if self.tree is None else kept + self.tree.tensors()

    @torch.no_grad()
    def take(self, index: int, slot: Slot) -> None:
        """Moves the gradient from the parameter into the unit's buffer. If a hook has dropped it, it counts as zero."""
        if self.sent:
            refuse_again(slot.name, "unit")
        arrived = slot.parameter.grad
        arrived = getattr(arrived, "added_by_backward", arrived)  # if autograd has added it to what was shown there
        if self.buffer is None:
            self.buffer = self.pool.borrow(self.flat.unit.count)
            for start, stop in self.flat.unit.gaps():
                self.buffer[start:stop].zero_()
        elif self.keeps_whole:
            self._keep_value()
        view = self.flat.view(slot, self.buffer)
        there = index in self.arrived or index in self.seen
        if arrived is not None:
            refuse_layout(slot.name, arrived.layout)
            if there:
                view.add_(arrived)
            else:
                view.copy_(arrived)
        elif not there:
            view.zero_()
        slot.parameter.grad = None
        self.arrived.add(index)

    def take_rest(self) -> None:
        """Takes what the program has put into `.grad` of parameters without a gradient in this window, or zero."""
        for index, slot in enumerate(self.flat.unit.slots):
            if index not in self.arrived and index not in self.seen:
                self.take(index, slot)

    def _keep_value(self) -> None:
        """Moves the value of earlier reductions of this window aside, to add the next one to it."""
        if not self.holds or self._sums or self.tree is not None:
            return
        if self._sum is None:
            self._sum = torch.empty_like(self.shard, dtype=self._sum_dtype)
        self._sum.copy_(self.shard)
        self._sums = True

    @torch.no_grad()
    def launch(self, traffic: Traffic) -> None:
        """Starts the reduction. A gradient that did not arrive counts as zero."""
        self._keep_value()
        if self.buffer is None:
            self.buffer = self.pool.borrow(self.flat.unit.count).zero_()
        self.take_rest()
        self.sent = True
        label = self.flat.unit.label
        if self.tree is None:
            self.pending = traffic.reduce_scatter(self.shard, self.buffer, label)
            return
        if self.keeps_whole:
            self.tree.add_to([self.buffer], [0])
            self.tree.forget()
        self._received = self.pool.borrow(self.flat.unit.count)
        self.pending = traffic.exchange_and_add(self.shard, self.buffer, self._received, label)

    @torch.no_grad()
    def end_micro_batch(self) -> None:
        """Ends a backward that is not reduced."""
        self.take_rest()
        if self.tree is None:
            self.seen |= self.arrived
        else:
            assert self.buffer is not None
            self.tree.push([self.buffer.clone()])

    def _add_reduced(self, tree: TreeSums) -> None:
        """A reduction of stage 2 or 3 is over: it is a subtree over ranks."""
        if tree.count + 1 == self._tree_of:
            tree.add_to([self.shard], [0])
            tree.forget()
        else:
            tree.push([self.shard.clone()])

    @torch.no_grad()
    def complete(self) -> None:
        if self.pending is None:
            return
        self.pending.wait()
        self.pending = None
        if self._received is not None:
            self.pool.give_back(self._received)
            self._received = None
        if self.tree is not None and not self.keeps_whole:
            self._add_reduced(self.tree)
        if self._sums:
            assert self._sum is not None
            self._sum.add_(self.shard)
        self._give_buffer_back()
        self.holds = True
        self.seen.clear()

    def _give_buffer_back(self) -> None:
        if self.buffer is not None and not self.keeps_whole:
            self.pool.give_back(self.buffer)
            self.buffer = None

    @torch.no_grad()
    def drop(self, late: bool) -> bool:
        """Drops the gradients of a backward that raised. Returns False if they are already added to others. `late`: a
        gradient of the next backward has arrived."""
        self.complete()
        if not late:
            for slot in self.flat.unit.slots:
                slot.parameter.grad = None
        self._give_buffer_back()
        return not self.arrived & self.seen

    def begin_window(self) -> None:
        self.holds = self._sums = False
        self.seen.clear()
        self.arrived.clear()
        if self.tree is not None:
            self.tree.forget()


class Gradients:
    """All units' gradients. `on_backward(parameter)` is called for each one that arrives, before it is taken;
    `on_arrived(flat)` when a unit has all of a backward's gradients."""

    def __init__(
        self,
        flats: list[FlatUnit],
        options: Options,
        traffic: Traffic,
        on_backward: Callable[[torch.Tensor], None],
        on_arrived: Callable[[FlatUnit], None],
    ) -> None:
        self.pools: dict[tuple[torch.dtype, torch.device], Pool] = {}
        self._traffic = traffic
        self._on_backward, self._on_arrived = on_backward, on_arrived
        whole = options.stage == 1
        self._in_flight = len(flats) if whole else 1  # reductions beside the one that is being filled
        self.units: list[UnitGradient] = []
        for flat in flats:
            key = (flat.unit.dtype, flat.unit.device)
            pool = self.pools.setdefault(key, Pool(*key, traffic.group))
            sum_dtype = options.sum_dtype(flat.unit.dtype)
            whole_dtype = (sum_dtype if options.accumulate > 1 else flat.unit.dtype) if whole else None
            tree_of = options.accumulate if options.reproducible else None
            self.units.append(UnitGradient(flat, pool, traffic.group, sum_dtype, whole_dtype, tree_of))
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
                unit.end_micro_batch()
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
        unit = self.units[number]
        slot = unit.flat.unit.slots[index]
        self._on_backward(slot.parameter)
        unit.take(index, slot)
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
