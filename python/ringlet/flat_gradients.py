"""Flat buffers that hold a module's gradients: one buffer a bucket, each gradient a view of its bucket's.

Buffers come from the group's backend where it allocates tensors (`ringlet`: registered memory, which peers read where
it lies), else from torch. What stands in the gaps between aligned gradients is zero and stays zero.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from . import buckets
from .backend import backend_of


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
            made.members.append(Gradient(gradient.index, gradient.name, gradient.parameter, zeros, made))
        return made


@dataclass(eq=False)
class Gradient:
    """Where the gradient of parameter `index` lives: `view` is its place in the buffer of `bucket`."""

    index: int
    name: str
    parameter: torch.nn.Parameter
    view: torch.Tensor
    bucket: FlatBucket


class FlatGradients:
    """The buffers of `parameters` (name, parameter), in buckets of at most `caps`; not yet anybody's `.grad`.

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
            bucket = FlatBucket(self._allocate(planned.count, first.dtype, first.device))
            made.append(bucket)
            for slot in planned.slots:
                parameter = self._parameters[slot.index]
                # a gradient has its parameter's strides where these are dense
                strides = torch.empty_like(parameter, device="meta").stride()
                view = bucket.buffer.as_strided(parameter.shape, strides, slot.offset)
                if self.gradients and parameter.grad is self.gradients[slot.index].view:
                    view.copy_(parameter.grad)
                    parameter.grad = view
                placed[slot.index] = Gradient(slot.index, self.entries[slot.index].name, parameter, view, bucket)
                bucket.members.append(placed[slot.index])
        self.gradients = [placed[index] for index in range(len(placed))]
        self.buckets = made
        self.plan = plan

    def _allocate(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        backend = backend_of(self._group, device)
        if backend.supports_tensor_alloc(device):
            return backend.allocate_tensor(count, dtype=dtype, device=device).zero_()
        return torch.zeros(count, dtype=dtype, device=device)
