"""Waits of torch's own in which Python hears no signal, made such that it does."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")
_PIECE_S = 0.05


def call(function: Callable[[], T]) -> T:
    """`function()`, on a thread of its own. Where the wait for it is interrupted, that thread is left behind."""
    outcome: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((function(), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=run, name="ringlet-call", daemon=True).start()
    value, error = outcome.get()
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def wait_for_key(store: Store, key: str, until: float) -> bool:
    """Whether the key is in the store by then (time.monotonic())."""
    while True:
        # c10d says that a key did not come by DistStoreError, a FileStore by a plain RuntimeError.
        left = until - time.monotonic()
        with contextlib.suppress(RuntimeError):
            store.wait([key], timedelta(seconds=max(0.001, min(left, _PIECE_S))))
        if store.check([key]):
            return True
        if left <= _PIECE_S:
            return False
