"""Flat buffers that hold a module's gradients: one buffer a bucket, each gradient a view of its bucket's.

Buffers come from the group's backend if it allocates tensors (`ringlet`: registered memory, which peers read in
place), else from torch. The gaps between aligned gradients hold zeros and stay zero.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ringlet.training.flat_memory import allocate

from . import buckets


@dataclass(eq=False)
class FlatBucket:
    """The gradients of `members` in one buffer, and the state of its reduction: `waiting` of them have not arrived."""

    buffer: torch.Tensor
    members: list[Gradient] = field(default_factory=list)
    waiting: int = 0
    work: Any = None
    launched_ns: int = 0
    done_ns: int = 0

    def rearm(self) -> None:
        self.waiting, self.work, self.launched_ns, self.done_ns = len(self.members), None, 0, 0

    def mark_done(self, launched_ns: int, _future: Any) -> None:
        if launched_ns == self.launched_ns:  # else a late report of an earlier reduction
            self.done_ns = time.perf_counter_ns()

    def zeros(self) -> FlatBucket:
        """A bucket of the same layout that holds zeros: what a rank without inputs contributes."""
        made = FlatBucket(torch.zeros_like(self.buffer))
        for gradient in self.members:
            view = gradient.view
            place = view.storage_offset() - self.buffer.storage_offset()
            zeros = made.buffer.as_strided(view.shape, view.stride(), place)
            made.members.append(dataclasses.replace(gradient, view=zeros, bucket=made))
        return made


@dataclass(eq=False)
class Gradient:
    """The place of the gradient of parameter `index`: `view`, in the buffer of `bucket`.

    `.grad` gets an alias of `view`, never `view` itself: a user could exchange its memory (`p.grad.data = ...`).
    Views keep the layout on which ranks agreed. `strides` are those that the parameter had then.
    """

    index: int
    name: str
    parameter: torch.nn.Parameter
    view: torch.Tensor
    strides: tuple[int, ...]
    bucket: FlatBucket

    def is_at(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` has this gradient's memory, element for element."""
        view = self.view
        return (
            tensor.layout is torch.strided
            and tensor.is_set_to(view)
            and tensor.dtype is view.dtype
            and not (tensor.is_conj() or tensor.is_neg())
        )

    def hand_over(self) -> None:
        """Makes the parameter's `.grad` an alias of `view`. If the parameter's layout has changed since, as by
        `.to(memory_format=...)`, makes a copy in the new layout: optimizers may assume that both layouts are equal."""
        parameter, current = self.parameter, self.parameter.grad
        in_place = current is not None and self.is_at(current)
        if parameter.stride() == self.strides:
            if not in_place:
                parameter.grad = self.view.detach()
        elif current is None or in_place:
            parameter.grad = torch.empty_like(parameter).copy_(self.view)
        else:
            current.copy_(self.view)


class FlatGradients:
    """The buffers of `parameters` (name, parameter), in buckets of at most `caps`. They are no `.grad` yet.

    `plan` and `buckets` are in launch order, `gradients` and `entries` in the order of `parameters`.
    """

    def __init__(
        self,
        parameters: list[tuple[str, torch.nn.Parameter]],
        caps: buckets.Caps,
        group: dist.ProcessGroup,
    ) -> None:
        self._group = group
        self._caps = caps
        self._parameters = [parameter for _, parameter in parameters]
        self._strides = [parameter.stride() for parameter in self._parameters]
        # a gradient has its parameter's strides if these are dense
        self._dense_strides = [torch.empty_like(parameter, device="meta").stride() for parameter in self._parameters]
        self.entries = [
            buckets.Entry(name, p.numel(), p.element_size(), str(p.dtype), str(p.device)) for name, p in parameters
        ]
        self.gradients: list[Gradient] = []
        self.buckets: list[FlatBucket] = []
        self.plan: list[buckets.Bucket] = []
        self._place(buckets.assign(self.entries, caps))

    def reorder(self, order: list[int]) -> None:
        """Makes the buckets anew for gradients that arrive in `order`; every `.grad` that is a view moves over."""
        self.adopt(buckets.assign(self.entries, self._caps, order))

    def adopt(self, plan: list[buckets.Bucket]) -> None:
        """Makes the buckets anew as `plan` says; every `.grad` that is a view moves over."""
        if plan != self.plan:
            self._place(plan)

    def names(self, indices: list[int]) -> list[str]:
        return [self.entries[index].name for index in indices]

    @torch.no_grad()
    def _place(self, plan: list[buckets.Bucket]) -> None:
        placed: dict[int, Gradient] = {}
        made: list[FlatBucket] = []
        for planned in plan:
            first = self._parameters[planned.slots[0].index]
            bucket = FlatBucket(allocate(planned.count, first.dtype, first.device, self._group))
            made.append(bucket)
            for slot in planned.slots:
                parameter = self._parameters[slot.index]
                view = bucket.buffer.as_strided(parameter.shape, self._dense_strides[slot.index], slot.offset)
                name, strides = self.entries[slot.index].name, self._strides[slot.index]
                gradient = Gradient(slot.index, name, parameter, view, strides, bucket)
                if self.gradients and parameter.grad is not None and self.gradients[slot.index].is_at(parameter.grad):
                    view.copy_(parameter.grad)
                    gradient.hand_over()
                placed[slot.index] = gradient
                bucket.members.append(gradient)
        self.gradients = [placed[index] for index in range(len(placed))]
        self.buckets = made
        self.plan = plan
