"""Registered memory for all of a program's tensors."""

from __future__ import annotations

from ringlet import _C


def use_registered_allocator(enabled: bool = True) -> None:
    """Makes every CPU tensor of 32 KiB or more that is created from now on registered (False: from now on ordinary).

    Peers then read the memory of these tensors where it lies. So DDP's own buckets, tensor-parallel activations and all
    other tensors that go through "ringlet" move without a copy into a staging buffer, and no program needs a change.
    Call it first, on every rank. It does not change tensors that exist already. A program may free a tensor under
    either setting.

    Costs and limits (docs/torch.md has figures): allocations come from one heap of the size of RINGLET_HEAP_MIB (by
    default the machine's memory; only touched pages count). The allocator keeps up to 512 MiB of freed blocks for
    reuse. A block is up to an eighth larger than the request. A forked child (a DataLoader worker) shares the
    registered tensors of its parent; they are not copied on write. So a child must not write to them. Tensors that a
    child creates are its own.
    """
    _C.use_registered_allocator(enabled)
