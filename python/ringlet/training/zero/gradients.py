"""The gradient of a unit, and the record of a backward.

Stage 1 keeps whole gradients, in a flat buffer for each unit, and reduces in place in the last backward of a window.
Stages 2 and 3 borrow a buffer when a unit's first gradient arrives, reduce in every backward, and give the buffer back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from ringlet.training.backward import Backward
from ringlet.training.flat import allocate
from ringlet.training.refusals import refuse_layout
from ringlet.training.reproducible import TreeSums

from .memory import Pool
from .options import Options
from .traffic import Pending, Traffic
from .units import FlatUnit, Slot


class UnitGradient:
    """The gradient of one unit. `shard`: this rank's part of the latest reduction. `holds`: `value` is of this window.
    `earlier`: the buffer has micro-batches of this window that are not reduced yet. `first`: the number of its first
    parameter, among those of all units."""

    def __init__(self, flat: FlatUnit, first: int, pool: Pool, group: dist.ProcessGroup, options: Options) -> None:
        unit = flat.unit
        self.flat, self.first, self.pool = flat, first, pool
        self.keeps_whole = options.stage == 1
        self.buffer: torch.Tensor | None = None
        self._sum_dtype = options.sum_dtype(unit.dtype)  # in which the reductions of a window add up
        if self.keeps_whole:
            whole_dtype = self._sum_dtype if options.accumulate > 1 else unit.dtype
            self.buffer = allocate(unit.count, whole_dtype, unit.device, group)
            self.shard = self.buffer[flat.start : flat.stop]
        else:
            self.shard = allocate(unit.shard_count, unit.dtype, unit.device, group)
        self.holds = self.earlier = False
        self.tree = TreeSums() if options.reproducible else None
        self._micro_batches = options.accumulate
        self._received: torch.Tensor | None = None  # scratch of a reproducible reduction
        self._sum: torch.Tensor | None = None  # made for the first window of several reductions
        self.value = self.shard  # this rank's part of the window's gradient; `_sum` if there were earlier reductions

    def tensors(self) -> list[torch.Tensor]:
        """The memory that it keeps."""
        kept = [self.buffer if self.keeps_whole and self.buffer is not None else self.shard]
        if self._sum is not None:
            kept.append(self._sum)
        return kept if self.tree is None else kept + self.tree.tensors()

    def take(self, slot: Slot, again: bool) -> None:
        """Moves the gradient from the parameter into the unit's buffer. If a hook has dropped it, it counts as zero.
        `again`: adds it to one of this backward."""
        arrived = slot.parameter.grad
        arrived = getattr(arrived, "added_by_backward", arrived)  # if autograd has added it to what was shown there
        if self.buffer is None:
            self.buffer = self.pool.borrow(self.flat.unit.count)
            for start, stop in self.flat.unit.gaps():
                self.buffer[start:stop].zero_()
        elif self.keeps_whole:
            self._keep_value()
        view = self.flat.view(slot, self.buffer)
        adds = again or self.earlier
        if arrived is not None:
            refuse_layout(slot.name, arrived.layout)
            if adds:
                view.add_(arrived)
            else:
                view.copy_(arrived)
        elif not adds:
            view.zero_()
        slot.parameter.grad = None

    def take_rest(self, arrived: set[int]) -> None:
        """Takes what the program has put into `.grad` of parameters without a gradient in this window, or zero."""
        for index, slot in enumerate(() if self.earlier else self.flat.unit.slots, self.first):
            if index not in arrived:
                self.take(slot, False)

    def _keep_value(self) -> None:
        """Moves the value of earlier reductions of this window aside, to add the next one to it."""
        if not self.holds or self.value is self._sum or self.tree is not None:
            return
        if self._sum is None:
            self._sum = torch.empty_like(self.shard, dtype=self._sum_dtype)
        self.value = self._sum.copy_(self.shard)

    def launch(self, arrived: set[int], traffic: Traffic) -> Pending:
        """Starts the reduction. A gradient that did not arrive counts as zero."""
        self._keep_value()
        if self.buffer is None:
            self.buffer = self.pool.borrow(self.flat.unit.count).zero_()
        self.take_rest(arrived)
        label = self.flat.unit.label
        if self.tree is None:
            return traffic.reduce_scatter(self.shard, self.buffer, label)
        if self.keeps_whole:
            self.tree.add_to([self.buffer], [0])
            self.tree.forget()
        self._received = self.pool.borrow(self.flat.unit.count)
        return traffic.exchange_and_add(self.shard, self.buffer, self._received, label)

    def end_micro_batch(self, arrived: set[int]) -> None:
        """Ends a backward that is not reduced."""
        self.take_rest(arrived)
        if self.tree is None:
            self.earlier = True
        else:
            assert self.buffer is not None
            self.tree.push([self.buffer.clone()])

    def _add_reduced(self, tree: TreeSums) -> None:
        """A reduction of stage 2 or 3 is over: it is a subtree over ranks."""
        if tree.count + 1 == self._micro_batches:
            tree.add_to([self.shard], [0])
            tree.forget()
        else:
            tree.push([self.shard.clone()])

    def complete(self, pending: Pending) -> None:
        pending.wait()
        if self._received is not None:
            self.pool.give_back(self._received)
            self._received = None
        if self.tree is not None and not self.keeps_whole:
            self._add_reduced(self.tree)
        if self.value is not self.shard:
            self.value.add_(self.shard)
        self.give_buffer_back()
        self.holds, self.earlier = True, False

    def give_buffer_back(self) -> None:
        if self.buffer is not None and not self.keeps_whole:
            self.pool.give_back(self.buffer)
            self.buffer = None

    def begin_window(self) -> None:
        self.holds = self.earlier = False
        self.value = self.shard
        if self.tree is not None:
            self.tree.forget()


class ZeroBackward(Backward):
    """The record of a backward of a Zero, which sends units in `order`. `arrived`: numbers of parameters. `filled`:
    numbers of the units that have all gradients, in order. `under_way`: reductions, the oldest first."""

    def __init__(self, end: Callable[[], None] | None, reducing: bool, order: list[UnitGradient]) -> None:
        super().__init__(end, reducing, [len(unit.flat.unit.slots) for unit in order])
        self.order = order
        self.arrived: set[int] = set()
        self.filled: list[int] = []
        self.under_way: list[tuple[UnitGradient, Pending]] = []

    def complete(self, but: int) -> None:
        """Completes the reductions, `but` for the latest ones."""
        while len(self.under_way) > but:
            unit, pending = self.under_way[0]
            unit.complete(pending)
            del self.under_way[0]
