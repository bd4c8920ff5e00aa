"""Flat buffers that hold a module's gradients: one buffer a bucket, each gradient a part of its bucket's.

Buffers come from the group's backend if it allocates tensors (`ringlet`: registered memory, which peers read in
place), else from torch. The gaps between aligned gradients hold zeros and stay zero. A bucket makes its buffer when it
first needs it: gradients that are reduced where autograd has put them need none.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ringlet.training.flat import allocate, part_of, same_place
from ringlet.training.gradient_hooks import has_own_memory

from . import buckets


@dataclass(eq=False)
class FlatBucket:
    """The gradients of `members` in one buffer; `number` in launch order."""

    number: int
    make_buffer: Callable[[], torch.Tensor]
    nbytes: int
    device: torch.device
    members: list[Gradient] = field(default_factory=list)

    @functools.cached_property
    def buffer(self) -> torch.Tensor:
        return self.make_buffer()

    @property
    def has_buffer(self) -> bool:
        return "buffer" in self.__dict__

    @functools.cached_property
    def indices(self) -> tuple[int, ...]:
        return tuple(gradient.index for gradient in self.members)

    def zeros(self) -> FlatBucket:
        """A bucket of the same layout that holds zeros: what a rank without inputs contributes."""
        made = FlatBucket(self.number, self.make_buffer, self.nbytes, self.device)  # a new buffer holds zeros
        made.members = [dataclasses.replace(gradient, bucket=made, _view=None) for gradient in self.members]
        return made


@dataclass(eq=False)
class Gradient:
    """The place of the gradient of parameter `index`: `view`, from `offset` on in the buffer of `bucket`.

    `.grad` gets an alias of `view`, never `view` itself: a user could exchange its memory (`p.grad.data = ...`).
    Views keep the layout on which ranks agreed. `strides` are those that the parameter had then.
    """

    index: int
    name: str
    parameter: torch.nn.Parameter
    offset: int
    shape: torch.Size
    dtype: torch.dtype
    layout: tuple[int, ...]
    strides: tuple[int, ...]
    bucket: FlatBucket
    _view: torch.Tensor | None = None
    _address: int = 0

    def users(self) -> torch.Tensor | None:
        """A view of somebody else's buffer in `.grad`: averages go there. Call it when a backward begins."""
        current = self.parameter.grad
        ours = current is None or has_own_memory(current) or current.data_ptr() == self._address
        return None if ours else current

    @property
    def view(self) -> torch.Tensor:
        if self._view is None or self._view.data_ptr() != self._address:  # share_memory_() of a `.grad` has moved it
            self._view = part_of(self.bucket.buffer, self.offset, self.shape, self.layout)
            self._address = self._view.data_ptr()
        return self._view

    @functools.cached_property
    def is_flat(self) -> bool:
        """Whether a tensor of this layout is contiguous."""
        return self.like().is_contiguous()

    def like(self) -> torch.Tensor:
        """A tensor without memory that has the layout on which ranks agreed."""
        return torch.empty_strided(self.shape, self.layout, dtype=self.dtype, device="meta")

    def flat(self, own: torch.Tensor | None) -> torch.Tensor:
        """The memory of `own`, or of the view, as a contiguous tensor."""
        tensor = self.view if own is None else own
        if tensor.is_contiguous():
            return tensor
        return tensor.as_strided((tensor.numel(),), (1,))  # dense: no gap, and no element twice

    def can_own(self, arrived: torch.Tensor) -> bool:
        """Whether `arrived` may be reduced in place: it has the layout that all ranks' gradients of this parameter
        have, and neither a graph of higher derivatives (create_graph=True) nor another tensor needs its values."""
        plain = not (arrived.requires_grad or arrived.is_conj() or arrived.is_neg())
        return arrived.stride() == self.layout and plain and has_own_memory(arrived)

    def is_at(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` has this gradient's memory, element for element."""
        return self.bucket.has_buffer and same_place(tensor, self.view)

    def hand_over(self) -> None:
        """Makes the parameter's `.grad` an alias of `view`. If the parameter's layout has changed since, as by
        `.to(memory_format=...)`, makes a copy in the new layout: optimizers may assume that both layouts are equal."""
        parameter, current = self.parameter, self.parameter.grad
        in_place = current is not None and self.is_at(current)
        if parameter.stride() == self.strides:
            if not in_place:
                parameter.grad = self.view.detach()
        elif in_place:
            parameter.grad = torch.empty_like(parameter).copy_(self.view)
        else:
            self.copy_out()

    def copy_out(self) -> None:
        """Copies `view` into a `.grad` of its own. One that is there stays, in whatever layout its user gave it."""
        parameter = self.parameter
        if parameter.grad is None or not has_own_memory(parameter.grad):
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(self.view)


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
        self._group, self._caps = group, caps
        self._parameters = parameters
        # a gradient has its parameter's strides if these are dense
        self._kinds = [
            (p.shape, p.dtype, torch.empty_like(p, device="meta").stride(), p.stride()) for _, p in parameters
        ]
        self.entries = [
            buckets.Entry(name, p.numel(), p.element_size(), str(p.dtype), str(p.device)) for name, p in parameters
        ]
        self.gradients: list[Gradient] = []
        self.buckets: list[FlatBucket] = []
        self.plan: list[buckets.Bucket] = []
        self.adopt(buckets.assign(self.entries, caps))

    def reorder(self, order: list[int]) -> None:
        """Makes the buckets anew for gradients that arrive in `order`."""
        self.adopt(buckets.assign(self.entries, self._caps, order))

    @torch.no_grad()
    def adopt(self, plan: list[buckets.Bucket]) -> None:
        """Makes the buckets anew as `plan` says; every `.grad` that is a view moves over."""
        if plan == self.plan:
            return
        placed: dict[int, Gradient] = {}
        self.buckets = []
        for number, planned in enumerate(plan):
            _, first = self._parameters[planned.slots[0].index]
            make = functools.partial(allocate, planned.count, first.dtype, first.device, self._group)
            bucket = FlatBucket(number, make, planned.nbytes, first.device)
            self.buckets.append(bucket)
            for slot in planned.slots:
                name, parameter = self._parameters[slot.index]
                gradient = Gradient(slot.index, name, parameter, slot.offset, *self._kinds[slot.index], bucket)
                if self.gradients and parameter.grad is not None and self.gradients[slot.index].is_at(parameter.grad):
                    gradient.view.copy_(parameter.grad)
                    gradient.hand_over()
                placed[slot.index] = gradient
                bucket.members.append(gradient)
        self.gradients = [placed[index] for index in range(len(placed))]
        self.plan = plan

    def places(self) -> list[tuple[int, int]]:
        """The bucket of each gradient, and the address of its view, or 0 if the bucket has no buffer."""
        return [(g.bucket.number, g.view.data_ptr() if g.bucket.has_buffer else 0) for g in self.gradients]
