"""One module's gradients on their way through a backward: into buckets, over the wire, back to `.grad`.

In a backward the caller calls `open`, `arrived` any number of times, and `close`. A rank without inputs calls `shadow`
instead. It takes part in the same collectives in the same order: each bucket in launch order, which parameters were
used (if that may change), the order of arrival (once). The caller decides whether a backward reduces, in the same way
on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ringlet.errors import InvalidUsage
from ringlet.training.backward import in_backward
from ringlet.training.gradient_hooks import GradientArrivals, has_own_memory, own_memory
from ringlet.training.refusals import refuse_again, refuse_layout
from ringlet.training.reproducible import TreeSums

from . import events
from .channel import Channel
from .flat_gradients import FlatBucket, FlatGradients, Gradient
from .measured import MeasuredMerging
from .options import Options
from .stepping import Stepping
from .timeline import BucketTimes, Timeline, Totals, now_ns
from .wide_sums import WideSums


class Reduction:
    """The buffers and the state of a backward under way. Not thread-safe; reduced gradients are averages over ranks.

    `scale` multiplies this rank's gradients before they are averaged, for the next reducing backward only. With
    `delay` two sets of buffers take turns: one is being reduced while the other is filled. With `reproducible`, `tree`
    has the sums of a window, and `.grad` is as before the window until it closes.
    """

    def __init__(
        self,
        parameters: list[tuple[str, torch.nn.Parameter]],
        options: Options,
        channel: Channel,
        stepping: Stepping,
    ) -> None:
        self.options, self.channel, self.stepping = options, channel, stepping
        self.sets = [FlatGradients(parameters, options.caps, channel.group) for _ in range(1 + options.delay)]
        self.flat = self.sets[0]
        self.device = parameters[0][1].device
        self.totals = Totals()
        self.scale = 1.0
        self.used = bytearray(len(parameters))  # gradients that arrived since the last reduction
        self.rebuild_due = not options.used_change and len(self.flat.plan) > 1
        self._order: list[int] | None = None  # of arrival, agreed on
        self._seen_order: list[int] = []  # in this rank's latest backward
        self._expected: list[int] | None = None  # static graph: how often each parameter's gradient arrives
        self._static_used: list[int] | None = None  # static graph: which ones any rank uses
        self.merging: MeasuredMerging | None = None
        self._pending: tuple[FlatGradients, Timeline] | None = None  # delay: sent, not yet handed over
        self._reducing = False
        self.late = False  # all buckets of the backward are sent at its end
        self.tree = TreeSums() if options.reproducible else None
        self._aside: list[tuple[Gradient, torch.Tensor]] = []  # reproducible: what was in `.grad`
        self.earlier: list[int] = []  # the parameters of which that was not zero when the window closed
        added = [] if options.reproducible else [parameter for _, parameter in parameters]
        self.sums = WideSums(added, options.accumulate_dtype)
        self.noted = GradientArrivals([gradient.like() for gradient in self.flat.gradients], own_memory())
        self._noted_places: Any = None  # the buckets, and those that have buffers, of which `noted` knows
        self._tell_layout("by size")
        self.rearm()

    # -- one backward --

    def open(self, reducing: bool, arrived: int | None = None) -> None:
        """`arrived`: the parameter whose gradient has come before the backward was seen to begin."""
        self._reducing = reducing
        self._choose_place()
        if not self.options.delay:  # which hands over the views of a set that is in the other's place by then
            for gradient in self.flat.gradients:
                gradient.find_users()
        if self.tree is not None:
            self._begin_tree(self.tree, arrived)
        elif in_backward() and (not reducing or any(self.used)):
            self.sums.begin(arrived)
        self.late = not self.stepping.active and self.in_place and not self.channel.overlaps(self.device)
        self._timeline.begin_ns = now_ns()

    def _choose_place(self) -> None:
        """Whether gradients are reduced in place or in buckets: the same on all ranks."""
        plain = not self.options.delay and not self.options.measured
        for bucket in self.flat.buckets:
            bucket.in_place = plain and self.channel.in_place(bucket.device)

    @property
    def in_place(self) -> bool:
        """Whether the gradients of this backward are reduced where autograd puts them."""
        return all(bucket.in_place for bucket in self.flat.buckets)

    def arm(self) -> None:
        """Lets hooks note the gradients of this backward that are reduced in place, until their bucket is full."""
        if self.options.static_graph or self.sums.apart:
            return
        found = self.flat.buckets
        with_buffers = [bucket for bucket in found if bucket.has_buffer]
        if self._noted_places != (found, with_buffers):
            self._noted_places = (found, with_buffers)
            self.noted.place(self.flat.places())
        missing = [
            0 if not bucket.in_place or bucket.work is not None
            else bucket.waiting if self._reducing and not self.late
            else len(bucket.members) + 1
            for bucket in found
        ]  # fmt: skip
        self.noted.arm(missing, list(self._timeline.arrivals))

    def _take_noted(self) -> None:
        indices, times, tensors = self.noted.take()
        if not indices:
            return
        self._timeline.arrivals.update(zip(indices, times, strict=True))
        used, gradients = self.used, self.flat.gradients
        for index, own in zip(indices, tensors, strict=True):
            used[index] = 1
            if self._reducing:
                gradient = gradients[index]
                gradient.own = own
                gradient.bucket.waiting -= 1

    def arrived(self, index: int, parameter: torch.Tensor) -> None:
        self._take_noted()
        dropped = parameter.grad is None  # by a hook: it did not arrive
        self.sums.add(index, parameter)
        if dropped:
            return
        gradient = self.flat.gradients[index]
        if self.tree is None or self._reducing:
            self._take(gradient, parameter)
        self.used[index] = 1
        self._arrivals[index] += 1
        again = index in self._timeline.arrivals
        self._timeline.arrive(index)
        if not self._reducing:
            return
        bucket = gradient.bucket
        if bucket.work is not None or (self.late and again and self._is_full(bucket)):
            refuse_again(gradient.name, "bucket", ": static_graph=True counts how often")
        if self.options.static_graph:
            if self._expected is None or self._arrivals[index] != self._expected[index]:
                return
        elif again:
            return
        bucket.waiting -= 1
        if not self.late and (
            bucket.waiting == 0 or self.channel.hooked
        ):  # a full bucket may be waiting for the hook before it
            self._launch_full(waiting_allowed=False)

    def _is_full(self, bucket: FlatBucket) -> bool:
        """Whether the bucket would have been sent by now if buckets were sent during the backward."""
        found = self.flat.buckets
        return all(before.waiting <= 0 for before in found[: found.index(bucket) + 1])

    def _take(self, gradient: Gradient, parameter: torch.Tensor) -> None:
        """Puts the gradient that arrived into the bucket."""
        arrived = parameter.grad
        if arrived is not None and gradient.is_at(arrived):
            return
        assert arrived is not None
        refuse_layout(gradient.name, arrived.layout)
        if (arrived.shape, arrived.dtype) != (gradient.shape, gradient.dtype):
            raise InvalidUsage(
                f"the gradient of {gradient.name} has shape {list(arrived.shape)} and {arrived.dtype}, but the "
                f"reducer was made for {list(gradient.shape)} and {gradient.dtype}: "
                + (
                    "make a new GradientReducer after a parameter has changed"
                    if arrived.dtype == parameter.dtype
                    else "it reduces a gradient in its parameter's dtype: leave the parameter's grad_dtype as it was"
                )
            )
        if gradient.bucket.in_place and gradient.can_own(arrived):
            if self._reducing and gradient.bucket.work is None:
                gradient.own = arrived
        elif gradient.bucket.work is None and (self._reducing or self.options.gradient_as_bucket_view):
            gradient.own = None  # what arrived before in another layout
            if gradient.users is not None and not self._reducing:
                return
            gradient.view.copy_(arrived.detach())
            if self.options.gradient_as_bucket_view and gradient.users is None:
                gradient.hand_over()

    @torch.no_grad()
    def close(self) -> list[int]:
        """The end of a backward. Returns the parameters whose gradients should have come and did not."""
        timeline = self._timeline
        timeline.ended_ns = now_ns()
        self._take_noted()
        self.sums.end()
        if timeline.arrivals:
            self._seen_order = list(timeline.arrivals)
        if not self._reducing:
            if self.tree is not None:
                self._push(self.tree)
            return []
        absent = []
        if len(timeline.arrivals) < len(self.used):
            absent = [index for index in range(len(self.used)) if index not in timeline.arrivals]
        for index in absent:
            self._fill(index)
        wrong = self._strayed() if self.options.any_may_be_unused else [i for i in absent if not self.used[i]]
        self.sums.forget()
        for bucket in self.flat.buckets:
            bucket.waiting = 0
        self._launch_full(waiting_allowed=True)
        if self.tree is not None:
            self.tree.forget()
        used = self._agree_on_used(self.used)
        if self.options.delay:
            self._exchange()
        else:
            self._receive(self.flat, timeline, timeline.ended_ns)
            self._give(used)
        self._lay_out_anew()
        self.used = bytearray(len(self.used))
        return wrong

    def shadow(self) -> None:
        """Takes part in a reducing backward of the other ranks with zeros. Leaves this rank's gradients alone."""
        self._choose_place()
        self.channel.labels.begin(joining=True)
        started, last = [], len(self.flat.buckets) - 1
        for place, bucket in enumerate(self.flat.buckets):
            started.append(self.channel.start(bucket.zeros(), place, place == last))
        self._agree_on_used(bytearray(len(self.used)))
        for work in started:
            work.wait()
        self._lay_out_anew()

    def flush(self) -> bool:
        """With delay: hands over the gradients that were sent last. Returns whether there were any."""
        if self._pending is None:
            return False
        pending, self._pending = self._pending, None
        self._receive(*pending, now_ns())
        for gradient in pending[0].gradients:
            gradient.hand_over()
        return True

    def rearm(self) -> None:
        """Ready for the next backward."""
        self.noted.disarm()
        self._timeline = Timeline()
        self._launched, self._reducing, self.scale = 0, False, 1.0
        self.earlier = []
        self._arrivals = [0] * len(self.used)
        self._filled: dict[int, torch.Tensor | None] = {}
        for bucket in self.flat.buckets:
            bucket.rearm()
            if self._expected is not None:
                bucket.waiting = sum(self._expected[gradient.index] > 0 for gradient in bucket.members)

    @property
    def anything_arrived(self) -> bool:
        self._take_noted()
        return bool(self._timeline.arrivals)

    def sent(self) -> tuple[int, int]:
        """Buckets of the backward under way that have gone out, and all."""
        return self._launched, len(self.flat.buckets)

    # -- reproducible sums --

    @torch.no_grad()
    def _begin_tree(self, tree: TreeSums, arrived: int | None) -> None:
        """Puts `.grad` aside, so that autograd adds nothing to it: each micro-batch is a leaf of the tree."""
        if tree.count == 0:
            self.used = bytearray(len(self.used))
        for gradient in self.flat.gradients:
            current = gradient.parameter.grad
            if current is not None and gradient.index != arrived:
                if self._reducing and bool(current.any()):
                    self.earlier.append(gradient.index)
                self._aside.append((gradient, current))
                gradient.parameter.grad = None
        if tree.count and not in_backward():  # finish(): as if the window's sum had just arrived
            for gradient, total in zip(self.flat.gradients, tree.take(), strict=True):
                if self.used[gradient.index]:
                    gradient.parameter.grad = total

    def _push(self, tree: TreeSums) -> None:
        taken = []
        for gradient in self.flat.gradients:
            arrived = gradient.parameter.grad if gradient.index in self._timeline.arrivals else None
            if arrived is None:
                zeros = torch.empty_strided(gradient.shape, gradient.layout, dtype=gradient.dtype, device=self.device)
                taken.append(zeros.zero_())
                continue
            refuse_layout(gradient.name, arrived.layout)
            own = has_own_memory(arrived) and not arrived.requires_grad
            taken.append(arrived if own else arrived.detach().clone())
            gradient.parameter.grad = None
        tree.push(taken)
        self.put_back()

    def put_back(self) -> None:
        """Reproducible: gives `.grad` back what was in it, where nothing has arrived."""
        for gradient, before in self._aside:
            if gradient.parameter.grad is None:
                gradient.parameter.grad = before
        self._aside.clear()

    def drop_window(self) -> None:
        """Reproducible: drops the sums, and the gradients of a backward that stopped."""
        if self.tree is not None:
            self._take_noted()
            for index in self._timeline.arrivals:
                self.flat.gradients[index].parameter.grad = None
            self.tree.forget()
            self.put_back()

    # -- sending --

    def _launch_full(self, waiting_allowed: bool) -> None:
        found = self.flat.buckets
        while self._launched < len(found) and found[self._launched].waiting <= 0:
            if not waiting_allowed and not self.channel.free():
                break
            self._launch(found[self._launched])
        if self.stepping.active and not self.options.any_may_be_unused:
            self.stepping.step_reduced(found[: self._launched], self.used)

    @torch.no_grad()
    def _launch(self, bucket: FlatBucket) -> None:
        for gradient in bucket.members:
            if gradient.index not in self._timeline.arrivals:
                self._fill(gradient.index)
        place = self._launched
        self._launched += 1
        bucket.launched_ns = now_ns()
        factor = None
        if self.tree is not None:
            fresh = [gradient.view if gradient.own is None else gradient.own for gradient in bucket.members]
            self.tree.add_to(fresh, bucket.indices)
            factor = self.scale / dist.get_world_size(self.channel.group)
        elif self.scale != 1.0:
            torch._foreach_mul_(bucket.tensors() if bucket.in_place else [bucket.buffer], self.scale)
        last = place == len(self.flat.buckets) - 1
        bucket.work = self.channel.start(bucket, place, last, self.late, factor)
        if not bucket.in_place:  # a future would have another thread take the work out of this one's hands
            bucket.work.get_future().add_done_callback(partial(bucket.mark_done, bucket.launched_ns))

    def _fill(self, index: int) -> None:
        """Gives a gradient that did not arrive its value in the buffer: the value of `.grad`, or zero.

        If the buffer holds a value of an earlier window, keeps it, to put it back if no rank has a gradient.
        """
        if index in self._filled:
            return
        gradient, kept = self.flat.gradients[index], None
        gradient.own = None
        current = gradient.parameter.grad
        if current is None:
            gradient.view.zero_()
            if self.tree is None:  # else an earlier micro-batch may have it
                self.used[index] = 0
        elif not gradient.is_at(current):
            gradient.view.copy_(current)
        elif not self.used[index]:
            kept = current.clone()
        self._filled[index] = kept

    def _strayed(self) -> list[int]:
        """Static graph: the parameters whose gradients did not arrive as often as in the first reduced backward."""
        if not self.options.static_graph or not self._timeline.arrivals:
            return []
        if self._expected is None:
            self._expected = list(self._arrivals)
        return [index for index, times in enumerate(self._expected) if self._arrivals[index] != times]

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
        events.tell_layout(self.flat.plan, self.channel.group, how)

    # -- receiving --

    def _receive(self, flat: FlatGradients, timeline: Timeline, since_ns: int) -> None:
        """Waits until the buckets of `flat` are reduced, and records the times."""
        for bucket in flat.buckets:
            bucket.work.wait()
            bucket.done_ns = bucket.done_ns or now_ns()
        timeline.finished_ns = now_ns()
        timeline.exposed_ns = timeline.finished_ns - since_ns
        for bucket in flat.buckets:
            # the backend may report it a moment after the wait for it was over
            done_ns = min(bucket.done_ns or timeline.finished_ns, timeline.finished_ns)
            timeline.buckets.append(BucketTimes(bucket.nbytes, bucket.indices, bucket.launched_ns, done_ns))
        self.totals.add(timeline)

    def _give(self, used: Sequence[int]) -> None:
        for gradient in self.flat.gradients:
            parameter, own = gradient.parameter, gradient.own
            if own is not None and gradient.users is None:
                if parameter.grad is not own:  # a hook of the user's has exchanged it
                    parameter.grad = own
                continue
            kept = self._filled.get(gradient.index)
            if not used[gradient.index]:
                if kept is not None:
                    gradient.view.copy_(kept)
            elif self.options.gradient_as_bucket_view or gradient.users is not None:
                gradient.hand_over()
            elif parameter.grad is None or not has_own_memory(parameter.grad):
                parameter.grad = torch.empty_like(parameter).copy_(gradient.view)
            else:
                parameter.grad.copy_(gradient.view)
        if self.stepping.active:
            self.stepping.step_reduced(self.flat.buckets, used, waited=True)
            self.stepping.end()

    def _exchange(self) -> None:
        """Delay: hands over the gradients sent before, and goes on with the set of buffers that held them."""
        current, previous = (self.flat, self._timeline), self._pending
        if previous is None:
            for gradient in self.flat.gradients:
                gradient.parameter.grad = None
        else:
            self.flush()
        self._pending = current
        self.flat = self.sets[1] if self.flat is self.sets[0] else self.sets[0]

    def _lay_out_anew(self) -> None:
        """Lays the buckets out once more, in the order in which rank 0's gradients arrived, or as merging decides."""
        if self.rebuild_due:
            self.rebuild_due = False
            default = [slot.index for bucket in self.flat.plan for slot in bucket.slots]
            seen = [*self._seen_order, *(index for index in default if index not in set(self._seen_order))]
            order = torch.tensor(seen, device=self.device)
            dist.broadcast(order, group=self.channel.group, group_src=0)
            self._order = order.tolist()
            self.flat.reorder(self._order)
            self._tell_layout("in the order of arrival")
        elif self.merging is not None:
            plan = self.merging.observe(self._timeline, self.flat.plan)
            if plan is not None:
                self.flat.adopt(plan)
                self._tell_layout("as merging measures it")
        elif self.options.delay and self._order is not None:  # the set of buffers that was away
            self.flat.reorder(self._order)
            self._order = None
