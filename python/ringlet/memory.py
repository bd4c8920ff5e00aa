"""Registered memory: tensors in it, and for tensors that torch makes, on the host for all of a program's, on a GPU for
those of a pool."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ringlet import _C
from ringlet.errors import InvalidUsage

# Those of csrc/base/dtype.h.
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.uint16,
    torch.uint32, torch.uint64,
)  # fmt: skip


def empty(
    *size: int | Sequence[int], dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """An uninitialized contiguous tensor in registered memory: peers read it in place.

    size: as in torch.empty.
    device: the host, or a GPU, which has as much registered memory as RINGLET_GPU_HEAP_MIB says (by default none). When
    a tensor on a GPU is freed, the host waits for the device (later, while a CUDA graph is captured).

    Raises ResourceError if the registered heap (RINGLET_HEAP_MIB, on the host) has no room, InvalidUsage if the device
    has no registered memory or if no call takes the dtype, DeviceError if torch has no such device.
    """
    sizes = size[0] if len(size) == 1 and isinstance(size[0], Iterable) else size
    try:
        where, counts = torch.device(device), [operator.index(one) for one in sizes]  # type: ignore[arg-type]
    except (TypeError, RuntimeError) as error:
        raise InvalidUsage(f"empty: {error}") from error
    if any(count >= 1 << 63 for count in counts):
        raise InvalidUsage(f"empty: a tensor of sizes {counts} is larger than any memory")
    kind = torch.get_default_dtype() if dtype is None else dtype
    if isinstance(kind, torch.dtype) and kind not in DTYPES:
        known = ", ".join(str(one).removeprefix("torch.") for one in DTYPES)
        raise InvalidUsage(f"empty: no call takes {kind}: choose one of {known}")
    if where.type == "cuda" and torch.cuda.is_available():
        torch.cuda.init()  # as torch does when it makes a tensor itself
    return _C.empty(counts, kind, where)


def use_registered_allocator(enabled: bool = True) -> None:
    """Makes every CPU tensor of 32 KiB or more that is created from now on registered (False: from now on ordinary).

    Peers then read the memory of these tensors where it lies. So DDP's own buckets, tensor-parallel activations and all
    other tensors that go through "ringlet" move without a copy into a staging buffer, and no program needs a change.
    Call it first, on every rank. It does not change tensors that exist already. A program may free a tensor under
    either setting.

    Costs and limits (docs/torch.md has figures): allocations come from one heap of the size of RINGLET_HEAP_MIB (by
    default the machine's memory; only touched pages count). The allocator keeps up to 512 MiB of freed blocks for
    reuse. A block is up to an eighth larger than the request. A forked child (a DataLoader worker) shares the
    registered tensors of its parent until it writes into them, page by page; the parent does not see what the child
    writes. While a child reads one, the parent must neither write nor free it. Tensors that a child creates are its
    own.
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
