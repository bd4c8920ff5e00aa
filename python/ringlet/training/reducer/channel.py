"""Sends a bucket: by an averaging all-reduce (by the group's algorithm or a named one), or by a user's hook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ringlet import log
from ringlet.backend import backend_of
from ringlet.errors import InvalidUsage
from ringlet.training.call_labels import BucketLabels, set_call_label
from ringlet.training.refusals import listed

from .buckets import Bucket
from .comm_hooks import GradBucket, Hook, HookWork
from .flat_gradients import FlatBucket

# More ranks wait for each other longer at each message: 4 on 2 processors gained nothing.
MOST_RANKS_IN_PLACE = 2


class Channel:
    """Starts the reductions of one reducer's buckets in `group`. If `hook` is set, it replaces the all-reduce."""

    def __init__(self, group: dist.ProcessGroup, algorithm: str | None, labels: BucketLabels) -> None:
        self.group, self.algorithm, self.labels = group, algorithm, labels
        self._hook: tuple[Any, Hook] | None = None
        self._known: dict[torch.device, tuple[bool, bool]] = {}
        self._under_way: HookWork | None = None

    def in_place(self, device: torch.device) -> bool:
        """Whether every gradient is reduced by itself, where autograd has put it. To copy gradients into a bucket costs
        more than a message does if few ranks read each other's memory."""
        return self._traits(device)[0] and not self.hooked

    def overlaps(self, device: torch.device) -> bool:
        """Whether a reduction that starts during the backward takes no processor from it. If it does, and each gradient
        is a message of its own, it gains nothing by an early start."""
        return self._traits(device)[1]

    def _traits(self, device: torch.device) -> tuple[bool, bool]:
        if device not in self._known:
            backend = backend_of(self.group, device)
            near = getattr(backend, "transport", None) in ("shared_memory", "threads")
            few = device.type == "cpu" and dist.get_world_size(self.group) <= MOST_RANKS_IN_PLACE
            self._known[device] = near and few, bool(getattr(backend, "overlaps", True))
        return self._known[device]

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
                f"{backend.name()}: leave algorithm=None, or init_process_group('ringlet')"
            )
        before, backend.algorithm = backend.algorithm, self.algorithm  # raises for an unknown name
        backend.algorithm = before

    def free(self) -> bool:
        """Whether the next bucket may start without waiting."""
        return self._under_way is None or self._under_way.is_completed()

    def start(
        self,
        bucket: FlatBucket,
        last: bool,
        tensors: list[torch.Tensor] | None,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.AVG,
        waits: bool = False,
    ) -> Any:
        """Starts the average of `bucket`; returns a handle with wait(), is_completed() and get_future().

        `tensors`: what is reduced instead of the bucket's buffer, each by itself, in place. With `waits` the calling
        thread runs these messages at once, which is the shortest way.
        """
        if self._hook is not None and tensors is None:
            return self._call_hook(*self._hook, bucket, last)
        reduced = bucket.buffer if tensors is None else tensors
        narrow = tensors is None and bucket.buffer.dtype is torch.float16
        if narrow and backend_of(self.group, bucket.device).name() == "gloo":
            bucket.buffer.div_(dist.get_world_size(self.group))  # gloo's average overflows where the sum does
            op = dist.ReduceOp.SUM
        set_call_label(self.labels.of(bucket.number))
        try:
            return self.all_reduce(reduced, op, waits)
        finally:
            set_call_label(0)

    def all_reduce(self, reduced: torch.Tensor | list[torch.Tensor], op: Any, waits: bool = False) -> Any:
        """Starts the all-reduce of a tensor, or of several that are messages of their own."""
        device = (reduced if isinstance(reduced, torch.Tensor) else reduced[0]).device
        backend = backend_of(self.group, device)
        before = None if self.algorithm is None else backend.algorithm
        try:
            if before is not None:
                backend.algorithm = self.algorithm
            if isinstance(reduced, torch.Tensor):
                return dist.all_reduce(reduced, op, self.group, async_op=True)
            options = dist.AllreduceCoalescedOptions()
            options.reduceOp = dist.ReduceOp(op)
            options.asyncOp = not waits
            return backend.allreduce_coalesced(reduced, options)
        finally:
            if before is not None:
                backend.algorithm = before

    def _call_hook(self, state: Any, hook: Hook, bucket: FlatBucket, last: bool) -> HookWork:
        if self._under_way is not None and not self._under_way.is_completed():
            self._under_way.wait()  # whoever waits for its bucket gets the error of one that is over
        views, parameters = [g.view.detach() for g in bucket.members], [g.parameter for g in bucket.members]
        seen = GradBucket(bucket.number, last, bucket.buffer, views, parameters)  # type: ignore[arg-type]
        self._under_way = HookWork(hook(state, seen), bucket.buffer)
        return self._under_way

    def tell_layout(self, plan: Sequence[Bucket], how: str) -> None:
        """Tells the log of the buckets."""
        sizes = [f"{bucket.nbytes / 2**20:.2f}" for bucket in plan]
        parameters = sum(len(bucket.slots) for bucket in plan)
        self.tell(f"{parameters} parameters in buckets {how}: {listed(sizes, 8)} MiB")

    def tell(self, text: str) -> None:
        place = dist.get_rank(self.group), dist.get_world_size(self.group)
        log.configure(*place)  # the group may be another backend's, which does not
        log.info(f"GradientReducer: {text}", *place)
