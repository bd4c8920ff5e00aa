"""Sends a bucket: by an averaging all-reduce (by the group's algorithm or a named one), or by a user's hook."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ringlet.backend import backend_of
from ringlet.errors import InvalidUsage

from .comm_hooks import GradBucket, Hook, HookWork
from .flat_gradients import FlatBucket


class Channel:
    """Starts the reductions of one reducer's buckets in `group`. If `hook` is set, it replaces the all-reduce."""

    def __init__(self, group: dist.ProcessGroup, algorithm: str | None) -> None:
        self.group, self.algorithm = group, algorithm
        self._hook: tuple[Any, Hook] | None = None
        self._under_way: HookWork | None = None

    @property
    def hooked(self) -> bool:
        return self._hook is not None

    def set_hook(self, state: Any, hook: Hook) -> None:
        self._hook = (state, hook)

    def check_algorithm(self, device: torch.device) -> None:
        if self.algorithm is None:
            return
        backend = backend_of(self.group, device)
        if not hasattr(backend, "algorithm"):
            raise InvalidUsage(
                f"algorithm={self.algorithm!r} needs a group on the ringlet backend, and this group is on "
                f"{dist.get_backend(self.group)}: leave algorithm=None, or init_process_group('ringlet')"
            )
        before, backend.algorithm = backend.algorithm, self.algorithm  # raises for an unknown name
        backend.algorithm = before

    def free(self) -> bool:
        """Whether the next bucket may start without waiting."""
        return self._under_way is None or self._under_way.is_completed()

    def start(self, bucket: FlatBucket, place: int, last: bool) -> Any:
        """Starts the average of `bucket`; returns a handle with wait(), is_completed() and get_future()."""
        if self._hook is None:
            return self.all_reduce(bucket.buffer, dist.ReduceOp.AVG)
        if self._under_way is not None:
            self._under_way.wait()
        state, hook = self._hook
        views, parameters = [g.view.detach() for g in bucket.members], [g.parameter for g in bucket.members]
        seen = GradBucket(place, last, bucket.buffer, views, parameters)  # type: ignore[arg-type]
        self._under_way = HookWork(hook(state, seen), bucket.buffer)
        return self._under_way

    def all_reduce(self, buffer: torch.Tensor, op: Any) -> Any:
        if self.algorithm is None:
            return dist.all_reduce(buffer, op, self.group, async_op=True)
        backend = backend_of(self.group, buffer.device)
        before, backend.algorithm = backend.algorithm, self.algorithm
        try:
            return dist.all_reduce(buffer, op, self.group, async_op=True)
        finally:
            backend.algorithm = before
