"""Communication hooks with DDP's interface: a bucket as a hook sees it, and the handle of a hook under way.

A hook is `hook(state, bucket) -> Future[Tensor]`, as for DistributedDataParallel.register_comm_hook. The hooks of
torch.distributed.algorithms.ddp_comm_hooks run unchanged. Some hooks, such as PowerSGD's, start more collectives when
their first one is complete. Beside other buckets' hooks, ranks would start these in different orders. So the next
bucket's hook starts only when the future of the previous one is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ringlet.errors import InvalidUsage

Hook = Callable[[Any, "GradBucket"], "torch.futures.Future[torch.Tensor]"]


class GradBucket:
    """Has the methods of torch.distributed.GradBucket: the flat gradients of one bucket, in the order of their arrival.

    Hooks reduce `buffer()`, which is one-dimensional and has short gaps of zeros between gradients.
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
        """Position of the bucket in the order in which buckets are reduced."""
        return self._index

    def is_last(self) -> bool:
        """Whether it is the last bucket of this backward."""
        return self._last

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replaces the result of `buffer()`, for hooks around hooks. `gradients()` does not change."""
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
