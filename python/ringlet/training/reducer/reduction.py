"""A module's gradients on their way through a backward: into buckets, over the wire, back to `.grad`.

Of a backward the reducer calls `begin`, `take` any number of times, and `close`; `drop` if it stopped. A rank without
inputs calls `shadow` instead. It takes part in the same collectives in the same order: each bucket in launch order,
which parameters were used (if that may change), the order of arrival (once). The reducer decides whether a backward
reduces, in the same way on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ringlet.errors import InvalidUsage
from ringlet.training.agree import order_of_rank_0
from ringlet.training.backward import in_backward
from ringlet.training.gradient_hooks import GradientArrivals, has_own_memory, own_memory
from ringlet.training.refusals import refuse_again, refuse_layout
from ringlet.training.reproducible import TreeSums

from .channel import Channel
from .flat_gradients import FlatGradients, Gradient
from .measured import MeasuredMerging
from .options import Options
from .record import BucketState, ReducerBackward
from .stepping import Stepping
from .timeline import BucketTimes, Totals, now_ns, ranges
from .wide_sums import WideSums


class Reduction:
    """What outlives a backward: buffers, orders, sums of a window. Reduced gradients are averages over ranks.

    `used`: the gradients that arrived since the last reduction. With `delay` two sets of buffers take turns: one is
    being reduced while the other is filled. With `reproducible`, `tree` has the sums of a window, and `.grad` is as
    before the window until it closes. Not thread-safe.
    """

    def __init__(
        self,
        parameters: list[tuple[str, torch.nn.Parameter]],
        options: Options,
        channel: Channel,
        stepping: Stepping,
    ) -> None:
        self.options, self.channel, self.stepping = options, channel, stepping
        self._sets = [FlatGradients(parameters, options.caps, channel.group) for _ in range(1 + options.delay)]
        self.flat = self._sets[0]
        self.device = parameters[0][1].device
        self.totals = Totals()
        self.used = bytearray(len(parameters))
        self.rebuild_due = not options.used_change and len(self.flat.plan) > 1
        self._order: list[int] | None = None  # of arrival, agreed on, for the set of buffers that is away
        self._seen_order: list[int] = []  # in this rank's latest backward
        self._expected: list[int] | None = None  # static graph: how often each parameter's gradient arrives
        self._static_used: list[int] | None = None  # static graph: which ones any rank uses
        self.merging: MeasuredMerging | None = None
        if options.measured:
            self.merging = MeasuredMerging(self.flat.entries, channel, self.device)
        self._pending: ReducerBackward | None = None  # delay: sent, not yet handed over
        self.tree = TreeSums() if options.reproducible else None
        added = [] if options.reproducible else [parameter for _, parameter in parameters]
        self.sums = WideSums(added, options.accumulate_dtype)
        self.noted = GradientArrivals([gradient.like() for gradient in self.flat.gradients], own_memory())
        self._noted_places: Any = None  # the buckets, and those that have buffers, of which `noted` knows
        self._tell_layout("by size")

    # -- one backward --

    def begin(self, end: Callable[[], None] | None, reducing: bool, arrived: int | None) -> ReducerBackward:
        """`arrived`: the parameter whose gradient has come before the backward was seen to begin."""
        in_place = self._in_place()
        states = [BucketState(bucket, in_place[bucket.device]) for bucket in self.flat.buckets]
        waiting = [len(bucket.members) for bucket in self.flat.buckets]
        if self._expected is not None:
            waiting = [sum(self._expected[i] > 0 for i in bucket.indices) for bucket in self.flat.buckets]
        record = ReducerBackward(end, reducing, self.flat, states, waiting)
        if not self.options.delay:  # which hands over the views of a set that is in the other's place by then
            record.users = [gradient.users() for gradient in self.flat.gradients]
        if self.tree is not None:
            record.at_end(record.put_back)
            self._begin_tree(self.tree, record, arrived)
        elif in_backward() and (not reducing or any(self.used)):
            record.at_end(self.sums.end)
            self.sums.begin(arrived)
        record.late = record.in_place and not self.stepping.active and not self.channel.overlaps(self.device)
        if record.in_place:
            record.make_registered()
        return record

    def _in_place(self) -> dict[torch.device, bool]:
        """Whether gradients are reduced in place or in buckets: the same on all ranks."""
        plain = not self.options.delay and not self.options.measured
        return {device: plain and self.channel.in_place(device) for device in {b.device for b in self.flat.buckets}}

    def arm(self, record: ReducerBackward) -> None:
        """Lets hooks note the gradients of this backward that are reduced in place, until their bucket is full."""
        if self.options.static_graph or self.sums.apart:
            return
        found = record.flat.buckets
        with_buffers = [bucket for bucket in found if bucket.has_buffer]
        if self._noted_places != (found, with_buffers):
            self._noted_places = (found, with_buffers)
            self.noted.place(record.flat.places())
        missing = [
            0 if not state.in_place or state.work is not None
            else waiting if record.reducing and not record.late
            else len(state.bucket.members) + 1
            for state, waiting in zip(record.states, record.launches.waiting, strict=True)
        ]  # fmt: skip
        self.noted.arm(missing, list(record.timeline.arrivals))

    def arrivals(self, record: ReducerBackward) -> dict[int, int]:
        """The gradients that have arrived, those that hooks noted included."""
        indices, times, tensors = self.noted.take()
        if indices:
            record.timeline.arrivals.update(zip(indices, times, strict=True))
            used, gradients, waiting = self.used, record.flat.gradients, record.launches.waiting
            for index, own in zip(indices, tensors, strict=True):
                used[index] = 1
                if record.reducing:
                    record.own[index] = own
                    waiting[gradients[index].bucket.number] -= 1
        return record.timeline.arrivals

    def take(self, record: ReducerBackward, index: int) -> None:
        """The gradient of a parameter has arrived in `.grad`."""
        again = index in self.arrivals(record)
        gradient = record.flat.gradients[index]
        dropped = gradient.parameter.grad is None  # by a hook: it did not arrive
        self.sums.add(index, gradient.parameter)
        arrived = gradient.parameter.grad
        if dropped or arrived is None:
            return
        if (self.tree is None or record.reducing) and not gradient.is_at(arrived):
            self._place(record, gradient, arrived)
        self.used[index] = 1
        record.times[index] += 1
        record.timeline.arrive(index)
        if not record.reducing:
            return
        launches, number = record.launches, gradient.bucket.number
        if number < launches.sent or (record.late and again and launches.is_full(number)):
            refuse_again(gradient.name, "bucket", ": static_graph=True counts how often")
        if self.options.static_graph:
            if self._expected is None or record.times[index] != self._expected[index]:
                return
        elif again:
            return
        launches.waiting[number] -= 1
        if not record.late and (launches.waiting[number] == 0 or self.channel.hooked):  # which a full bucket waits for
            self._launch(record, waits=False)

    def _place(self, record: ReducerBackward, gradient: Gradient, arrived: torch.Tensor) -> None:
        """Takes the gradient that arrived as it is, or puts it into the bucket."""
        index = gradient.index
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
        state, views = record.states[gradient.bucket.number], self.options.gradient_as_bucket_view
        if state.in_place and gradient.can_own(arrived):
            if record.reducing and state.work is None:
                record.own[index] = arrived
        elif state.work is None and (record.reducing or views):
            record.own[index] = None  # what arrived before in another layout
            users = record.users[index]
            if users is not None and not record.reducing:
                return
            gradient.view.copy_(arrived.detach())
            if views and users is None:
                gradient.hand_over()

    def close(self, record: ReducerBackward) -> list[int]:
        """The end of a backward. Returns the parameters whose gradients should have come and did not."""
        timeline = record.timeline
        timeline.ended_ns = now_ns()
        arrived = self.arrivals(record)
        self.sums.end()
        if arrived:
            self._seen_order = list(arrived)
        if not record.reducing:
            if self.tree is not None:
                self._push(self.tree, record)
            return []
        absent = [index for index in range(len(self.used)) if index not in arrived]
        for index in absent:
            self._fill(record, index)
        wrong = self._strayed(record) if self.options.any_may_be_unused else [i for i in absent if not self.used[i]]
        self.sums.forget()
        record.launches.fill()
        self._launch(record, waits=True)
        if self.tree is not None:
            self.tree.forget()
        used = self._agree_on_used(self.used)
        if self.options.delay:
            self._exchange(record)
        else:
            self._receive(record, timeline.ended_ns)
            record.give(self.flat.gradients, used, self.options.gradient_as_bucket_view)
            if self.stepping.active:
                self.stepping.step(record, self.flat.gradients, used)
                self.stepping.end(self.flat.gradients)
        self._lay_out_anew(record)
        self.used = bytearray(len(self.used))
        return wrong

    def shadow(self) -> None:
        """Takes part in a reducing backward of the other ranks with zeros. Leaves this rank's gradients alone."""
        self.channel.labels.begin(joining=True)
        started, last, in_place = [], len(self.flat.buckets) - 1, self._in_place()
        for bucket in self.flat.buckets:
            zeros = bucket.zeros()
            tensors = [gradient.flat(None) for gradient in zeros.members] if in_place[bucket.device] else None
            started.append(self.channel.start(zeros, bucket.number == last, tensors))
        self._agree_on_used(bytearray(len(self.used)))
        for work in started:
            work.wait()
        self._lay_out_anew(None)

    def flush(self) -> bool:
        """With delay: hands over the gradients that were sent last. Returns whether there were any."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._receive(pending, now_ns())
            for gradient in pending.flat.gradients:
                gradient.hand_over()
        return pending is not None

    def drop(self, record: ReducerBackward) -> None:
        """Drops the gradients of a backward that stopped: of reproducible sums the whole window."""
        if self.tree is not None and self.arrivals(record):
            for index in record.timeline.arrivals:
                record.flat.gradients[index].parameter.grad = None
            self.tree.forget()
            record.put_back()

    # -- reproducible sums --

    @torch.no_grad()
    def _begin_tree(self, tree: TreeSums, record: ReducerBackward, arrived: int | None) -> None:
        """Puts `.grad` aside, so that autograd adds nothing to it: each micro-batch is a leaf of the tree."""
        if tree.count == 0:
            self.used = bytearray(len(self.used))
        for gradient in record.flat.gradients:
            current = gradient.parameter.grad
            if current is not None and gradient.index != arrived:
                if record.reducing and bool(current.any()):
                    record.earlier.append(gradient.index)
                record.aside.append((gradient, current))
                gradient.parameter.grad = None
        if tree.count and not in_backward():  # finish(): as if the window's sum had just arrived
            for gradient, total in zip(record.flat.gradients, tree.take(), strict=True):
                if self.used[gradient.index]:
                    gradient.parameter.grad = total

    def _push(self, tree: TreeSums, record: ReducerBackward) -> None:
        taken = []
        for gradient in record.flat.gradients:
            arrived = gradient.parameter.grad if gradient.index in record.timeline.arrivals else None
            if arrived is None:
                zeros = torch.empty_strided(gradient.shape, gradient.layout, dtype=gradient.dtype, device=self.device)
                taken.append(zeros.zero_())
                continue
            refuse_layout(gradient.name, arrived.layout)
            own = has_own_memory(arrived) and not arrived.requires_grad
            taken.append(arrived if own else arrived.detach().clone())
            gradient.parameter.grad = None
        tree.push(taken)

    # -- sending --

    def _launch(self, record: ReducerBackward, waits: bool) -> None:
        """Sends the buckets that are full, in launch order. `waits`: until each may be sent."""
        while (waits or self.channel.free()) and (number := record.launches.next()) is not None:
            state = record.states[number]
            bucket = state.bucket
            for index in bucket.indices:
                if index not in record.timeline.arrivals:
                    self._fill(record, index)
            state.launched_ns = now_ns()
            tensors, op = record.tensors(bucket) if state.in_place else None, dist.ReduceOp.AVG
            reduced = [bucket.buffer] if tensors is None else tensors
            if self.tree is not None:  # the sum times a factor, which is rounded once if that is a power of two
                fresh = [g.view if (own := record.own[g.index]) is None else own for g in bucket.members]
                self.tree.add_to(fresh, bucket.indices)
                state.scaled = (reduced, record.scale / dist.get_world_size(self.channel.group))
                op = dist.ReduceOp.SUM
            elif record.scale != 1.0:
                torch._foreach_mul_(reduced, record.scale)
            with ranges(f"GradientReducer: send bucket {number}"):
                state.work = self.channel.start(bucket, state is record.states[-1], tensors, op, record.late)
            if tensors is None:  # a future would have another thread take the work out of this one's hands
                state.work.get_future().add_done_callback(state.mark_done)
        if self.stepping.active and not self.options.any_may_be_unused:
            for state in record.states[: record.launches.sent]:
                if state.work.is_completed():
                    state.wait()
                    self.stepping.step(record, state.bucket.members, self.used)

    def _fill(self, record: ReducerBackward, index: int) -> None:
        """Gives a gradient that did not arrive its value in the buffer: the value of `.grad`, or zero.

        If the buffer holds a value of an earlier window, keeps it, to put it back if no rank has a gradient.
        """
        if index in record.filled:
            return
        gradient, kept = record.flat.gradients[index], None
        record.own[index] = None
        current = gradient.parameter.grad
        if current is None:
            gradient.view.zero_()
            if self.tree is None:  # else an earlier micro-batch may have it
                self.used[index] = 0
        elif not gradient.is_at(current):
            gradient.view.copy_(current)
        elif not self.used[index]:
            kept = current.clone()
        record.filled[index] = kept

    def _strayed(self, record: ReducerBackward) -> list[int]:
        """Static graph: the parameters whose gradients did not arrive as often as in the first reduced backward."""
        if not self.options.static_graph or not record.timeline.arrivals:
            return []
        if self._expected is None:
            self._expected = record.times
        return [index for index, times in enumerate(self._expected) if record.times[index] != times]

    def _agree_on_used(self, used: bytearray) -> Sequence[int]:
        """Which parameters got a gradient on any rank, or on this rank if none may be unused."""
        if not self.options.any_may_be_unused:
            return used
        if self._static_used is None or self.options.used_change:
            found = torch.tensor(list(used), dtype=torch.uint8, device=self.device)
            dist.all_reduce(found, dist.ReduceOp.MAX, self.channel.group)
            self._static_used = found.tolist()
        return self._static_used

    def _tell_layout(self, how: str) -> None:
        self.channel.labels.lay_out(len(self.flat.plan))
        self.channel.tell_layout(self.flat.plan, how)

    # -- receiving --

    def _receive(self, record: ReducerBackward, since_ns: int) -> None:
        """Waits until the buckets are reduced, and records the times."""
        timeline = record.timeline
        with ranges("GradientReducer: wait for averages"):
            for state in record.states:
                state.wait()
                state.done_ns = state.done_ns or now_ns()
        timeline.finished_ns = now_ns()
        timeline.exposed_ns = timeline.finished_ns - since_ns
        for state in record.states:
            # the backend may report it a moment after the wait for it was over
            done_ns = min(state.done_ns, timeline.finished_ns)
            timeline.buckets.append(BucketTimes(state.bucket.nbytes, state.bucket.indices, state.launched_ns, done_ns))
        self.totals.add(timeline)

    def _exchange(self, record: ReducerBackward) -> None:
        """Delay: hands over the gradients sent before, and goes on with the set of buffers that held them."""
        if not self.flush():
            for gradient in record.flat.gradients:
                gradient.parameter.grad = None
        self._pending = record
        self.flat = self._sets[1] if self.flat is self._sets[0] else self._sets[0]

    def _lay_out_anew(self, record: ReducerBackward | None) -> None:
        """Lays the buckets out once more, in the order in which rank 0's gradients arrived, or as merging decides."""
        if self.rebuild_due:
            self.rebuild_due = False
            default = [slot.index for bucket in self.flat.plan for slot in bucket.slots]
            self._order = order_of_rank_0(self._seen_order, default, self.channel.group, self.device)
            self.flat.reorder(self._order)
            self._tell_layout("in the order of arrival")
        elif self.merging is not None and record is not None:
            plan = self.merging.observe(record.timeline, self.flat.plan)
            if plan is not None:
                self.flat.adopt(plan)
                self._tell_layout("as merging measures it")
        elif self.options.delay and self._order is not None:  # the set of buffers that was away
            self.flat.reorder(self._order)
            self._order = None
