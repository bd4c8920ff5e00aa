"""The backwards of a Zero: gradients on their way into this rank's shards, one reduce-scatter a unit.

All ranks launch units in one order, whatever the order in which gradients arrive. At first this is the reverse order of
the model. After the first reduced backward it is the order in which rank 0's units filled. The way of a gradient from
autograd to its shard:

    ShardReduction._take   opens the record of the backward, if it is the first (training/backward.py)
    UnitGradient.take      puts it into its unit's buffer; if the unit has all:
    ShardReduction._launch in launch order
    UnitGradient.launch    zeros for what did not arrive
    Traffic.reduce_scatter
    ShardReduction._close  at the end of the backward, sends the rest
    UnitGradient.complete  waits, adds to the window's sum
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ringlet.errors import InvalidUsage
from ringlet.training.agree import order_of_rank_0
from ringlet.training.backward import Trainer, in_backward
from ringlet.training.refusals import refuse_again, refuse_stopped
from ringlet.training.reproducible import Checks

from .changes import Changes
from .gather import Residency
from .gradients import UnitGradient, ZeroBackward
from .memory import MappedFiles, Pool
from .optimizer import ShardedOptimizer
from .options import Options
from .sharded_gradient import ShownGradients
from .traffic import Clock, Traffic
from .units import FlatUnit, Slot
from .window import ZeroWindow


class ShardReduction(Trainer[ZeroBackward]):
    """What of a Zero does not concern its user. `files`: of the offloaded parameters."""

    _noun = "Zero"

    def __init__(
        self,
        module: nn.Module,
        options: Options,
        traffic: Traffic,
        flats: list[FlatUnit],
        sharded: ShardedOptimizer,
        files: MappedFiles | None,
        checks: Checks | None,
    ) -> None:
        self.module, self.options = module, options
        self._traffic, self._flats, self._sharded, self._checks = traffic, flats, sharded, checks
        self._residency: Residency | None = None
        if options.stage == 3:
            self._residency = Residency(self._in_shards, traffic, files, lambda: self._open(None, None))
        self._pools: dict[tuple[torch.dtype, torch.device], Pool] = {}
        self._units: list[UnitGradient] = []
        self._places: list[tuple[int, Slot]] = []  # of each trained parameter: the number of its unit, and its slot
        for flat in flats:
            if flat.unit.trainable:
                self._add_unit(flat)
        whole = options.stage == 1
        self._in_flight = len(self._units) if whole else 1  # reductions beside the one that is being filled
        numbers = range(len(self._units))
        units = [unit.flat.unit for unit in self._units]
        self._set_order(sorted(numbers, key=lambda n: (units[n].small, -units[n].index)))
        self._ordered = len(units) < 2
        self._window = ZeroWindow(options, self._units, traffic)
        self._shown = ShownGradients(self._units, sharded, traffic.group, self._window)
        self._clock = Clock(traffic)
        self._changes = Changes(module, flats, sharded.pieces, self._residency, traffic)

    def _add_unit(self, flat: FlatUnit) -> None:
        unit, group = flat.unit, self._traffic.group
        key = (unit.dtype, unit.device)
        pool = self._pools.setdefault(key, Pool(*key, group))
        gradient = UnitGradient(flat, len(self._places), pool, group, self.options)
        self._places += [(len(self._units), slot) for slot in unit.slots]
        self._units.append(gradient)

    def _set_order(self, order: list[int]) -> None:
        self._order = order
        self._part_of = {number: part for part, number in enumerate(order)}

    @property
    def _in_shards(self) -> list[FlatUnit]:
        return [flat for flat in self._flats if flat.whole is None]

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [slot.parameter for _, slot in self._places]

    # -- forwards --

    def _sees_forward(self) -> bool:
        return not in_backward()

    def _enter(self) -> None:
        if torch.is_grad_enabled():
            if self._checks is not None:
                self._checks.before_forward()
            self._changes.refuse_owned()  # first: `sync_written` overwrites
            self._changes.sync_written()
        self._clock.start("forward")
        if self._residency is not None:
            self._residency.begin_forward()

    def _leave(self, has_roots: bool) -> None:
        if self._residency is not None:
            self._residency.end_forward(keep_last=has_roots)
        self._clock.stop("forward")

    # -- a backward --

    def _begin(self, arrived: int | None, context: None) -> ZeroBackward:
        self._take_exchanged(None if arrived is None else self._places[arrived][1].parameter)
        reducing = self.options.stage > 1 or self._window.seen + 1 >= self.options.accumulate
        record = self._record_of(self._on_end, reducing)
        self._shown.hide()
        self._clock.start("backward")
        if self._residency is not None:
            self._residency.begin_backward()
        return record

    def _record_of(self, end: Callable[[], None] | None, reducing: bool) -> ZeroBackward:
        return ZeroBackward(end, reducing, [self._units[number] for number in self._order])

    def _take(self, index: int) -> None:
        record = self._record
        if record is None or record.stopped:
            record = self._open(index, None)
        full, window = self._window.seen, self.options.accumulate
        if full >= window and (window > 1 or self._checks is not None):
            raise InvalidUsage(f"{full + 1} backwards in a window of {window}: call step() after every backward")
        if self._window.factor is not None:  # clipped, and this backward adds to it
            self._window.fold()
        number, slot = self._places[index]
        part, again, unit = self._part_of[number], index in record.arrived, self._units[number]
        if part < record.launches.sent:
            refuse_again(slot.name, "unit")
        unit.take(slot, again)
        if again:
            return
        record.arrived.add(index)
        record.launches.waiting[part] -= 1
        if record.launches.waiting[part] == 0:
            record.filled.append(number)
            if self._residency is not None:
                self._residency.arrived(unit.flat)
            self._launch(record)

    def _launch(self, record: ZeroBackward) -> None:
        """Sends what can be sent."""
        while record.reducing and (part := record.launches.next()) is not None:
            unit = record.order[part]
            record.under_way.append((unit, unit.launch(record.arrived, self._traffic)))
            record.complete(but=self._in_flight)

    def _send_rest(self, record: ZeroBackward) -> None:
        """The shards are complete then."""
        record.launches.fill()
        self._launch(record)
        record.complete(but=0)

    def _close(self, record: ZeroBackward) -> None:
        try:
            if self._residency is not None:
                self._residency.release_all()
            if not record.arrived:
                return  # torch.autograd.grad, which leaves .grad alone
            if record.reducing:
                self._send_rest(record)
                if not self._ordered:
                    device = self._units[0].flat.unit.device
                    self._set_order(order_of_rank_0(record.filled, self._order, self._traffic.group, device))
                    self._ordered = True
            else:
                for unit in self._units:
                    unit.end_micro_batch(record.arrived)
            self._window.seen += 1
        finally:
            if self._window.seen:
                self._shown.show()
            self._clock.stop("backward")

    @torch.no_grad()
    def _abandon(self, record: ZeroBackward, arrived: int | None) -> None:
        """Drops the gradients of the backward, and returns borrowed buffers. Raises InvalidUsage if units had been sent
        or, at stage 1, if gradients are in the sums of a window."""
        launched = record.launches.sent
        if self._residency is not None:
            self._residency.release_all()
        record.complete(but=0)
        for unit in self._units:
            unit.give_buffer_back()
        if arrived is None:  # else a gradient of the next backward has arrived
            for parameter in self._parameters:
                parameter.grad = None
        added = any(self._units[self._places[index][0]].earlier for index in record.arrived)
        if not added and not launched:
            if self._window.seen and arrived is None:
                self._shown.show()
            return
        self.zero_grad()
        if launched:
            refuse_stopped(self._traffic.rank, launched, len(record.order), "units")
        raise InvalidUsage(
            f"rank {self._traffic.rank}: the previous backward stopped after it had added to the gradients of this "
            "window, so Zero dropped them: begin the window again; call zero_grad() after a backward that raised"
        )

    # -- a window --

    def zero_grad(self) -> None:
        """Drops the gradients of the window. Not needed after `step`."""
        self._begin_window()
        for parameter in self._parameters:
            parameter.grad = None

    def _zero_grad_after_step(self) -> None:
        """`zero_grad` for loops that call it after every micro-batch."""
        if not self._window.stepped:
            self.zero_grad()

    def _begin_window(self) -> None:
        self._window.begin()
        for unit in self._units:
            unit.begin_window()
        self._shown.hide()

    @torch.no_grad()
    def _complete_window(self) -> None:
        """Reduces, outside of a backward, what backwards that were not reduced have left of a window."""
        if any(not unit.holds for unit in self._units):
            self._shown.hide()
            self._send_rest(self._record_of(None, True))
            self._shown.show()

    def _take_exchanged(self, arrived: torch.Tensor | None = None) -> None:
        """Takes what the program has put into `.grad` since the latest backward. `arrived`: a parameter that has a
        gradient of a new backward instead."""
        if self._window.seen == 0:
            return
        changed = self._shown.changed()
        if not changed:
            return
        if self._window.spent:
            raise InvalidUsage(f"these are gradients {self._window.unfinished()}")
        if self._shown.dropped(arrived):
            self._zero_grad_after_step()
            if self._window.seen and arrived is None:
                self._shown.show()
            return
        why = self._window.unfinished()
        if arrived is not None and arrived.grad is not None and arrived in self._shown.exchanged(changed):
            why = "that autograd has added to what the program had put there: call step() before"
        if why is not None:
            raise InvalidUsage(f"the gradient of {self._shown.names(changed)} was exchanged, a gradient {why}")
        self._window.fold()
        self._shown.take(changed)
