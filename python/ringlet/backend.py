"""Registers the torch.distributed backend "ringlet" (csrc/bindings/c10d_backend.h)."""

from __future__ import annotations

import atexit
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringlet import _C, environment, leaving, log
from ringlet.claim import Claim
from ringlet.errors import InvalidUsage
from ringlet.group_key import rendezvous_key
from ringlet.joining import as_timedelta, prepare

NAME = "ringlet"


def _make(options: Any, pg_options: Any) -> _C.Backend:
    algorithm, given, max_ctas = "auto", None, 0
    if isinstance(pg_options, _C.BackendOptions):
        algorithm, max_ctas = pg_options.algorithm, pg_options.max_ctas
        _C.check_max_ctas(max_ctas)
        given = None if pg_options.transport == "auto" else pg_options.transport
    elif pg_options is not None:
        raise InvalidUsage(f"pg_options is a {type(pg_options).__name__}; pass ringlet.BackendOptions")
    rank, world, timeout = options.group_rank, options.group_size, options.timeout
    transport, began, wrong = prepare(rank, world, given)
    if transport == "threads":
        wrong = wrong or InvalidUsage(
            'transport "threads" works with ringlet.init() only; for this backend set auto, shared_memory or tcp'
        )
    claim = Claim(rank, world, transport, environment.job_of(world))
    key = rendezvous_key(options.store, f"ringlet/{options.group_id}", claim, timeout, wrong)
    backend = _C.make_backend(options.store, key, rank, world, timeout, transport)
    backend.algorithm, backend.max_ctas = algorithm, max_ctas
    return log.group_made(backend, began)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend that makes the group's calls on that device, also if TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it."""
    backend: Any = group._get_backend(device)
    return getattr(backend, "wrapped_pg", backend)


def register() -> None:
    """Makes `torch.distributed.init_process_group("ringlet")` work. A second call does nothing."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu", "cuda"])
        atexit.register(_C.close_backends)  # the program may not have called destroy_process_group
        atexit.register(leaving.leave)  # before that


def monitored_barrier(
    group: dist.ProcessGroup | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """A barrier that names the ranks which do not come, as `torch.distributed.monitored_barrier` does. torch's function
    refuses every backend but gloo by name.

    timeout: seconds or timedelta, by default the group's.
    wait_all_ranks: rank 0 names all missing ranks, not only the first.

    Raises Timeout: on rank 0 it names the missing ranks, on the others it has rank 0's result. The barrier goes through
    the store, so it works while the group is stuck and leaves the group usable. It takes milliseconds. On ranks outside
    of the group it does nothing.
    """
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    where: Any = group if group is not None else dist.distributed_c10d._get_default_group()
    limit = {} if timeout is None else {"timeout": as_timedelta(timeout)}
    where.monitored_barrier(**limit, wait_all_ranks=wait_all_ranks)
