"""Waits in torch in which Python handles no signals, made interruptible."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")
_LEAST_PAUSE_S, _LARGEST_PAUSE_S = 2e-4, 2e-2


def call(function: Callable[[], T]) -> T:
    """`function()`, on a thread of its own. If the wait is interrupted, that thread is left behind."""
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
    pause = _LEAST_PAUSE_S  # a store's own wait hears no signal, and a short one that ends in vain prints warnings
    while not store.check([key]):
        if time.monotonic() > until:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LARGEST_PAUSE_S)
    return True
