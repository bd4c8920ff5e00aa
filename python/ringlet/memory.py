"""Registered memory for tensors that torch makes: on the host for all of a program's, on a GPU for those of a pool."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from ringlet import _C
from ringlet.errors import InvalidUsage


def use_registered_allocator(enabled: bool = True) -> None:
    """Makes every CPU tensor of 32 KiB or more that is created from now on registered (False: from now on ordinary).

    Peers then read the memory of these tensors where it lies. So DDP's own buckets, tensor-parallel activations and all
    other tensors that go through "ringlet" move without a copy into a staging buffer, and no program needs a change.
    Call it first, on every rank. It does not change tensors that exist already. A program may free a tensor under
    either setting.

    Costs and limits (docs/torch.md has figures): allocations come from one heap of the size of RINGLET_HEAP_MIB (by
    default the machine's memory; only touched pages count). The allocator keeps up to 512 MiB of freed blocks for
    reuse. A block is up to an eighth larger than the request. A forked child (a DataLoader worker) shares the
    registered tensors of its parent; they are not copied on write. So a child must not write to them, and while
    it reads one, the parent must neither write nor free it. Tensors that a child creates are its own.
    """
    _C.use_registered_allocator(enabled)


def registered_while_alive(owner: object) -> None:
    """As use_registered_allocator(), until `owner` is freed. If the heap is full, tensors are ordinary, and nothing
    raises. Owners may overlap. Then the allocator is torch's, or what use_registered_allocator() has last said."""
    _C.begin_registered_tensors()
    weakref.finalize(owner, _C.end_registered_tensors).atexit = False


def registered_pool() -> torch.cuda.MemPool:
    """A pool of torch's allocator that takes its memory from the GPU's registered heap (RINGLET_GPU_HEAP_MIB).

        pool = ringlet.registered_pool()
        with torch.cuda.use_mem_pool(pool):
            weights = torch.empty(1 << 20, device="cuda")  # peers read it where it lies

    torch takes memory in segments of at least 2 MiB, 20 MiB for tensors of more than 1 MiB, and keeps them until the
    pool ends. If the heap has no room for one, torch raises its OutOfMemoryError.

    Raises InvalidUsage if the current GPU has no registered memory, or torch no CUDA.
    """
    if not torch.cuda.is_available():
        raise InvalidUsage("registered_pool: torch has no CUDA here; run `ringlet doctor` to see why")
    torch.cuda.init()
    device = torch.device("cuda", torch.cuda.current_device())
    if not _C.has_registered(device):
        raise InvalidUsage(
            f"registered_pool: no registered memory on {device}: "
            "set RINGLET_GPU_HEAP_MIB before the first use of the GPU"
        )
    return torch.cuda.MemPool(_allocator().allocator())


@functools.cache
def _allocator() -> Any:
    """The process's own: pools use it as long as they live."""
    return torch.cuda.memory.CUDAPluggableAllocator(_C.__file__, "ringlet_gpu_heap_allocate", "ringlet_gpu_heap_free")
