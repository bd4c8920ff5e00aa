"""The backwards of a GradientReducer: gradients on their way into buckets, over the wire, back to `.grad`.

The way of a gradient from autograd to `.grad`:

    gradient_arrivals.cc   notes it, if its bucket lacks others; else calls
    Reduction._take        opens the record of the backward, if it is the first (training/backward.py)
    Reduction._place       puts it into its bucket, or keeps it where autograd has put it
    Reduction._count       if the bucket is full:
    Reduction._launch      in launch order
    Channel.start          the user's hook, or
    Channel.all_reduce
    Reduction._close       at the end of the backward: sends the rest, waits for all
    ReducerBackward.give   the average, to `.grad`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable

from ringlet.errors import InvalidUsage
from ringlet.training import refusals, replicas
from ringlet.training.agree import one_rank, order_of_rank_0
from ringlet.training.backward import Trainer, in_backward
from ringlet.training.gradient_hooks import GradientArrivals, has_own_memory, own_memory
from ringlet.training.module_watch import ModuleWatch
from ringlet.training.refusals import refuse_again, refuse_layout
from ringlet.training.reproducible import Checks, TreeSums

from .channel import Channel
from .flat_gradients import FlatGradients, Gradient
from .gradient_merge import GradientMerge
from .measured import MeasuredMerging
from .options import Options
from .record import BucketState, ReducerBackward
from .stepping import InBackward
from .timeline import BucketTimes, Totals, now_ns, ranges
from .wide_sums import WideSums


class Reduction(Trainer[ReducerBackward], Joinable):
    """What of a GradientReducer does not concern its user. Reduced gradients are averages over ranks.

    `_used`: the gradients that arrived since the last reduction, in backwards that ended. With `delay` two sets of
    buffers take turns: one is being reduced while the other is filled. With `reproducible`, `_tree` has the sums of a
    window, and `.grad` is as before the window until it closes. Not thread-safe.
    """

    _noun = "reducer"

    def __init__(
        self,
        module: torch.nn.Module,
        named: list[tuple[str, torch.nn.Parameter]],
        options: Options,
        channel: Channel,
        optimizers: InBackward,
    ) -> None:
        super().__init__()
        self._module, self._named, self._options, self._channel = module, named, options, channel
        self._group, self._device = channel.group, named[0][1].device
        self._in_backward = optimizers
        self._watch = ModuleWatch(module, "GradientReducer", named, self._group)
        self._checks = Checks(module, "GradientReducer") if options.reproducible else None
        self._checked = False  # since the latest backward
        self._sync = True
        self._merge: GradientMerge | None = None
        self._reduced_before = True  # the latest forward's gradients were to be reduced
        self._divide_by_initial_world_size = True
        self._active = dist.get_world_size(self._group)  # ranks that still have inputs

        self._sets = [FlatGradients(named, options.caps, self._group) for _ in range(1 + options.delay)]
        self._flat = self._sets[0]
        self._totals = Totals()
        self._used = bytearray(len(named))
        self._rebuild_due = not options.used_change and len(self._flat.plan) > 1
        self._order: list[int] | None = None  # of arrival, agreed on, for the set of buffers that is away
        self._seen_order: list[int] = []  # in this rank's latest backward
        self._expected: list[int] | None = None  # static graph: how often each parameter's gradient arrives
        self._static_used: list[int] | None = None  # static graph: which ones any rank uses
        self._merging = MeasuredMerging(self._flat.entries, channel, self._device) if options.measured else None
        self._pending: ReducerBackward | None = None  # delay: sent, not yet handed over
        self._tree = TreeSums() if options.reproducible else None
        self._sums = WideSums([] if options.reproducible else [p for _, p in named], options.accumulate_dtype)
        self._noted = GradientArrivals([gradient.like() for gradient in self._flat.gradients], own_memory())
        self._noted_places: Any = None  # the buckets, and those that have buffers, of which `_noted` knows
        self._tell_layout("by size")

    # -- forwards --

    def _sees_forward(self) -> bool:
        return torch.is_grad_enabled()

    def _enter(self) -> None:
        self._check_module()
        if self._checks is not None:
            self._checks.before_forward()
        if self._merge is not None:
            self._merge.check_gradients()
        joining = self._join_config.enable
        notice = Join.notify_join_context(self)
        if notice is not None:
            notice.wait()
        self._share_buffers(own_are_current=True)
        reduced = self._sync and (self._merge is None or self._merge.closes)
        if joining:
            self._active = self._count_active(reduced)
        self._reduced_before = reduced

    def _leave(self, has_roots: bool) -> bool:
        """Whether the forward comes outside of no_sync()."""
        return self._sync

    def _check_module(self) -> None:
        """Refuses a module whose gradients the reducer would not average, or which another owner averages too."""
        self._watch.refuse_ddp()
        if not self._watch.same():
            self._watch.refuse_change()
            self._watch.take()
        self._checked = True

    def _share_buffers(self, own_are_current: bool) -> None:
        if not self._options.broadcast_buffers or not self._reduced_before or not self._watch.has_buffers:
            return
        source = 0
        if self._join_config.enable:
            source = one_rank(own_are_current, self._group, self._device)
        replicas.broadcast_buffers(self._module, self._group, source)

    def _count_active(self, reduced: bool) -> int:
        """The number of ranks that call this for a forward whose gradients they will reduce. Collective."""
        count = torch.tensor([int(reduced)], device=self._device)
        dist.all_reduce(count, group=self._group)
        return int(count)

    # -- a backward begins --

    def _begin(self, arrived: int | None, context: bool) -> ReducerBackward:
        if not self._checked:  # no forward of the whole module came before
            self._check_module()
        record = self._record_of(self._on_end, context if self._merge is None else self._merge.closes, arrived)
        if self._join_config.enable and not self._divide_by_initial_world_size:
            record.scale = dist.get_world_size(self._group) / max(1, self._active)
        if self._merge is None:  # it has to see the first gradient of a backward
            self._arm(record)
        return record

    def _record_of(self, end: Callable[[], None] | None, reducing: bool, arrived: int | None) -> ReducerBackward:
        """`arrived`: the parameter whose gradient has come before the backward was seen to begin."""
        self._channel.labels.begin(self._join_config.enable)
        flat, tree = self._flat, self._tree
        states = [BucketState(b, self._in_place(b.device), BucketTimes(b.nbytes, b.indices)) for b in flat.buckets]
        waiting = [len(bucket.members) for bucket in flat.buckets]
        if self._expected is not None:
            waiting = [sum(self._expected[i] > 0 for i in bucket.indices) for bucket in flat.buckets]
        used = bytearray(len(self._used)) if tree is not None and tree.count == 0 else bytearray(self._used)
        record = ReducerBackward(end, reducing, flat, states, waiting, used)
        if not self._options.delay:  # which hands over the views of a set that is in the other's place by then
            record.users = [gradient.users() for gradient in flat.gradients]
        if tree is not None:
            record.at_end(record.put_back)
            self._begin_tree(tree, record, arrived)
        elif in_backward() and (not reducing or any(self._used)):
            record.at_end(self._sums.end)
            self._sums.begin(arrived)
        record.late = record.in_place and not self._in_backward and not self._channel.overlaps(self._device)
        if record.in_place:
            record.make_registered()
        return record

    def _in_place(self, device: torch.device) -> bool:
        """Whether gradients are reduced in place or in buckets: the same on all ranks."""
        return not self._options.delay and not self._options.measured and self._channel.in_place(device)

    def _arm(self, record: ReducerBackward) -> None:
        """Lets hooks note the gradients of this backward that are reduced in place, until their bucket is full."""
        if self._options.static_graph or self._sums.apart:
            return
        found = record.flat.buckets
        with_buffers = [bucket for bucket in found if bucket.has_buffer]
        if self._noted_places != (found, with_buffers):
            self._noted_places = (found, with_buffers)
            self._noted.place(record.flat.places())
        missing = [
            0 if not state.in_place or state.work is not None
            else waiting if record.reducing and not record.late
            else len(state.bucket.members) + 1
            for state, waiting in zip(record.states, record.launches.waiting, strict=True)
        ]  # fmt: skip
        self._noted.arm(missing, list(record.timeline.arrivals))

    def _arrivals(self, record: ReducerBackward) -> dict[int, int]:
        """The gradients that have arrived, those that hooks noted included."""
        indices, times, tensors = self._noted.take()
        if indices:
            record.timeline.arrivals.update(zip(indices, times, strict=True))
            used, gradients, waiting = record.used, record.flat.gradients, record.launches.waiting
            for index, own in zip(indices, tensors, strict=True):
                used[index] = 1
                if record.reducing:
                    record.own[index] = own
                    waiting[gradients[index].bucket.number] -= 1
        return record.timeline.arrivals

    # -- a gradient arrives --

    def _take(self, index: int) -> None:
        record = self._record
        if record is None or record.stopped:
            record = self._open(index, self._sync)
        again = index in self._arrivals(record)
        if self._merge is not None and not record.timeline.arrivals:
            record.scale = self._merge.begin()
        gradient = record.flat.gradients[index]
        dropped = gradient.parameter.grad is None  # by a hook: it did not arrive
        self._sums.add(index, gradient.parameter)
        if not dropped:
            self._place(record, gradient)
            self._count(record, gradient, again)
        if not self._noted.armed:
            self._arm(record)

    def _place(self, record: ReducerBackward, gradient: Gradient) -> None:
        """Takes the gradient that arrived as it is, or puts it into the bucket."""
        index, arrived = gradient.index, gradient.parameter.grad
        assert arrived is not None
        if (self._tree is not None and not record.reducing) or gradient.is_at(arrived):
            return
        refuse_layout(gradient.name, arrived.layout)
        if (arrived.shape, arrived.dtype) != (gradient.shape, gradient.dtype):
            raise InvalidUsage(
                f"the gradient of {gradient.name} has shape {list(arrived.shape)} and {arrived.dtype}, but the "
                f"reducer was made for {list(gradient.shape)} and {gradient.dtype}: "
                + (
                    "make a new GradientReducer after a parameter has changed"
                    if arrived.dtype == gradient.parameter.dtype
                    else "it reduces a gradient in its parameter's dtype: leave the parameter's grad_dtype as it was"
                )
            )
        state, views = record.states[gradient.bucket.number], self._options.gradient_as_bucket_view
        if state.work is not None:
            return
        if state.in_place and gradient.can_own(arrived):
            if record.reducing:
                record.own[index] = arrived
        elif record.reducing or views:
            record.own[index] = None  # what arrived before in another layout
            users = record.users[index]
            if users is not None and not record.reducing:
                return
            gradient.view.copy_(arrived.detach())
            if views and users is None:
                gradient.hand_over()

    def _count(self, record: ReducerBackward, gradient: Gradient, again: bool) -> None:
        """Counts the gradient, and sends its bucket if that is full."""
        index, launches, number = gradient.index, record.launches, gradient.bucket.number
        record.used[index] = 1
        record.times[index] += 1
        record.timeline.arrive(index)
        if not record.reducing:
            return
        if number < launches.sent or (record.late and again and launches.is_full(number)):
            refuse_again(gradient.name, "bucket", ": static_graph=True counts how often")
        if self._options.static_graph:
            if self._expected is None or record.times[index] != self._expected[index]:
                return
        elif again:
            return
        launches.waiting[number] -= 1
        if not record.late and (launches.waiting[number] == 0 or self._channel.hooked):  # which a full bucket waits for
            self._launch(record, waits=False)

    def _launch(self, record: ReducerBackward, waits: bool) -> None:
        """Sends the buckets that are full, in launch order. `waits`: until each may be sent."""
        while (waits or self._channel.free()) and (number := record.launches.next()) is not None:
            state = record.states[number]
            bucket = state.bucket
            for index in bucket.indices:
                if index not in record.timeline.arrivals:
                    self._fill(record, index)
            state.times.launched_ns = now_ns()
            tensors, op = record.tensors(bucket) if state.in_place else None, dist.ReduceOp.AVG
            reduced = [bucket.buffer] if tensors is None else tensors
            if self._tree is not None:  # the sum times a factor, which is rounded once if that is a power of two
                fresh = [g.view if (own := record.own[g.index]) is None else own for g in bucket.members]
                self._tree.add_to(fresh, bucket.indices)
                state.scaled = (reduced, record.scale / dist.get_world_size(self._group))
                op = dist.ReduceOp.SUM
            elif record.scale != 1.0:
                torch._foreach_mul_(reduced, record.scale)
            with ranges(f"GradientReducer: send bucket {number}"):
                state.work = self._channel.start(bucket, state is record.states[-1], tensors, op, record.late)
            if tensors is None:  # a future would have another thread take the work out of this one's hands
                state.work.get_future().add_done_callback(state.mark_done)
        if self._in_backward and not self._options.any_may_be_unused:
            for state in record.states[: record.launches.sent]:
                if state.work.is_completed():
                    state.wait()
                    self._in_backward.step(record, state.bucket.members, record.used)

    def _fill(self, record: ReducerBackward, index: int) -> None:
        """Gives a gradient that did not arrive its value in the buffer: the value of `.grad`, or zero.

        If the buffer holds a value of an earlier window, keeps it, to put it back if no rank has a gradient.
        """
        if index in record.filled:
            return
        gradient, kept = record.flat.gradients[index], None
        self._sums.put_back(index, gradient.parameter)
        record.own[index] = None
        current = gradient.parameter.grad
        if current is None:
            gradient.view.zero_()
            if self._tree is None:  # else an earlier micro-batch may have it
                record.used[index] = 0
        elif not gradient.is_at(current):
            gradient.view.copy_(current)
        elif not record.used[index]:
            kept = current.clone()
        record.filled[index] = kept

    # -- a backward ends, or stops --

    def _close(self, record: ReducerBackward) -> None:
        timeline, merge, tree = record.timeline, self._merge, self._tree
        timeline.ended_ns = now_ns()
        arrived = self._arrivals(record)
        if record.of_autograd and not arrived:
            return  # torch.autograd.grad, which leaves .grad alone
        self._sums.end()
        if arrived:
            self._seen_order = list(arrived)
        if not record.reducing:
            if tree is not None:
                self._push(tree, record)
            self._used = record.used
            record.put_back()
            if merge is not None:
                merge.seen += 1
            return
        # Whatever is raised from here on, the window is over.
        self._used = bytearray(len(record.used))
        counts = None if merge is None else merge.close()
        absent = [index for index in range(len(record.used)) if index not in arrived]
        for index in absent:
            self._fill(record, index)
        wrong = self._strayed(record) if self._options.any_may_be_unused else [i for i in absent if not record.used[i]]
        self._sums.forget()
        record.launches.fill()
        try:
            self._launch(record, waits=True)
        finally:
            if tree is not None:
                tree.forget()
        used = self._agree_on_used(record.used)
        if self._options.delay:
            self._exchange(record)
        else:
            self._receive(record, timeline.ended_ns)
            record.give(self._flat.gradients, used, self._options.gradient_as_bucket_view)
            if self._in_backward:
                self._in_backward.step(record, self._flat.gradients, used)
                self._in_backward.drop(self._flat.gradients)
        self._lay_out_anew(record)
        record.put_back()
        if merge is not None and counts is not None:
            merge.closed(counts)
        if wrong:
            if merge is not None:
                merge.spoil()
            rank, static = dist.get_rank(self._group), self._options.static_graph
            refusals.refuse_gradients([self._named[i] for i in wrong], len(self._named), rank, static)
        if record.earlier:
            refusals.refuse_earlier_values([self._named[index][0] for index in record.earlier])

    def _abandon(self, record: ReducerBackward, arrived: int | None) -> None:
        """Drops reproducible sums of the window. Raises InvalidUsage if buckets had been sent."""
        had_arrived, merge = bool(self._arrivals(record)), self._merge
        if self._tree is not None and had_arrived:
            for index in record.timeline.arrivals:
                record.flat.gradients[index].parameter.grad = None
            self._tree.forget()
            record.put_back()
        if merge is not None and (had_arrived or record.launches.sent):  # the window is lost
            self._used = bytearray(len(self._used))
        if record.launches.sent:
            if merge is not None:
                merge.forget()
            refusals.refuse_stopped(dist.get_rank(self._group), record.launches.sent, len(record.states), "buckets")
        if merge is not None:
            merge.abandon(had_arrived)
        elif self._options.used_change:  # what it has left in `.grad` is averaged with the next gradients
            for index in record.timeline.arrivals:
                self._used[index] = 1

    def _idle(self) -> None:
        super()._idle()
        self._checked = False
        self._noted.disarm()

    def _forget_window(self) -> None:
        """After GradientMerge.drop(). Raises InvalidUsage if the group cannot go on."""
        self._check_stopped()
        self._used = bytearray(len(self._used))
        self._sums.forget()

    def _finish_window(self) -> bool:
        """GradientMerge.finish(): reduces the gradients of a window that is not full, outside of a backward."""
        self._check_attached("finish()")
        self._check_stopped()
        assert self._merge is not None
        self._merge.check_gradients()
        scale = self._merge.begin_finish()
        if scale is None:
            return False
        self._record = self._record_of(None, True, None)
        self._record.scale = scale
        self._on_end()
        return True

    def _shadow(self) -> None:
        """Of a rank without inputs: takes part in a reducing backward of the others, with zeros and the same
        collectives in the same order. Leaves this rank's gradients alone."""
        self._channel.labels.begin(joining=True)
        started, last = [], len(self._flat.buckets) - 1
        for bucket in self._flat.buckets:
            zeros = bucket.zeros()
            tensors = [gradient.flat(None) for gradient in zeros.members] if self._in_place(bucket.device) else None
            started.append(self._channel.start(zeros, bucket.number == last, tensors))
        self._agree_on_used(bytearray(len(self._used)))
        for work in started:
            work.wait()
        self._lay_out_anew(None)

    def _receive(self, record: ReducerBackward, since_ns: int) -> None:
        """Waits until the buckets are reduced, and records the times."""
        timeline = record.timeline
        with ranges("GradientReducer: wait for averages"):
            for state in record.states:
                state.wait()
                state.mark_done()
        timeline.finished_ns = now_ns()
        timeline.exposed_ns = timeline.finished_ns - since_ns
        self._totals.add(timeline)

    def _hand_over_pending(self) -> bool:
        """With delay: hands over the gradients that were sent last. Returns whether there were any."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._receive(pending, now_ns())
            for gradient in pending.flat.gradients:
                gradient.hand_over()
        return pending is not None

    def _exchange(self, record: ReducerBackward) -> None:
        """Delay: hands over the gradients sent before, and goes on with the set of buffers that held them."""
        if not self._hand_over_pending():
            for gradient in record.flat.gradients:
                gradient.parameter.grad = None
        self._pending = record
        self._flat = self._sets[1] if self._flat is self._sets[0] else self._sets[0]

    # -- what ranks agree on --

    def _strayed(self, record: ReducerBackward) -> list[int]:
        """Static graph: the parameters whose gradients did not arrive as often as in the first reduced backward."""
        if not self._options.static_graph or not record.timeline.arrivals:
            return []
        if self._expected is None:
            self._expected = record.times
        return [index for index, times in enumerate(self._expected) if record.times[index] != times]

    def _agree_on_used(self, used: bytearray) -> Sequence[int]:
        """Which parameters got a gradient on any rank, or on this rank if none may be unused."""
        if not self._options.any_may_be_unused:
            return used
        if self._static_used is None or self._options.used_change:
            found = torch.tensor(list(used), dtype=torch.uint8, device=self._device)
            dist.all_reduce(found, dist.ReduceOp.MAX, self._group)
            self._static_used = found.tolist()
        return self._static_used

    def _lay_out_anew(self, record: ReducerBackward | None) -> None:
        """Lays the buckets out once more, in the order in which rank 0's gradients arrived, or as merging decides."""
        if self._rebuild_due:
            self._rebuild_due = False
            default = [slot.index for bucket in self._flat.plan for slot in bucket.slots]
            self._order = order_of_rank_0(self._seen_order, default, self._group, self._device)
            self._flat.reorder(self._order)
            self._tell_layout("in the order of arrival")
        elif self._merging is not None and record is not None:
            plan = self._merging.observe(record.timeline, self._flat.plan)
            if plan is not None:
                self._flat.adopt(plan)
                self._tell_layout("as merging measures it")
        elif self._options.delay and self._order is not None:  # the set of buffers that was away
            self._flat.reorder(self._order)
            self._order = None

    def _tell_layout(self, how: str) -> None:
        self._channel.labels.lay_out(len(self._flat.plan))
        self._channel.tell_layout(self._flat.plan, how)

    # -- reproducible sums --

    @torch.no_grad()
    def _begin_tree(self, tree: TreeSums, record: ReducerBackward, arrived: int | None) -> None:
        """Puts `.grad` aside, so that autograd adds nothing to it: each micro-batch is a leaf of the tree."""
        for gradient in record.flat.gradients:
            current = gradient.parameter.grad
            if current is not None and gradient.index != arrived:
                if record.reducing and bool(current.any()):
                    record.earlier.append(gradient.index)
                record.aside.append((gradient, current))
                gradient.parameter.grad = None
        if tree.count and not in_backward():  # finish(): as if the window's sum had just arrived
            for gradient, total in zip(record.flat.gradients, tree.take(), strict=True):
                if record.used[gradient.index]:
                    gradient.parameter.grad = total

    def _push(self, tree: TreeSums, record: ReducerBackward) -> None:
        taken = []
        for gradient in record.flat.gradients:
            arrived = gradient.parameter.grad if gradient.index in record.timeline.arrivals else None
            if arrived is None:
                zeros = torch.empty_strided(gradient.shape, gradient.layout, dtype=gradient.dtype, device=self._device)
                taken.append(zeros.zero_())
                continue
            refuse_layout(gradient.name, arrived.layout)
            own = has_own_memory(arrived) and not arrived.requires_grad
            taken.append(arrived if own else arrived.detach().clone())
            gradient.parameter.grad = None
        tree.push(taken)
