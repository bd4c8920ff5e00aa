"""Flat buffers: how tensors lie in one, memory for it from the group's backend or torch, and parts of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from ringlet.backend import backend_of

ALIGNMENT_BYTES = 64
Item = TypeVar("Item")


def alignment(item_bytes: int) -> int:
    """In elements of `item_bytes`."""
    return max(1, ALIGNMENT_BYTES // item_bytes)


def lay_out(counts: Iterable[int], item_bytes: int) -> tuple[list[int], int]:
    """The first elements of tensors of `counts` elements in a flat buffer, each aligned, and the buffer's elements."""
    align = alignment(item_bytes)
    starts, end = [], 0
    for count in counts:
        starts.append(end)
        end += -(-count // align) * align
    return starts, max(end, align)


def packed(items: Iterable[Item], cap: int, size_of: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Consecutive items of at most `cap` elements together; a larger item is alone."""
    part: list[Item] = []
    count = 0
    for item in items:
        if part and count + size_of(item) > cap:
            yield part
            part, count = [], 0
        part.append(item)
        count += size_of(item)
    if part:
        yield part


def allocate(count: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> torch.Tensor:
    """`count` zeros. The `ringlet` backend gives registered memory, which peers read in place."""
    backend = backend_of(group, device)
    with torch.inference_mode(False):  # training may borrow a buffer that an evaluation has made
        if backend.supports_tensor_alloc(device):
            return backend.allocate_tensor(count, dtype=dtype, device=device).zero_()
        return torch.zeros(count, dtype=dtype, device=device)


def part_of(flat: torch.Tensor, start: int, shape: Sequence[int], strides: Sequence[int] | None = None) -> torch.Tensor:
    """The elements of `flat`, a contiguous tensor, from element `start` on, as a dense tensor for the program.

    Its storage ends where these elements do. Files have whole storages: of a view, they would have all of `flat`.
    """
    size = flat.element_size()
    first = (flat.storage_offset() + start) * size
    memory = flat.untyped_storage()[first : first + math.prod(shape) * size]
    with torch.inference_mode(False):
        part = torch.empty(0, dtype=flat.dtype, device=flat.device)
        return part.set_(memory, 0, shape, torch.empty(shape, device="meta").stride() if strides is None else strides)


def same_place(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both have the same memory, element for element. `share_memory_()` of a part gives it another."""
    return (
        tensor.layout is torch.strided
        and tensor.data_ptr() == other.data_ptr()
        and (tensor.shape, tensor.stride(), tensor.dtype) == (other.shape, other.stride(), other.dtype)
        and not (tensor.is_conj() or tensor.is_neg())
    )
