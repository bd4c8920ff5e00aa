"""Registered memory for all of a program's tensors."""

from __future__ import annotations

from ringlet import _C


def use_registered_allocator(enabled: bool = True) -> None:
    """Makes every CPU tensor of 32 KiB or more that is created from now on registered (False: from now on ordinary).

    Peers then read its memory where it lies: DDP's own buckets, tensor-parallel activations and anything else that
    goes through "ringlet" moves without a copy into a stage, and no program needs to be changed. Call it first thing,
    on every rank. Tensors that exist already stay what they are, and may be freed whatever the setting then is.

    Costs and limits (docs/torch.md has figures): allocations come from one heap of the size of RINGLET_HEAP_MIB (by
    default the machine's memory; only what is touched counts), up to 512 MiB of freed blocks are kept for reuse, and a
    block is up to an eighth larger than asked for. In a forked child (a DataLoader worker) registered tensors of the
    parent are shared, not copied on write: a child must not write to them. What a child creates is its own.
    """
    _C.use_registered_allocator(enabled)
