"""The collectives, on torch CPU tensors and numpy arrays of a dtype of csrc/base/dtype.h.

Contiguous ones are read and written where they lie. Others are read from a copy, and written to one that is copied
back; an output of which two elements lie at one place (an expanded one) is refused. send and recv take contiguous ones
only. uint16, uint32 and uint64 are copied but not reduced.

On tensors that require grad, when grad mode is on, the collectives are differentiable: all but gather, and of the
reductions those by sum, avg and premul_sum. Every rank's backward then makes a call on the group. send and recv are not
differentiable.

Shared: `group` is the default group where not given. `algorithm` is a name of `ringlet.schedule.algorithms()`, or
"auto". `timeout` (seconds or timedelta; infinity for as long as it takes) is the group's where not given. With
`async_op=True` a call returns a Work at once; the tensors must not be touched until its wait() has returned, and torch
refuses to resize their storages meanwhile. Every rank of the group makes the same calls
in the same order. Errors: InvalidUsage (a bad argument; or ranks that call different things, naming both), PeerLost,
Timeout, SystemError; the first error that involves other ranks poisons the group, and later calls raise it again.
Ops: sum, avg, product, min, max, band, bor, bxor, premul_sum (which multiplies this rank's input by `scale` first).

Where a tensor has a block for each rank it can be a list instead: of `world` tensors of one dtype, read and written
where they lie. In reduce_scatter, all_gather and all_to_all they may be of different sizes (MPI's v-collectives): all
ranks must give the same sizes, in all_to_all the two ranks between which a block goes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, overload

import numpy
import torch

from ringlet import _C, autograd  # noqa: F401  (which tells _C of itself)
from ringlet.errors import InvalidUsage
from ringlet.group import Group, current, has_default

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11 on

    from ringlet._C import Work

Array: TypeAlias = torch.Tensor | numpy.ndarray[Any, Any]
Arrays: TypeAlias = Array | Sequence[Array]  # a sequence: one for each rank
Timeout: TypeAlias = float | timedelta | None
Tensor: TypeAlias = torch.Tensor
Tensors: TypeAlias = Tensor | list[Tensor]  # a list where the call was given a sequence

# For the overloads: a call returns what it wrote or, if async_op is true, a Work.
Sync: TypeAlias = Literal[False]
Async: TypeAlias = Literal[True]


class Waits(TypedDict, total=False):
    group: Group | None
    timeout: Timeout


class Moves(Waits, total=False):
    algorithm: str


class Reduces(Moves, total=False):
    scale: float


class AllReduces(Reduces, total=False):
    output: Array | None


@overload
def all_reduce(tensor: Array, op: str = ..., *, async_op: Sync = ..., **_: Unpack[AllReduces]) -> Tensor: ...
@overload
def all_reduce(tensor: Array, op: str = ..., *, async_op: Async, **_: Unpack[AllReduces]) -> Work: ...
@overload
def all_reduce(tensor: Array, op: str = ..., *, async_op: bool, **_: Unpack[AllReduces]) -> Tensor | Work: ...
def all_reduce(
    tensor: Array,
    op: str = "sum",
    *,
    algorithm: str = "auto",
    group: Group | None = None,
    async_op: bool = False,
    timeout: Timeout = None,
    scale: float = 1.0,
    output: Array | None = None,
) -> Any:
    """Combines the ranks' tensors (any shape, the same on all) elementwise; every rank gets the same bits.

    In place, or into `output` (same elements and dtype). Returns the result, or a Work with `async_op`.
    Sources: Patarasuk and Yuan 2009 (ring), Thakur et al. 2005 (butterfly, halving_doubling), Träff 2024 (circulant).
    """
    if type(tensor) is not torch.Tensor:
        tensor = as_tensor(tensor)
    target = tensor if output is None else as_tensor(output)
    work = _C.all_reduce(_handle(group), target, tensor, op, algorithm, 0, timeout, scale, async_op)
    return work if async_op else target


if not TYPE_CHECKING:
    all_reduce = _C.with_shortcut(all_reduce)  # the plain call costs less than Python's handling of eight arguments


@overload
def ring_allreduce(tensor: Array, op: str = ..., *, async_op: Sync = ..., **_: Unpack[AllReduces]) -> Tensor: ...
@overload
def ring_allreduce(tensor: Array, op: str = ..., *, async_op: Async, **_: Unpack[AllReduces]) -> Work: ...
@overload
def ring_allreduce(tensor: Array, op: str = ..., *, async_op: bool, **_: Unpack[AllReduces]) -> Tensor | Work: ...
def ring_allreduce(tensor: Array, op: str = "sum", **options: Any) -> Any:
    """`all_reduce` by the ring: 2(p-1) rounds, 2(p-1)/p of the bytes sent per rank (Patarasuk and Yuan 2009)."""
    return all_reduce(tensor, op, algorithm="ring", **options)


@overload
def butterfly_allreduce(tensor: Array, op: str = ..., *, async_op: Sync = ..., **_: Unpack[AllReduces]) -> Tensor: ...
@overload
def butterfly_allreduce(tensor: Array, op: str = ..., *, async_op: Async, **_: Unpack[AllReduces]) -> Work: ...
@overload
def butterfly_allreduce(tensor: Array, op: str = ..., *, async_op: bool, **_: Unpack[AllReduces]) -> Tensor | Work: ...
def butterfly_allreduce(tensor: Array, op: str = "sum", **options: Any) -> Any:
    """`all_reduce` by recursive doubling: ceil(log2 p) rounds (+2 where p is no power of two), one summation tree for
    every element, so that an element's bits do not depend on its place (Thakur et al. 2005, §4.1)."""
    return all_reduce(tensor, op, algorithm="butterfly", **options)


@overload
def reduce_scatter(
    output: Array, input: Arrays, op: str = ..., *, async_op: Sync = ..., **_: Unpack[Reduces]
) -> Tensor: ...
@overload
def reduce_scatter(output: Array, input: Arrays, op: str = ..., *, async_op: Async, **_: Unpack[Reduces]) -> Work: ...
@overload
def reduce_scatter(
    output: Array, input: Arrays, op: str = ..., *, async_op: bool, **_: Unpack[Reduces]
) -> Tensor | Work: ...
def reduce_scatter(
    output: Array,
    input: Arrays,
    op: str = "sum",
    *,
    algorithm: str = "auto",
    group: Group | None = None,
    async_op: bool = False,
    timeout: Timeout = None,
    scale: float = 1.0,
) -> Any:
    """Combines the ranks' inputs (world blocks of n elements) and leaves block r, n elements, in rank r's output.

    `input` may be a list of blocks, of different sizes too.
    """
    return _call(
        _C.reduce_scatter,
        output,
        input,
        op=op,
        algorithm=algorithm,
        root=0,
        group=group,
        async_op=async_op,
        timeout=timeout,
        scale=scale,
    )


@overload
def all_gather(output: Arrays, input: Array, *, async_op: Sync = ..., **_: Unpack[Moves]) -> Tensors: ...
@overload
def all_gather(output: Arrays, input: Array, *, async_op: Async, **_: Unpack[Moves]) -> Work: ...
@overload
def all_gather(output: Arrays, input: Array, *, async_op: bool, **_: Unpack[Moves]) -> Tensors | Work: ...
def all_gather(
    output: Arrays,
    input: Array,
    *,
    algorithm: str = "auto",
    group: Group | None = None,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Any:
    """Lays the ranks' inputs (n elements each) one after the other into every rank's output (world * n).

    `output` may be a list of blocks, of different sizes too: rank r's input has the size of block r.
    """
    return _call(
        _C.all_gather,
        output,
        input,
        op="sum",
        algorithm=algorithm,
        root=0,
        group=group,
        async_op=async_op,
        timeout=timeout,
    )


@overload
def broadcast(tensor: Array, root: int = ..., *, async_op: Sync = ..., **_: Unpack[Moves]) -> Tensor: ...
@overload
def broadcast(tensor: Array, root: int = ..., *, async_op: Async, **_: Unpack[Moves]) -> Work: ...
@overload
def broadcast(tensor: Array, root: int = ..., *, async_op: bool, **_: Unpack[Moves]) -> Tensor | Work: ...
def broadcast(
    tensor: Array,
    root: int = 0,
    *,
    algorithm: str = "auto",
    group: Group | None = None,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Any:
    """Overwrites every rank's tensor with the root's (a rank of the group)."""
    return _call(
        _C.broadcast,
        tensor,
        tensor,
        op="sum",
        algorithm=algorithm,
        root=root,
        group=group,
        async_op=async_op,
        timeout=timeout,
    )


@overload
def reduce(tensor: Array, root: int = ..., op: str = ..., *, async_op: Sync = ..., **_: Unpack[Reduces]) -> Tensor: ...
@overload
def reduce(tensor: Array, root: int = ..., op: str = ..., *, async_op: Async, **_: Unpack[Reduces]) -> Work: ...
@overload
def reduce(tensor: Array, root: int = ..., op: str = ..., *, async_op: bool, **_: Unpack[Reduces]) -> Tensor | Work: ...
def reduce(
    tensor: Array,
    root: int = 0,
    op: str = "sum",
    *,
    algorithm: str = "auto",
    group: Group | None = None,
    async_op: bool = False,
    timeout: Timeout = None,
    scale: float = 1.0,
) -> Any:
    """Combines the ranks' tensors into the root's, in place; the others' stay as they are."""
    return _call(
        _C.reduce,
        tensor,
        tensor,
        op=op,
        algorithm=algorithm,
        root=root,
        group=group,
        async_op=async_op,
        timeout=timeout,
        scale=scale,
    )


@overload
def gather(
    output: Arrays | None, input: Array, root: int = ..., *, async_op: Sync = ..., **_: Unpack[Moves]
) -> Tensors | None: ...
@overload
def gather(output: Arrays | None, input: Array, root: int = ..., *, async_op: Async, **_: Unpack[Moves]) -> Work: ...
@overload
def gather(
    output: Arrays | None, input: Array, root: int = ..., *, async_op: bool, **_: Unpack[Moves]
) -> Tensors | Work | None: ...
def gather(
    output: Arrays | None,
    input: Array,
    root: int = 0,
    *,
    algorithm: str = "auto",
    group: Group | None = None,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Any:
    """Lays the ranks' inputs (n elements each) in rank order into the root's output (world * n; None elsewhere).

    `output` may be a list of blocks of n elements.
    """
    return _call(
        _C.gather,
        output,
        input,
        op="sum",
        algorithm=algorithm,
        root=root,
        group=group,
        async_op=async_op,
        timeout=timeout,
    )


@overload
def scatter(
    output: Array, input: Arrays | None, root: int = ..., *, async_op: Sync = ..., **_: Unpack[Moves]
) -> Tensor: ...
@overload
def scatter(output: Array, input: Arrays | None, root: int = ..., *, async_op: Async, **_: Unpack[Moves]) -> Work: ...
@overload
def scatter(
    output: Array, input: Arrays | None, root: int = ..., *, async_op: bool, **_: Unpack[Moves]
) -> Tensor | Work: ...
def scatter(
    output: Array,
    input: Arrays | None,
    root: int = 0,
    *,
    algorithm: str = "auto",
    group: Group | None = None,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Any:
    """Hands block r (n elements) of the root's input (world * n; None elsewhere) to rank r's output.

    `input` may be a list of blocks of n elements.
    """
    return _call(
        _C.scatter,
        output,
        input,
        op="sum",
        algorithm=algorithm,
        root=root,
        group=group,
        async_op=async_op,
        timeout=timeout,
    )


@overload
def all_to_all(output: Arrays, input: Arrays, *, async_op: Sync = ..., **_: Unpack[Moves]) -> Tensors: ...
@overload
def all_to_all(output: Arrays, input: Arrays, *, async_op: Async, **_: Unpack[Moves]) -> Work: ...
@overload
def all_to_all(output: Arrays, input: Arrays, *, async_op: bool, **_: Unpack[Moves]) -> Tensors | Work: ...
def all_to_all(
    output: Arrays,
    input: Arrays,
    *,
    algorithm: str = "auto",
    group: Group | None = None,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Any:
    """Block j of rank i's input becomes block i of rank j's output (world blocks of n elements; no overlap).

    Both may be lists of blocks, of different sizes too.
    """
    return _call(
        _C.all_to_all,
        output,
        input,
        op="sum",
        algorithm=algorithm,
        root=0,
        group=group,
        async_op=async_op,
        timeout=timeout,
    )


@overload
def barrier(*, async_op: Sync = ..., **_: Unpack[Waits]) -> None: ...
@overload
def barrier(*, async_op: Async, **_: Unpack[Waits]) -> Work: ...
@overload
def barrier(*, async_op: bool, **_: Unpack[Waits]) -> Work | None: ...
def barrier(*, group: Group | None = None, async_op: bool = False, timeout: Timeout = None) -> Any:
    """Returns when every rank of the group has called it (Hensgen, Finkel and Manber 1988: dissemination)."""
    return _call(
        _C.barrier, None, None, op="sum", algorithm="auto", root=0, group=group, async_op=async_op, timeout=timeout
    )


@overload
def send(tensor: Array, peer: int, *, async_op: Sync = ..., **_: Unpack[Waits]) -> Tensor: ...
@overload
def send(tensor: Array, peer: int, *, async_op: Async, **_: Unpack[Waits]) -> Work: ...
@overload
def send(tensor: Array, peer: int, *, async_op: bool, **_: Unpack[Waits]) -> Tensor | Work: ...
def send(
    tensor: Array, peer: int, *, group: Group | None = None, async_op: bool = False, timeout: Timeout = None
) -> Any:
    """Sends a tensor to a rank, which receives one of the same dtype and count; returns when it may be written."""
    return _message(tensor, peer, sending=True, group=group, async_op=async_op, timeout=timeout)


@overload
def recv(tensor: Array, peer: int, *, async_op: Sync = ..., **_: Unpack[Waits]) -> Tensor: ...
@overload
def recv(tensor: Array, peer: int, *, async_op: Async, **_: Unpack[Waits]) -> Work: ...
@overload
def recv(tensor: Array, peer: int, *, async_op: bool, **_: Unpack[Waits]) -> Tensor | Work: ...
def recv(
    tensor: Array, peer: int, *, group: Group | None = None, async_op: bool = False, timeout: Timeout = None
) -> Any:
    """Receives from a rank into `tensor`; messages of one pair arrive in the order in which they were sent."""
    return _message(tensor, peer, sending=False, group=group, async_op=async_op, timeout=timeout)


def empty(
    *size: int | Sequence[int], dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """An uninitialized contiguous tensor in registered memory: peers read it where it lies.

    size: as torch.empty's. device: the host, or a GPU: as much of its memory as RINGLET_GPU_HEAP_MIB says, none unless
    it is set, and where a tensor ends the host waits for the device (later, while a CUDA graph is captured). Raises
    SystemError when the registered heap (RINGLET_HEAP_MIB, on the host) has no room, InvalidUsage where the device has
    none, DeviceError where torch has no such device.
    """
    sizes = size[0] if len(size) == 1 and isinstance(size[0], Iterable) else size
    try:
        where, counts = torch.device(device), [operator.index(one) for one in sizes]  # type: ignore[arg-type]
    except (TypeError, RuntimeError) as error:
        raise InvalidUsage(f"empty: {error}") from error
    if any(count >= 1 << 63 for count in counts):
        raise InvalidUsage(f"empty: a tensor of sizes {counts} is larger than any memory")
    if where.type == "cuda" and torch.cuda.is_available():
        torch.cuda.init()  # what torch does where it makes a tensor itself
    return _C.empty(counts, torch.get_default_dtype() if dtype is None else dtype, where)


def is_registered(tensor: Array) -> bool:
    """Whether peers can read this tensor where it lies: the host's where ranks are threads, else one of `empty`."""
    group, one = current() if has_default() else None, as_tensor(tensor)
    return (group is not None and group.transport == "threads" and one.is_cpu) or _C.is_registered(one)


def as_tensor(array: object) -> torch.Tensor:
    """A torch tensor that shares the array's memory. Raises InvalidUsage for what cannot be shared."""
    if isinstance(array, torch.Tensor):
        return array
    if isinstance(array, numpy.ndarray):
        if not array.flags.writeable:
            raise InvalidUsage("array is read-only; pass a copy")
        if not array.dtype.isnative:
            raise InvalidUsage(
                f"array of dtype {array.dtype.str} has another byte order than this machine; "
                "pass .astype(array.dtype.newbyteorder('='))"
            )
        try:
            return torch.from_numpy(array)
        except (TypeError, ValueError) as error:
            raise InvalidUsage(f"array of dtype {array.dtype}, strides {array.strides}: {error}") from error
    raise InvalidUsage(f"a {type(array).__name__} is neither a torch tensor nor a numpy array")


def _handle(group: Group | None) -> _C.Group:
    if group is None:
        return current().handle
    if isinstance(group, Group):
        return group.handle
    raise InvalidUsage(f"group must be a ringlet.Group, not {group!r}")


def _call(
    entry: Any,
    output: Arrays | None,
    input: Arrays | None,
    *,
    op: str,
    algorithm: str,
    root: int,
    group: Group | None,
    async_op: bool,
    timeout: Timeout,
    scale: float = 1.0,
) -> Any:
    target, source = _as_tensors(output), _as_tensors(input)
    work = entry(_handle(group), target, source, op, algorithm, root, timeout, scale, async_op)
    return work if async_op else target


def _as_tensors(arrays: Arrays | None) -> torch.Tensor | list[torch.Tensor] | None:
    if isinstance(arrays, list | tuple):
        return [as_tensor(array) for array in arrays]
    return None if arrays is None else as_tensor(arrays)


def _message(tensor: Array, peer: int, *, sending: bool, group: Group | None, async_op: bool, timeout: Timeout) -> Any:
    array = as_tensor(tensor)
    work = _C.message(_handle(group), array, peer, sending, timeout, async_op)
    return work if async_op else array
