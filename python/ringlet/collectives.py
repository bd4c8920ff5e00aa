"""The collectives, on torch CPU tensors and numpy arrays of a dtype of csrc/base/dtype.h.

A call reads and writes contiguous tensors where they lie. It reads and writes other tensors through a copy. It refuses
an output whose elements share memory (an expanded tensor). send and recv take contiguous tensors only. A
call can copy uint16, uint32 and uint64, but not reduce them.

If a tensor requires grad and grad mode is on, the collectives on it are differentiable, except for gather and for
reductions other than sum, avg and premul_sum. Every rank's backward then makes a call on the group. send and recv are
not differentiable.

Arguments that all calls share:

- group: a Group, or a group of torch.distributed; by default the default group, of `init` or torch.distributed.
- algorithm: a name of `ringlet.schedule.algorithms()`, an algorithm of your own, or "auto".
- op: sum, avg, product, min, max, band, bor, bxor or premul_sum, which first multiplies this rank's input by `scale`
  (the others ignore it).
- timeout: seconds (infinity: no limit) or timedelta; by default the group's.
- async_op: if True, the call returns a Work at once. Do not touch the tensors until its wait() has returned. torch
  refuses to resize their storages meanwhile.

Every rank of the group makes the same calls in the same order. Errors: InvalidUsage (a bad argument, or calls of ranks
that differ: then it names both), PeerLost, Timeout, ResourceError. The first error that involves other ranks poisons
the group, and later calls raise it again.

If a tensor has a block for each rank, a list of `world` tensors of one dtype can take its place. The call reads and
writes them where they lie. In reduce_scatter, all_gather and all_to_all the blocks may have different sizes (MPI's
v-collectives). All ranks must give the same sizes; in all_to_all, the two ranks between which a block goes must.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, overload

import numpy
import torch

from ringlet import _C, autograd  # noqa: F401  (which tells _C of itself)
from ringlet.errors import InvalidUsage
from ringlet.group import AnyGroup, current, group_from, has_default

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11 on

    from ringlet._C import Work

Array: TypeAlias = torch.Tensor | numpy.ndarray[Any, Any]
Arrays: TypeAlias = Array | Sequence[Array]  # a sequence: one for each rank
Timeout: TypeAlias = float | timedelta | None
Tensor: TypeAlias = torch.Tensor
Tensors: TypeAlias = Tensor | list[Tensor]  # a list if the caller passed a sequence

# For the overloads: a call returns what it wrote or, if async_op is true, a Work.
Sync: TypeAlias = Literal[False]
Async: TypeAlias = Literal[True]


class Waits(TypedDict, total=False):
    group: AnyGroup | None
    timeout: Timeout


class Moves(Waits, total=False):
    algorithm: str


class Reduces(Moves, total=False):
    scale: float


class Fixed(Waits, total=False):
    """Of an all-reduce with a fixed algorithm."""

    scale: float
    output: Array | None


class AllReduces(Fixed, Moves): ...


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
    group: AnyGroup | None = None,
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
    handle = group_from(group, "all_reduce").handle
    work = _C.all_reduce(handle, target, tensor, op, algorithm, 0, timeout, scale, async_op)
    return work if async_op else target


if not TYPE_CHECKING:
    all_reduce = _C.with_shortcut(all_reduce)  # the plain call costs less than Python's handling of eight arguments


@overload
def ring_allreduce(tensor: Array, op: str = ..., *, async_op: Sync = ..., **_: Unpack[Fixed]) -> Tensor: ...
@overload
def ring_allreduce(tensor: Array, op: str = ..., *, async_op: Async, **_: Unpack[Fixed]) -> Work: ...
@overload
def ring_allreduce(tensor: Array, op: str = ..., *, async_op: bool, **_: Unpack[Fixed]) -> Tensor | Work: ...
def ring_allreduce(tensor: Array, op: str = "sum", **options: Any) -> Any:
    """`all_reduce` by the ring: 2(p-1) rounds, 2(p-1)/p of the bytes sent per rank (Patarasuk and Yuan 2009)."""
    return all_reduce(tensor, op, algorithm="ring", **options)


@overload
def butterfly_allreduce(tensor: Array, op: str = ..., *, async_op: Sync = ..., **_: Unpack[Fixed]) -> Tensor: ...
@overload
def butterfly_allreduce(tensor: Array, op: str = ..., *, async_op: Async, **_: Unpack[Fixed]) -> Work: ...
@overload
def butterfly_allreduce(tensor: Array, op: str = ..., *, async_op: bool, **_: Unpack[Fixed]) -> Tensor | Work: ...
def butterfly_allreduce(tensor: Array, op: str = "sum", **options: Any) -> Any:
    """`all_reduce` by recursive doubling: ceil(log2 p) rounds (+2 if p is no power of two), one summation tree for
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
    group: AnyGroup | None = None,
    async_op: bool = False,
    timeout: Timeout = None,
    scale: float = 1.0,
) -> Any:
    """Combines the ranks' inputs (world blocks of n elements) and leaves block r, n elements, in rank r's output.

    `input` may be a list of blocks, of different sizes too.
    """
    return _call(_C.reduce_scatter, output, input, op, algorithm, 0, group, async_op, timeout, scale)


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
    group: AnyGroup | None = None,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Any:
    """Lays the ranks' inputs (n elements each) one after the other into every rank's output (world * n).

    `output` may be a list of blocks, of different sizes too: rank r's input has the size of block r.
    """
    return _call(_C.all_gather, output, input, "sum", algorithm, 0, group, async_op, timeout)


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
    group: AnyGroup | None = None,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Any:
    """Overwrites every rank's tensor with the root's (a rank of the group)."""
    return _call(_C.broadcast, tensor, tensor, "sum", algorithm, root, group, async_op, timeout)


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
    group: AnyGroup | None = None,
    async_op: bool = False,
    timeout: Timeout = None,
    scale: float = 1.0,
) -> Any:
    """Combines the ranks' tensors into the root's, in place. The tensors of the other ranks do not change."""
    return _call(_C.reduce, tensor, tensor, op, algorithm, root, group, async_op, timeout, scale)


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
    group: AnyGroup | None = None,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Any:
    """Lays the ranks' inputs (n elements each) in rank order into the root's output (world * n; None elsewhere).

    `output` may be a list of blocks of n elements.
    """
    return _call(_C.gather, output, input, "sum", algorithm, root, group, async_op, timeout)


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
    group: AnyGroup | None = None,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Any:
    """Sends block r (n elements) of the root's input (world * n; None elsewhere) to rank r's output.

    `input` may be a list of blocks of n elements.
    """
    return _call(_C.scatter, output, input, "sum", algorithm, root, group, async_op, timeout)


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
    group: AnyGroup | None = None,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Any:
    """Block j of rank i's input becomes block i of rank j's output (world blocks of n elements; no overlap).

    Both may be lists of blocks, of different sizes too.
    """
    return _call(_C.all_to_all, output, input, "sum", algorithm, 0, group, async_op, timeout)


@overload
def barrier(*, async_op: Sync = ..., **_: Unpack[Waits]) -> None: ...
@overload
def barrier(*, async_op: Async, **_: Unpack[Waits]) -> Work: ...
@overload
def barrier(*, async_op: bool, **_: Unpack[Waits]) -> Work | None: ...
def barrier(*, group: AnyGroup | None = None, async_op: bool = False, timeout: Timeout = None) -> Any:
    """Returns when every rank of the group has called it (Hensgen, Finkel and Manber 1988: dissemination)."""
    return _call(_C.barrier, None, None, "sum", "auto", 0, group, async_op, timeout)


@overload
def send(tensor: Array, peer: int, *, async_op: Sync = ..., **_: Unpack[Waits]) -> Tensor: ...
@overload
def send(tensor: Array, peer: int, *, async_op: Async, **_: Unpack[Waits]) -> Work: ...
@overload
def send(tensor: Array, peer: int, *, async_op: bool, **_: Unpack[Waits]) -> Tensor | Work: ...
def send(
    tensor: Array, peer: int, *, group: AnyGroup | None = None, async_op: bool = False, timeout: Timeout = None
) -> Any:
    """Sends a tensor to a rank, which receives the same dtype and count. Returns when `tensor` may be written."""
    array = as_tensor(tensor)
    work = _C.message(group_from(group, "send").handle, array, peer, True, timeout, async_op)
    return work if async_op else array


@overload
def recv(tensor: Array, peer: int, *, async_op: Sync = ..., **_: Unpack[Waits]) -> Tensor: ...
@overload
def recv(tensor: Array, peer: int, *, async_op: Async, **_: Unpack[Waits]) -> Work: ...
@overload
def recv(tensor: Array, peer: int, *, async_op: bool, **_: Unpack[Waits]) -> Tensor | Work: ...
def recv(
    tensor: Array, peer: int, *, group: AnyGroup | None = None, async_op: bool = False, timeout: Timeout = None
) -> Any:
    """Receives from a rank into `tensor`. Messages of one pair arrive in the order in which they were sent."""
    array, handle = as_tensor(tensor), group_from(group, "recv").handle
    _refuse_any_source(handle, peer)
    work = _C.message(handle, array, peer, False, timeout, async_op)
    return work if async_op else array


def is_registered(tensor: Array) -> bool:
    """Whether peers can read this tensor in place: any on the host if ranks are threads, else one of `empty`."""
    group, one = current() if has_default() else None, as_tensor(tensor)
    return (group is not None and group.transport == "threads" and one.is_cpu) or _C.is_registered(one)


def as_tensor(array: object) -> torch.Tensor:
    """A torch tensor that shares the array's memory. Raises InvalidUsage if that is not possible."""
    if isinstance(array, torch.Tensor):
        return array
    if isinstance(array, numpy.ndarray):
        if type(array) is not numpy.ndarray and isinstance(array, numpy.ma.MaskedArray):
            raise InvalidUsage("array is masked, and calls take no notice of a mask; pass array.filled(value)")
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


def _call(
    entry: Any,
    output: Arrays | None,
    input: Arrays | None,
    op: str,
    algorithm: str,
    root: int,
    group: AnyGroup | None,
    async_op: bool,
    timeout: Timeout,
    scale: float = 1.0,
) -> Any:
    target, source = _as_tensors(output), _as_tensors(input)
    handle = group_from(group, entry.__name__).handle
    work = entry(handle, target, source, op, algorithm, root, timeout, scale, async_op)
    return work if async_op else target


def _as_tensors(arrays: Arrays | None) -> torch.Tensor | list[torch.Tensor] | None:
    if isinstance(arrays, list | tuple):
        return [as_tensor(array) for array in arrays]
    return None if arrays is None else as_tensor(arrays)


def _refuse_any_source(group: _C.Group, peer: int) -> None:
    """In _C, -1 means any source, for torch.distributed. Here it is the mistake of rank 0 that passes rank - 1."""
    try:
        below = operator.index(peer) < 0
    except TypeError:
        return  # _C refuses it
    if below:
        raise InvalidUsage(
            f"recv: peer must be a rank from 0 to {group.world - 1} other than this rank ({group.rank}), got {peer}"
        )
