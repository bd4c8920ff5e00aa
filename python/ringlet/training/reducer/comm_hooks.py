"""Communication hooks with DDP's interface: a bucket as they see it, and the handle of one under way.

A hook is `hook(state, bucket) -> Future[Tensor]`, as for DistributedDataParallel.register_comm_hook; those of
torch.distributed.algorithms.ddp_comm_hooks run unchanged. The next bucket's hook is called only when the future of the
one before is complete: hooks such as PowerSGD's start more collectives when their first is done, and ranks would start
these in different orders beside other buckets'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ringlet.errors import InvalidUsage

Hook = Callable[[Any, "GradBucket"], "torch.futures.Future[torch.Tensor]"]


class GradBucket:
    """What torch.distributed.GradBucket is: the flat gradients of one bucket, in the order of their arrival.

    `buffer()` is one-dimensional and what hooks reduce; it has short gaps of zeros between gradients.
    """

    def __init__(
        self,
        index: int,
        last: bool,
        buffer: torch.Tensor,
        gradients: list[torch.Tensor],
        parameters: list[torch.Tensor],
    ) -> None:
        self._index, self._last, self._buffer = index, last, buffer
        self._gradients, self._parameters = gradients, parameters

    def index(self) -> int:
        """Place of the bucket in the order in which buckets are reduced."""
        return self._index

    def is_last(self) -> bool:
        """Whether it is the last one of this backward."""
        return self._last

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replaces what `buffer()` returns, for hooks around hooks; `gradients()` stay what they were."""
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        """Views of the original buffer in the parameters' shapes."""
        return self._gradients

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters


class HookWork:
    """A bucket's hook under way. `wait` leaves its result in `buffer`."""

    def __init__(self, future: Any, buffer: torch.Tensor) -> None:
        if not isinstance(future, torch._C.Future):
            kind = type(future).__name__
            raise InvalidUsage(f"the communication hook returned a {kind}; it must return a torch.futures.Future")
        self._future, self._buffer, self._delivered = future, buffer, False

    def get_future(self) -> Any:
        return self._future

    def is_completed(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        result = self._future.wait()
        if self._delivered:
            return
        if isinstance(result, (list, tuple)):
            result = result[0]
        if self._buffer.is_complex() and not result.is_complex() and result.numel() == 2 * self._buffer.numel():
            result = torch.view_as_complex(result.reshape(-1, 2))  # as torch's all_reduce gives it to its future
        if result.numel() != self._buffer.numel():
            raise InvalidUsage(
                f"the communication hook returned {result.numel()} elements for a bucket of {self._buffer.numel()}"
            )
        if result.data_ptr() != self._buffer.data_ptr() or result.dtype != self._buffer.dtype:
            self._buffer.copy_(result.view(-1))
        self._delivered = True
