"""A rank of ringlet (through its own interface or torch.distributed) or of gloo (through torch.distributed)."""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from . import data
from .case import IN_PLACE, LISTS, NUMPY_DTYPES, REDUCING, ROOT, ROOTED, Case
from .loop import serve

_TIMEOUT_S = 120
# The names before torch 2.13 warn there, which takes longer than a small call.
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_NOT_IN_GLOO = ("float8_e4m3fn", "float8_e5m2", "int16")


class _Torch:
    """The common part: tensors in the host's memory or on a GPU."""

    compares = True
    out_of_place = False

    def __init__(self, rank: int, world: int, device: str) -> None:
        self.rank = rank
        self.transport = "tcp"
        self.version = f"torch {torch.__version__}"
        self.device = torch.device(device)
        self.finish: Callable[[], object] | None = None
        if device != "cpu":
            gpus = getattr(torch, device)
            self.device = torch.device(device, rank % gpus.device_count())
            gpus.set_device(self.device.index)
            self.finish = gpus.synchronize
            self.transport = device + (" (loopback)" if world > gpus.device_count() else "")
            self.version += f" on {gpus.get_device_name(self.device.index)}"

    def refusal(self, case: Case) -> str | None:
        odd = case.collective == "send_recv" and case.world % 2
        return "send_recv pairs ranks: their number must be even" if odd else None

    def allocate(self, elements: int, case: Case) -> torch.Tensor:
        dtype = getattr(torch, case.dtype)
        if case.memory == "registered":
            return _ringlet().empty(elements, dtype=dtype, device=self.device)
        if self.device.type != "cpu":
            return torch.empty(elements, dtype=dtype, device=self.device)
        if case.memory == "allocator":
            _ringlet().use_registered_allocator()
            try:
                return torch.empty(elements, dtype=dtype)
            finally:
                _ringlet().use_registered_allocator(False)
        # numpy allocates, as for the MPI peers' buffers: unlike torch, it asks for huge pages.
        return torch.from_numpy(np.empty(elements * dtype.itemsize, np.uint8)).view(dtype)

    def write(self, buffer: torch.Tensor, table: np.ndarray) -> None:
        if buffer.is_cpu and _name(buffer) in NUMPY_DTYPES:
            data.fill(buffer.numpy(), table)
            return
        values = np.empty(buffer.numel(), _name(buffer) if _name(buffer) in NUMPY_DTYPES else np.float32)
        data.fill(values, table)
        buffer.copy_(torch.from_numpy(values).to(buffer.dtype))

    def read(self, buffer: torch.Tensor) -> np.ndarray:
        here = buffer.cpu()
        return here.numpy() if _name(here) in NUMPY_DTYPES else here.float().numpy()


class TorchDistributed(_Torch):
    """`torch.distributed` on any backend."""

    def __init__(self, backend: str, rank: int, world: int, store: str, device: str) -> None:
        super().__init__(rank, world, device)
        if backend == "ringlet":
            self.version = f"ringlet {_ringlet().__version__}, {self.version}"
        _join(backend, rank, world, store)
        self._backend = backend
        if backend == "ringlet" and device == "cpu":
            group = dist.group.WORLD
            assert group is not None
            self.transport = getattr(group._get_backend(torch.device("cpu")), "transport", "shared_memory")

    def refusal(self, case: Case) -> str | None:
        if self._backend == "nccl" and case.dtype == "int16":
            return "NCCL has no int16"
        if self._backend == "gloo" and case.op == "avg":
            return "gloo has no average"
        lacks = case.dtype in _NOT_IN_GLOO or (case.dtype.startswith("complex") and case.op != "sum")
        return f"gloo has no {case.op} of {case.dtype}" if self._backend == "gloo" and lacks else super().refusal(case)

    def bind(self, case: Case, source: Any, output: Any) -> Callable[[], object]:
        blocks = None if output is None else list(output.chunk(case.world))
        parts = None if source is None else list(source.chunk(case.world))
        op = getattr(dist.ReduceOp, case.op.upper(), None)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": functools.partial(dist.all_reduce, source, op=op),
            "broadcast": functools.partial(dist.broadcast, source, src=ROOT),
            "reduce": functools.partial(dist.reduce, source, dst=ROOT, op=op),
            "reduce_scatter": functools.partial(_REDUCE_SCATTER, output, source, op=op),
            "reduce_scatter_list": functools.partial(dist.reduce_scatter, output, parts, op=op),
            "all_gather": functools.partial(_ALL_GATHER, output, source),
            "all_gather_list": functools.partial(dist.all_gather, blocks, source),
            "gather": functools.partial(dist.gather, source, blocks, dst=ROOT),
            "scatter": functools.partial(dist.scatter, output, parts if self.rank == ROOT else None, src=ROOT),
            "all_to_all": functools.partial(dist.all_to_all_single, output, source),
            "all_to_all_list": functools.partial(dist.all_to_all, blocks, parts),
            "send_recv": functools.partial(_there_and_back, dist, self.rank, source, output),
            "barrier": dist.barrier,
        }
        return calls[case.collective]

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        dist.destroy_process_group()


class Ringlet(_Torch):
    """ringlet's own interface. transport: as `ringlet.init` takes it; "" leaves the choice to it."""

    out_of_place = True

    def __init__(self, rank: int, world: int, store: dist.Store | None, transport: str, device: str) -> None:
        super().__init__(rank, world, device)
        chosen: dict[str, Any] = {"transport": transport} if transport else {}
        group = _ringlet().init(rank=rank, world=world, store=store, **chosen)
        self.version = f"ringlet {_ringlet().__version__}"
        if device == "cpu":
            self.transport = group.transport
        else:
            self.version += f" through {group.gpu_transport(self.device)}"

    def refusal(self, case: Case) -> str | None:
        return "lists of tensors are for torch.distributed" if case.collective in LISTS else super().refusal(case)

    def bind(self, case: Case, source: Any, output: Any) -> Callable[[], object]:
        if case.collective == "barrier":
            return _ringlet().barrier
        if case.collective == "send_recv":
            return functools.partial(_there_and_back, _ringlet(), self.rank, source, output)
        # `auto` is the default: not passing it measures what a user types.
        named: dict[str, Any] = {} if case.algorithm == "auto" else {"algorithm": case.algorithm}
        named |= {"op": case.op} if case.collective in REDUCING else {}
        named |= {"root": ROOT} if case.collective in ROOTED else {}
        named |= {"output": output} if case.collective == "all_reduce" and output is not None else {}
        buffers = (source,) if case.collective in IN_PLACE else (output, source)
        return functools.partial(getattr(_ringlet(), case.collective), *buffers, **named)

    def barrier(self) -> None:
        _ringlet().barrier()

    def close(self) -> None:
        _ringlet().finalize()


class Function(_Torch):
    """A user's call: `function(tensor)`, in place or giving the result; of reduce_scatter `function(output, input)`.

    One that is named "module:function" finds the default groups of torch.distributed, on gloo, and of ringlet.
    """

    def __init__(self, rank: int, world: int, device: str, function: Callable[..., Any] | str, store: str = "") -> None:
        super().__init__(rank, world, device)
        self._function: Callable[..., Any]
        if isinstance(function, str):
            _join("gloo", rank, world, store)
            _ringlet().init(rank=rank, world=world, store=dist.FileStore(store + "-ringlet", world))
            module, _, name = function.partition(":")
            try:
                self._function = operator.attrgetter(name)(importlib.import_module(module))
            except (ImportError, AttributeError) as error:
                raise _ringlet().InvalidUsage(f"{function} cannot be imported: {error}") from error
        else:
            self._function = function

    def bind(self, case: Case, source: Any, output: Any) -> Callable[[], object]:
        if case.collective == "reduce_scatter":
            return functools.partial(self._function, output, source)

        def call() -> None:
            result = self._function(source)
            if isinstance(result, torch.Tensor) and result is not source:
                source.copy_(result)

        return call

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        _ringlet().finalize()
        dist.destroy_process_group()


def _ringlet() -> Any:
    """Imported late: ringlet itself imports this module."""
    import ringlet

    return ringlet


def _join(backend: str, rank: int, world: int, store: str) -> None:
    """Makes torch.distributed's default group."""
    limit = timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group(backend, store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=limit)


def _there_and_back(library: Any, rank: int, source: torch.Tensor, output: torch.Tensor) -> None:
    """An even rank sends and then receives, the odd one after it receives and then sends: a round trip a call."""
    if rank % 2 == 0:
        library.send(source, rank + 1)
        library.recv(output, rank + 1)
    else:
        library.recv(output, rank - 1)
        library.send(source, rank - 1)


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def main(arguments: list[str]) -> None:
    """job, rank, world, the controller's socket, the store's file, ringlet's transport, the buffers' device."""
    job, place, ranks, path, store, transport, device = arguments
    rank, world = int(place), int(ranks)
    torch.set_num_threads(1)
    library, _, via = job.partition("/")

    def make() -> Ringlet | TorchDistributed | Function:
        if ":" in job:
            return Function(rank, world, device, job, store)
        if via == "api":
            return Ringlet(rank, world, dist.FileStore(store, world), transport, device)
        return TorchDistributed(library, rank, world, store, device)

    serve(job, rank, path, make)
