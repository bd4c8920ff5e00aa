"""ringlet: collective communication for PyTorch, as schedules that are data.

`import ringlet` registers the torch.distributed backend "ringlet" and does nothing else.
"""

from ringlet import extension

extension.choose(__path__)  # before any module below imports ringlet._C

from ringlet import agreement, schedule, settings  # noqa: F401  (agreement tells _C of itself)
from ringlet import backend as _backend
from ringlet._C import BackendOptions, Work, build_info
from ringlet.backend import monitored_barrier
from ringlet.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    butterfly_allreduce,
    gather,
    is_registered,
    recv,
    reduce,
    reduce_scatter,
    ring_allreduce,
    scatter,
    send,
)
from ringlet.errors import DeviceError, Error, InvalidUsage, PeerLost, ResourceError, Timeout
from ringlet.group import Group, current, finalize, init, new_group
from ringlet.memory import empty, registered_pool, use_registered_allocator
from ringlet.schedule.registry import algorithm
from ringlet.spawn import spawn
from ringlet.summation import assert_one_order, assert_same_order, reveal
from ringlet.training.reducer import GradientReducer
from ringlet.training.zero import Offload, Zero

_backend.register()


def __dir__() -> list[str]:
    return sorted(__all__)


__version__: str = build_info()["ringlet"]  # pyproject.toml has it

__all__ = [
    "BackendOptions",
    "DeviceError",
    "Error",
    "GradientReducer",
    "Group",
    "InvalidUsage",
    "Offload",
    "PeerLost",
    "ResourceError",
    "Timeout",
    "Work",
    "Zero",
    "algorithm",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "assert_one_order",
    "assert_same_order",
    "barrier",
    "broadcast",
    "butterfly_allreduce",
    "current",
    "empty",
    "finalize",
    "gather",
    "init",
    "is_registered",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "registered_pool",
    "reveal",
    "ring_allreduce",
    "scatter",
    "schedule",
    "send",
    "settings",
    "spawn",
    "use_registered_allocator",
]
